"""A workflow with roles that a stranger's package adds, as docs/extend/workflow.md shows it."""

import sys
from pathlib import Path

import pytest

from astraflow.config import Config, Use, parse_config, with_installed
from astraflow.errors import ConfigError
from astraflow.rollout.runner import EpisodeRunner
from astraflow.workflows.factory import is_replayable, make_workflow
from astraflow.workflows.variant import WorkflowVariant
from drivers.rollout_fakes import ScriptedEngine, exact, make_hosted, make_task

ROOT = Path(__file__).parents[3]
MODULE = """
from typing import Annotated, ClassVar, Literal

from astraflow.workflows.conversation import Rewards, Workflow
from astraflow.workflows.roles import policy_at
from astraflow.workflows.variant import PolicyRoles, template


async def review(task, policies, *, writer, reviewer, grade_prompt):
    rewards = Rewards()
    text = await policy_at(policies, writer, 0).chat(task.prompt, role="writer")
    grade = await policy_at(policies, reviewer, 1).chat(grade_prompt.format(text=text.text), role="reviewer")
    rewards.add(text, await task.score(grade.text))
    return rewards


"""


def test_the_page_and_its_entry_point_name_the_same_class(own_package: type[Config]) -> None:
    toml = (ROOT / "docs" / "extend" / "workflow.md").read_text().partition("```toml")[2]
    assert 'entry-points."astraflow.workflows"]\nreview = "my_package.config:ReviewConfig"' in toml
    assert "ReviewConfig" in str(own_package.model_fields["workflow"].annotation)


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Config]:
    """A recipe with nothing but a workflow, where the package of the page is installed."""
    page = (ROOT / "docs" / "extend" / "workflow.md").read_text()
    shown = page.partition("class ReviewConfig")[2].partition("```")[0]
    (tmp_path / "strangers_review.py").write_text(f"{MODULE}class ReviewConfig{shown}")
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[astraflow.tests]\nreview = strangers_review:ReviewConfig\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "strangers_review", raising=False)
    choice = with_installed(WorkflowVariant | Use, "astraflow.tests")
    return type("Section", (Config,), {"__annotations__": {"workflow": choice}})


async def test_it_is_checked_and_played_like_a_built_in_one(own_package: type[Config]) -> None:
    config = parse_config({"workflow": {"name": "review", "reviewer": "judge"}}, own_package)
    workflow = config.model_dump()["workflow"]
    assert workflow["reviewer"] == "judge"
    section = config.workflow  # pyright: ignore[reportAttributeAccessIssue]
    assert section.acting(("actor", "judge", "other")) == {"writer": "actor", "reviewer": "judge"}
    assert not is_replayable(section)
    hosted = {
        "actor": make_hosted("actor", ScriptedEngine("4", max_context=4096)),
        "judge": make_hosted("judge", ScriptedEngine("5", max_context=4096)),
    }
    async with EpisodeRunner(hosted, make_workflow(section), exact) as runner:
        episode = await runner.episode(make_task(), seed=1)
    assert [(t.role, t.reward) for t in episode.trajectories] == [("writer", 1.0), ("reviewer", 0.0)]
    with pytest.raises(ConfigError, match=r"\{answer\} is not a placeholder"):
        parse_config({"workflow": {"name": "review", "grade_prompt": "{answer}"}}, own_package)
