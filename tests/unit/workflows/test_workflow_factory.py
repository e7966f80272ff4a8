import inspect
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic_core import PydanticUndefined

from astraflow.config import Config, Use, Variant, parse_config
from astraflow.errors import ConfigError
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.workflows.config import (
    DebateConfig,
    HostedConfig,
    RouteConfig,
    SingleTurnConfig,
    SolveAndVerifyConfig,
    WorkflowConfig,
)
from astraflow.workflows.factory import WORKFLOWS, is_replayable, make_workflow
from astraflow.workflows.roles import PolicyRoles
from drivers.rollout_fakes import ScriptedEngine, exact, make_policy, make_task
from drivers.workflow_driver import letter_renderer

CONFIGS: dict[str, type[PolicyRoles]] = {
    config.model_fields["name"].default: config
    for config in get_args(get_args(WorkflowConfig)[0])
    if config not in (Use, HostedConfig) and not issubclass(config, Variant)
}

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


def test_every_workflow_has_a_config() -> None:
    assert sorted(CONFIGS) == sorted(WORKFLOWS)


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_config_has_exactly_the_arguments_of_its_function(name: str) -> None:
    parameters = inspect.signature(WORKFLOWS[name]).parameters.values()
    keywords = {
        p.name: PydanticUndefined if p.default is p.empty else p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    }
    fields = {key: field.default for key, field in CONFIGS[name].model_fields.items() if key != "name"}
    assert fields == keywords


@pytest.mark.parametrize("name", sorted(set(WORKFLOWS) - {"agent", "search", "tool_use"}))
def test_the_name_alone_is_a_whole_config(name: str) -> None:
    assert make_workflow(parsed(name=name)).keywords  # pyright: ignore[reportFunctionMemberAccess]


def test_a_host_needs_a_python_that_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*/bin/python; make the environment"):
        make_workflow(parsed(name="hosted", python=str(tmp_path), serve="verifiers"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"serve": "verifier"}, 'did you mean "verifiers"'),
        ({"serve": "games.Games"}, 'not of the form "module:attr"'),
        ({"serve": "verifiers", "keeps_env": ["ASTRAFLOW_TOKEN"]}, "belongs to the service"),
    ],
)
def test_a_section_of_a_host_is_checked(section: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(name="hosted", python="python3", **section)


def test_workflows_that_depend_on_code_of_the_users_do_not_pass_for_replayable(module: str) -> None:
    replayable = {name for name, config in CONFIGS.items() if config.is_replayable}
    assert set(WORKFLOWS) - replayable == {"agent", "environment", "tool_use"}
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
        ({"name": "route", "small_choice": "a", "large_choice": "A"}, "stands for both choices"),
        ({"name": "debate", "num_debaters": 1}, "num_debaters"),
        ({"name": "solve_and_verfy"}, 'did you mean "solve_and_verify"'),
    ],
)
def test_a_wrong_setting_is_refused(workflow: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(**workflow)


def test_roles_are_filled_by_place_and_the_last_policy_plays_the_rest() -> None:
    assert SingleTurnConfig().acting(("a", "b")) == {"policy": "a"}
    assert SolveAndVerifyConfig().acting(("a", "b")) == {"solver": "a", "verifier": "b"}
    assert RouteConfig(small="c").acting(("a", "b")) == {"router": "a", "small": "c", "large": "b"}
    assert list(DebateConfig(num_debaters=3).acting(("a", "b")).values()) == ["a", "b", "a"]


def test_settings_of_the_sandbox_need_the_sandbox() -> None:
    run: dict[str, Any] = {"name": "program", "command": ["my-agent"], "sandbox": {"disk_mb": 64}}
    section = {"workflow": {"name": "agent", "run": run}}
    with pytest.raises(ConfigError, match=r"sandbox is set, but box = preferred; set box: sandbox"):
        parse_config(section, Section)
    run["box"] = "sandbox"
    parse_config(section, Section)
    run["sandbox"] = {"memory_mb": 1}
    with pytest.raises(ConfigError, match=r"memory_mb"):
        parse_config(section, Section)
