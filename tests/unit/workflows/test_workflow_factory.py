import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from astraflow.config import Config, Use, parse_config
from astraflow.errors import ConfigError
from astraflow.workflows.config import SingleTurnConfig, WorkflowConfig
from astraflow.workflows.factory import is_replayable, make_workflow
from drivers.installed_workflows import CONFIGS, FUNCTIONS

OWN = """
async def own(task, policies, *, rounds=2):
    return rounds

def plain(task, policies):
    pass

"""


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


# --- configs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        (
            {"name": "multi_turn", "feedback": "no {answer}"},
            r"\{answer\} is not a placeholder.*choices: \{score\}",
        ),
        ({"name": "multi_turn", "feedback": "no }"}, "write a literal brace twice"),
        ({"name": "multi_trun"}, 'did you mean "multi_turn"'),
    ],
)
def test_a_wrong_setting_is_refused(workflow: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(**workflow)


def test_the_first_policy_plays_the_first_role() -> None:
    assert SingleTurnConfig().acting(("a", "b")) == {"policy": "a"}
