"""The workflows `agent` and `hosted` in a recipe."""

from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.agents.config import AgentConfig, HostedConfig
from astraflow.config import Config, parse_config
from astraflow.errors import ConfigError
from astraflow.workflows.config import WorkflowConfig
from astraflow.workflows.factory import is_replayable, make_workflow


class Section(Config):
    """A recipe with nothing but a workflow."""

    workflow: WorkflowConfig


def parsed(**workflow: Any) -> WorkflowConfig:
    return parse_config({"workflow": workflow}, Section).workflow


def test_neither_is_replayable_nor_needs_the_recipes_reward() -> None:
    agent = parsed(name="agent", run={"name": "program", "command": ["my-agent", "a b"], "box": "sandbox"})
    host = parsed(name="hosted", python="python3", serve="verifiers")
    assert isinstance(agent, AgentConfig)
    assert isinstance(host, HostedConfig)
    for config in (agent, host):
        assert not is_replayable(config)
        assert config.rewards_itself
    assert (agent.commands, agent.needs_sandbox) == (("my-agent 'a b'",), True)
    assert (host.commands, host.needs_sandbox) == (("python3 verifiers",), False)


def test_an_agent_that_is_a_function_starts_no_program() -> None:
    agent = parsed(name="agent", run={"name": "use", "use": "my_agent:solve"})
    assert isinstance(agent, AgentConfig)
    assert (agent.commands, agent.needs_sandbox) == ((), False)
    assert agent.acting(("a", "b")) == {"model a": "a", "model b": "b"}


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
