"""Environments as task sources and as scorers."""

from typing import Any

import pytest

from astraflow.addons.math.config import MathVerifyReward
from astraflow.config import parse_config
from astraflow.errors import ConfigError, DataError
from astraflow.tasks.config import EnvironmentConfig, EnvironmentSourceConfig, TasksConfig
from astraflow.tasks.environment import (
    check_environments,
    make_environment,
    with_environment,
    without_environment,
)
from astraflow.tasks.rewards import make_reward
from astraflow.tasks.sources import make_source
from astraflow.types import Task
from drivers.environment_fakes import Counting, Plain, config_of

SOURCE = EnvironmentSourceConfig(split="train")


def tasks(**settings: Any) -> TasksConfig:
    return TasksConfig(sources={"sums": SOURCE}, environments={"plain": config_of(Plain)}, **settings)


def test_tasks_of_a_split_get_the_sources_name_and_keep_their_spec() -> None:
    source = make_source(SOURCE, name="sums", environments={"plain": config_of(Plain, size=2)})
    assert len(source) == 2
    task = source.task(1)
    assert (task.id, task.source, task.prompt) == ("sums/train-1", "sums", "1?")
    environment, own = without_environment(task)
    assert (environment, own.spec) == ("plain", "1")


def test_a_task_of_no_environment_is_left_alone() -> None:
    for spec in ("", '{"kind": "reasoning_gym"}', "[1, 2]", "no json", '"environment"'):
        task = Task(id="a", source="s", prompt="p", spec=spec)
        assert without_environment(task) == ("", task)
        assert with_environment(task, "") is task
        assert without_environment(with_environment(task, "mine")) == ("mine", task)


def test_its_scoring_is_the_reward_of_its_tasks() -> None:
    config = tasks()
    task = make_source(SOURCE, name="sums", environments=config.environments).task(2)
    reward = make_reward(config)
    assert (reward(task, "2!"), reward(task, "2")) == (1.0, 0.0)


def test_a_reward_of_the_recipe_goes_before_the_environments() -> None:
    config = tasks(reward=MathVerifyReward())
    task = make_source(SOURCE, name="sums", environments=config.environments).task(2)
    with pytest.raises(DataError, match="has no answer to compare with"):
        make_reward(config)(task, "2!")


def test_an_environment_that_the_recipe_lacks_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"sources\.sums: the recipe has no environments; add one under tasks\."
    ):
        parse_config({"sources": {"sums": {"name": "environment"}}}, TasksConfig)
    environments = {"plain": {"use": "collections:Counter"}, "other": {"use": "collections:Counter"}}
    for source, message in (
        ({"environment": "plane"}, r"sources\.sums: environment = 'plane' is not one .*did you mean .plain"),
        ({}, r"sources\.sums: `environment` is empty; name one of tasks\.environments .*other, plain"),
    ):
        given = {"sources": {"sums": {"name": "environment", **source}}, "environments": environments}
        with pytest.raises(ConfigError, match=message):
            parse_config(given, TasksConfig)
    with pytest.raises(ConfigError, match=r"'other' is not one of tasks\.environments \(choices: plain\)"):
        make_source(EnvironmentSourceConfig(environment="other"), environments={"plain": config_of(Plain)})
    with pytest.raises(ConfigError, match="`environment` is empty"):
        make_source(EnvironmentSourceConfig(), environments={"a": config_of(Plain), "b": config_of(Plain)})
    task = with_environment(Task(id="a", source="s", prompt="p"), "other")
    with pytest.raises(DataError, match=r"environment 'other', which is not one of tasks\.environments"):
        make_reward(tasks())(task, "2!")


def test_what_is_no_environment_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="made a Counter without tasks, score, open, close; subclass"):
        make_environment("mine", EnvironmentConfig(use="collections:Counter"))
    with pytest.raises(ConfigError, match=r'args\.sizes is not an argument; did you mean "size"'):
        make_environment("mine", config_of(Plain, sizes=1))


def test_an_exit_while_tasks_are_made_is_an_error_of_the_data() -> None:
    with pytest.raises(DataError, match=r"tasks\('exits'\) called exit\(3\)"):
        make_source(EnvironmentSourceConfig(split="exits"), environments={"plain": config_of(Plain)})


def test_a_workflow_that_plays_needs_environments_that_can_be_played() -> None:
    check_environments(tasks(), played={})
    with pytest.raises(ConfigError, match=r"environments\.plain: Plain lacks `reset`, `step` or `end`"):
        check_environments(tasks(), played={"tasks.sources.sums": SOURCE})
    playable = TasksConfig(sources={"sums": SOURCE}, environments={"count": config_of(Counting)})
    check_environments(playable, played={"tasks.sources.sums": SOURCE})
    with pytest.raises(ConfigError, match=r"eval\.sets\.a\.source: .* this source is not an environment"):
        check_environments(playable, played={"eval.sets.a.source": config_of(Plain)})
