import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from astraflow.config import Config, Use, parse_config
from astraflow.errors import ConfigError
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.workflows.config import SingleTurnConfig, SolveAndVerifyConfig, WorkflowConfig
from astraflow.workflows.factory import is_replayable, make_workflow
from drivers.installed_workflows import CONFIGS, FUNCTIONS
from drivers.rollout_fakes import ScriptedEngine, exact, make_policy, make_task
from drivers.workflow_driver import letter_renderer

OWN = '''
from astraflow.workflows.calls import ToolCall

async def own(task, policies, *, rounds=2):
    return rounds

def plain(task, policies):
    pass

def shift(number: int, *, by: int = 1) -> int:
    """Adds `by`."""
    return number + by

def read(text, *, word="shift"):
    return [ToolCall("shift", {"number": 3})] if text == word else []

nothing = 3
'''


class Section(Config):
    """A recipe with nothing but a workflow."""

    workflow: WorkflowConfig


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_workflows.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_workflows", None)
    return "own_workflows"


def parsed(**workflow: Any) -> WorkflowConfig:
    return parse_config({"workflow": workflow}, Section).workflow


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_config_has_exactly_the_arguments_of_its_function(name: str) -> None:
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    keywords = {
        p.name: PydanticUndefined if p.default is p.empty else p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    }
    fields = {key: field.default for key, field in CONFIGS[name].model_fields.items() if key != "name"}
    assert fields == keywords


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"agent", "search", "tool_use"}))
def test_the_name_alone_is_a_whole_config(name: str) -> None:
    assert make_workflow(parsed(name=name)).keywords  # pyright: ignore[reportFunctionMemberAccess]


def test_workflows_that_depend_on_code_of_the_users_do_not_pass_for_replayable(module: str) -> None:
    replayable = {name for name, config in CONFIGS.items() if config.is_replayable}
    assert set(FUNCTIONS) - replayable - {"agent"} == {"environment", "tool_use"}
    assert is_replayable(parsed(name="multi_turn"))
    assert not is_replayable(parsed(name="environment"))
    assert not is_replayable(Use(use=f"{module}:own"))


async def test_a_workflow_of_the_users_own_gets_its_arguments(module: str) -> None:
    workflow = make_workflow(Use(use=f"{module}:own", args={"rounds": 5}))
    assert await workflow(None, {}) == 5  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("use", "args", "message"),
    [
        ("own", {"round": 5}, 'did you mean "rounds"'),
        ("plain", {}, "not an async function"),
        ("absent", {}, "no 'absent'"),
    ],
)
def test_a_wrong_workflow_is_refused_by_name(
    module: str, use: str, args: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_workflow(Use(use=f"{module}:{use}", args=args))


# --- tools ----------------------------------------------------------------------------------------


async def test_a_recipe_names_tools_and_a_parser_of_its_own(module: str) -> None:
    workflow = make_workflow(
        parsed(
            name="tool_use",
            tools=[{"name": "use", "use": f"{module}:shift", "args": {"by": 2}}],
            parser={"name": "use", "use": f"{module}:read", "args": {"word": "go"}},
        )
    )
    replies = ["go", "5"]
    engine = ScriptedEngine(lambda request: replies.pop(0))
    hosted = HostedPolicy(make_policy("actor"), engine, letter_renderer())
    episode = await EpisodeRunner({"actor": hosted}, workflow, exact).episode(make_task(), seed=1)
    assert [m.content for m in episode.messages] == ["2+3", "go", "5", "5"]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (["nothing"], r"workflow\.tools\.0\.use = .* is not a function"),
        (["shift", "shift"], "two tools are named 'shift'"),
        (["absent"], r"workflow\.tools\.0\.use = .*no 'absent'"),
    ],
)
def test_tools_that_cannot_be_are_refused_at_the_start(module: str, tools: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_workflow(parsed(name="tool_use", tools=[{"name": "use", "use": f"{module}:{t}"} for t in tools]))


# --- configs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        ({"name": "tool_use", "tools": []}, "workflow.tools"),
        (
            {"name": "multi_turn", "feedback": "no {answer}"},
            r"\{answer\} is not a placeholder.*choices: \{score\}",
        ),
        ({"name": "multi_turn", "feedback": "no }"}, "a brace that stands for itself is written twice"),
        ({"name": "solve_and_verify", "team_share": 1.5}, "team_share"),
        ({"name": "solve_and_verify", "approve": "Y", "reject": "y"}, "stands for both choices"),
        ({"name": "solve_and_verfy"}, 'did you mean "solve_and_verify"'),
    ],
)
def test_a_wrong_setting_is_refused(workflow: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(**workflow)


def test_roles_are_filled_by_place_and_the_last_policy_plays_the_rest() -> None:
    assert SingleTurnConfig().acting(("a", "b")) == {"policy": "a"}
    assert SolveAndVerifyConfig().acting(("a", "b")) == {"solver": "a", "verifier": "b"}
