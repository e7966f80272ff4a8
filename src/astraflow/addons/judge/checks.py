"""Checks before a run that judges are frozen, and that rewards that compare answers get several."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from astraflow.addons.judge.compare_config import CompareAnswersConfig, RankConfig
from astraflow.config import Use, load_component
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_plan import scoring_tasks
from astraflow.run.checks import Check, Examined
from astraflow.tasks.config import RewardConfig, TrlReward, VerlReward, WeightedReward, judges_of
from astraflow.tasks.own_rewards import check_own_reward
from astraflow.tasks.variants import RowsConfig
from astraflow.user_input.mistakes import hint

__all__ = ["JUDGES_CHECK"]


def _check_judges(examined: Examined) -> None:
    recipe = examined.recipe
    for where, tasks in scoring_tasks(recipe).items():
        for judge in judges_of(tasks).values():
            if judge.judging_policy:
                examined.collect("judges", _check_frozen, recipe, f"{where}.reward", judge.judging_policy)
        for place, use in _own_functions(tasks.reward, f"{where}.reward"):
            if use.use not in examined.broken:
                examined.collect("judges", _check_scores_one, use, place)
    for where, workflow in _comparisons(recipe):
        compare = workflow.compare
        if isinstance(compare, RankConfig):
            if compare.policy in recipe.policies:
                examined.collect("judges", _check_frozen, recipe, f"{where}.compare", compare.policy)
        elif compare.use not in examined.broken:
            examined.collect("judges", _check_function, recipe, compare, f"{where}.compare")


JUDGES_CHECK = Check("judges", ("recipe",), _check_judges)


def _comparisons(recipe: Recipe) -> Iterator[tuple[str, CompareAnswersConfig]]:
    """The workflows that compare answers, with their places in the recipe."""
    sets = {f"eval.sets.{name}.workflow": config.workflow for name, config in recipe.eval.sets.items()}
    for where, workflow in {"workflow": recipe.workflow, **sets}.items():
        if isinstance(workflow, CompareAnswersConfig):
            yield where, workflow


def _own_functions(reward: RewardConfig, where: str) -> Iterator[tuple[str, Use]]:
    """The user's own functions in a reward that have AstraFlow's form, with their places."""
    parts = {where: reward}
    if isinstance(reward, WeightedReward):
        parts = {f"{where}.rewards.{name}": part for name, part in reward.rewards.items()}
    for place, part in parts.items():
        if isinstance(part, Use) and not isinstance(part, TrlReward | VerlReward):
            yield place, part


def _check_frozen(recipe: Recipe, where: str, name: str) -> None:
    """Checks that a judge is a policy whose weights don't change. Raises: ConfigError if it isn't."""
    if name not in recipe.policies:
        raise ConfigError(f"{where}: the judge {name!r} is not a policy{hint(name, list(recipe.policies))}")
    role = recipe.policies[name].role
    if role != "frozen":
        raise ConfigError(
            f"{where}: the judge {name!r} is a policy with the role {role}; give it `role: frozen`, because "
            "scores of a judge that changes are not comparable"
        )


def _check_scores_one(use: Use, where: str) -> None:
    """Raises: ConfigError if a function scores a group, but gets one text at a time."""
    if list(_parameters(use, where))[1:2] == ["texts"]:
        raise ConfigError(
            f"{where}.use = {use.use!r} takes `texts`, so it compares the answers of a group, but here a reward "
            f"gets one answer at a time; use workflow: {{name: compare_answers, compare: {{use: {use.use!r}}}}}"
        )


def _check_function(recipe: Recipe, use: Use, where: str) -> None:
    """Raises: ConfigError if the tasks lack something that a function's parameters need."""
    for source in recipe.tasks.sources.values():
        columns = (*source.columns, "replies") if isinstance(source, RowsConfig) else None
        check_own_reward(use, columns, where=where)
    ids = _parameters(use, where).get("completion_ids")
    if isinstance(use, TrlReward) and ids is not None and ids.default is ids.empty:
        raise ConfigError(
            f"{where}.use = {use.use!r} has the parameter 'completion_ids', which functions that compare "
            "answers don't get; give it a default"
        )


def _parameters(use: Use, where: str) -> dict[str, inspect.Parameter]:
    """The parameters of a function, or of the instances of a class."""
    target: Callable[..., Any] = load_component(use, where=where)
    function = vars(target).get("__call__", target) if isinstance(target, type) else target
    try:
        found = inspect.signature(function).parameters
    except ValueError:  # a function written in C may have no signature
        return {}
    return {name: parameter for name, parameter in found.items() if name != "self"}
