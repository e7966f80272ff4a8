"""The workflow `tool_use` in a recipe: tools and parsers of the user's own."""

import sys
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.tiny_models.tools_template import with_tools
from astraflow.addons.tools.config import ToolUseConfig
from astraflow.config import Config, parse_config
from astraflow.errors import ConfigError
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.factory import make_workflow
from drivers.chat_folders import CHATML, make_folder
from drivers.rollout_fakes import ScriptedEngine, exact, make_policy, make_task
from drivers.workflow_driver import letter_renderer

OWN = '''
from astraflow.workflows.calls import ToolCall

def shift(number: int, *, by: int = 1) -> int:
    """Adds `by`."""
    return number + by

def read(text, *, word="shift"):
    return [ToolCall("shift", {"number": 3})] if text == word else []

nothing = 3
'''


class Section(Config):
    """A recipe with nothing but a workflow."""

    workflow: ToolUseConfig


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_tools.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_tools", None)
    return "own_tools"


def made(**settings: Any) -> Workflow:
    section = {"workflow": {"name": "tool_use", **settings}}
    return make_workflow(parse_config(section, Section).workflow)


async def test_a_recipe_names_tools_and_a_parser_of_its_own(module: str) -> None:
    workflow = made(
        tools=[{"name": "use", "use": f"{module}:shift", "args": {"by": 2}}],
        parser={"name": "use", "use": f"{module}:read", "args": {"word": "go"}},
    )
    replies = ["go", "5"]
    engine = ScriptedEngine(lambda request: replies.pop(0))
    hosted = HostedPolicy(make_policy("actor"), engine, letter_renderer())
    episode = await EpisodeRunner({"actor": hosted}, workflow, exact).episode(make_task(), seed=1)
    assert [m.content for m in episode.messages] == ["2+3", "go", "5", "5"]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (["nothing"], r"workflow\.tools\.0\.use = .* cannot be called"),
        (["shift", "shift"], "two tools are named 'shift', so a call could mean either; rename one"),
        (["absent"], r"workflow\.tools\.0\.use = .*no 'absent'"),
    ],
)
def test_tools_that_cannot_be_are_refused_at_the_start(module: str, tools: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(tools=[{"name": "use", "use": f"{module}:{t}"} for t in tools])


def test_no_tools_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workflow\.tools"):
        made(tools=[])


def test_a_template_without_tools_is_refused_before_a_run(module: str, tmp_path: Path) -> None:
    tools = [{"name": "use", "use": f"{module}:shift"}]
    config = parse_config({"workflow": {"name": "tool_use", "tools": tools}}, Section).workflow
    folder = make_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"policies.actor.model = .*does not show the tool 'shift'"):
        config.check_templates({"actor": (folder, {}, "auto")})
    make_folder(tmp_path, template=with_tools(CHATML))
    config.check_templates({"actor": (folder, {}, "auto")})
