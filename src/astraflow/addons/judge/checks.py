"""Checks before a run that judges are frozen, and that functions that compare answers get several."""

from astraflow.addons.judge.compare.config import CompareAnswersConfig, RankConfig
from astraflow.config import Use, load_component
from astraflow.errors import ConfigError
from astraflow.recipe.access import built_in_workflows
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_plan import named_uses, scoring_tasks
from astraflow.run.checks import Check, Examined
from astraflow.tasks.config import judges_of
from astraflow.tasks.own_rewards import check_own_reward, read_parameters
from astraflow.tasks.variants import RowsConfig
from astraflow.user_input.mistakes import hint

__all__ = ["JUDGES_CHECK"]

_COMPARE = "workflow.compare"


def _check_judges(examined: Examined) -> None:
    recipe = examined.recipe
    for where, tasks in scoring_tasks(recipe).items():
        for judge in judges_of(tasks).values():
            examined.collect("judges", _check_frozen, recipe, f"{where}.reward", judge.judging_policy)
        for place, use in named_uses(tasks.reward, f"{where}.reward"):
            if use.name == "use" and use.use not in examined.broken:
                examined.collect("judges", _check_scores_one, use, place)
    for workflow in built_in_workflows(recipe):
        compare = workflow.compare if isinstance(workflow, CompareAnswersConfig) else None
        if isinstance(compare, RankConfig) and compare.policy in recipe.policies:
            examined.collect("judges", _check_frozen, recipe, _COMPARE, compare.policy)
        elif isinstance(compare, Use) and compare.use not in examined.broken:
            examined.collect("judges", _check_function, recipe, compare)


JUDGES_CHECK = Check("judges", ("recipe",), _check_judges)


def _check_frozen(recipe: Recipe, where: str, name: str) -> None:
    """Checks that a judge, if it is a policy, has weights that don't change. Raises: ConfigError."""
    if name and name not in recipe.policies:
        raise ConfigError(f"{where}: the judge {name!r} is not a policy{hint(name, list(recipe.policies))}")
    if name and (role := recipe.policies[name].role) != "frozen":
        raise ConfigError(
            f"{where}: the judge {name!r} is a policy with the role {role}; give it `role: frozen`, because "
            "scores of a judge that changes are not comparable"
        )


def _check_scores_one(use: Use, where: str) -> None:
    """Raises: ConfigError if a function compares answers, but gets one at a time."""
    if read_parameters(load_component(use, where=where)).first[1:2] == ("texts",):
        raise ConfigError(
            f"{where}.use = {use.use!r} takes `texts`, so it compares answers, but a reward gets one answer; "
            f"write workflow: {{name: compare_answers, compare: {{use: {use.use!r}}}}}"
        )


def _check_function(recipe: Recipe, use: Use) -> None:
    """Raises: ConfigError if a function that compares answers has a parameter without a value."""
    for source in recipe.tasks.sources.values():
        columns = (*source.columns, "replies") if isinstance(source, RowsConfig) else None
        check_own_reward(use, columns, where=_COMPARE)
