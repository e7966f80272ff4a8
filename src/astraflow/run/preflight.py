"""Finds the mistakes in a recipe that can be found before any process starts.

This module reads and checks. It doesn't write, download or start anything.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from astraflow import added
from astraflow.algorithms.credit import (
    GdpoCredit,
    GroupRelativeCredit,
    MaxRlCredit,
    OpoCredit,
    PassAtKCredit,
    ReinforcePlusPlusCredit,
    RlooCredit,
)
from astraflow.config import Config, Use, check_args, load_attr, salvage
from astraflow.errors import ConfigError, DataError
from astraflow.losses.config import DistillLossConfig, SftLossConfig
from astraflow.protocols import TaskSource
from astraflow.recipe.derived import derive_numbers
from astraflow.recipe.eval_config import EvalSetConfig, TrainingReward, TrainingWorkflow
from astraflow.recipe.model_checks import check_family, check_model, is_to_be_fetched
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.recipe.run_plan import named_uses, scoring_tasks, uses
from astraflow.recipe.short_forms import full_mapping
from astraflow.recipe.sources import OpenSources, named_sources, open_source, sources_by_name, workflow_of
from astraflow.recipe.trackers import check_tracker
from astraflow.rollout.engine_config import EngineVariant, ModelEngineConfig
from astraflow.run.start_checks import (
    check_addresses,
    check_certificates,
    check_engine,
    check_run_folder,
)
from astraflow.tasks.config import RewardConfig, TaskSourceConfig, judges_of
from astraflow.tasks.environment import check_environments
from astraflow.tasks.rewards import check_gradable
from astraflow.tasks.selection import tasks_to_check
from astraflow.tasks.variants import PromptsConfig, SourceVariant
from astraflow.trainer.backend_config import BackendVariant
from astraflow.trainer.offline import offline_files
from astraflow.types import Task
from astraflow.user_input.installed import find_entries, load_entry
from astraflow.user_input.mistakes import hint, nearest_hint
from astraflow.user_input.written_keys import as_written
from astraflow.user_input.yaml_files import override_pairs
from astraflow.workflows.config import EnvironmentWorkflowConfig, WorkflowConfig
from astraflow.workflows.factory import make_workflow

__all__ = ["CheckedRecipe", "check_recipe", "format_mistakes", "with_other_mistakes"]

_COMPARING = (GdpoCredit, GroupRelativeCredit, MaxRlCredit, OpoCredit, PassAtKCredit, RlooCredit)
"""Credits that are always 0 for a group with a single episode."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CheckedRecipe:
    """A recipe without mistakes, and its opened sources."""

    recipe: Recipe
    """The recipe with numbers in place of `auto`, unless a model must still be built."""
    sources: OpenSources


class _Mistakes:
    """Collects what is wrong with a recipe, so that one error reports all of it.

    Example: if the check raises an error, `mistakes.collect(_check_roles, recipe)` records it and returns
    None.
    """

    def __init__(self) -> None:
        self._errors: list[ConfigError | DataError] = []

    def collect(self, check: Callable[..., _T], *args: Any, **named: Any) -> _T | None:
        """Runs a check. Returns its result, or collects its error and returns None."""
        try:
            return check(*args, **named)
        except (ConfigError, DataError) as err:
            self._errors.append(err)
            return None

    def add(self, texts: Iterable[str]) -> None:
        """Adds mistakes that a check has returned."""
        self._errors += [ConfigError(text) for text in texts]

    @property
    def texts(self) -> list[str]:
        """Returns each mistake once, in the order in which they were found."""
        return list(dict.fromkeys(map(str, self._errors)))

    def raise_all(self) -> None:
        """Raises: the error if there is only one, or a ConfigError that lists all of them."""
        if len(self.texts) == 1:
            raise self._errors[0]
        if self._errors:
            raise ConfigError(format_mistakes(self.texts))


def format_mistakes(mistakes: Sequence[str], what: str = "the recipe") -> str:
    """Returns one text with an item for each mistake in `what`."""
    items = ["\n  - " + text.replace("\n", "\n    ") for text in mistakes]
    return f"{what} has {len(items)} mistakes:" + "".join(items)


def check_recipe(
    recipe: Recipe, run_dir: Path | None = None, *, unbuilt: Collection[str] = ()
) -> CheckedRecipe:
    """Checks everything that can be checked without starting a service.

    If `run_dir` is given, also checks what a start in this folder needs: the folder, ports and certificates.
    The models in `unbuilt`, which will be built before the run, and hub models that are not in the cache yet,
    are not checked.

    Raises: ConfigError or DataError that lists all mistakes.
    """
    unbuilt = {*unbuilt, *(p.model for p in recipe.policies.values() if is_to_be_fetched(p.model))}
    mistakes = _Mistakes()
    mistakes.collect(_check_roles, recipe)
    _check_models(recipe, mistakes, unbuilt)
    broken = _check_components(recipe, mistakes)
    if recipe.cluster.max_services:
        mistakes.collect(added.require, "SizedPool")
    if recipe.eval.best.metric:
        mistakes.collect(added.require, "best_page")
    for tracker in recipe.trackers:
        if _is_valid(tracker, broken):
            mistakes.collect(check_tracker, tracker)
    if _is_valid(recipe.workflow, broken):
        mistakes.collect(make_workflow, recipe.workflow)
    for name, config in recipe.eval.sets.items():
        if _is_valid(config.workflow, broken):
            mistakes.collect(_check_workflow, f"eval.sets.{name}.workflow", config)
    mistakes.collect(_check_judges, recipe)
    mistakes.collect(_check_lengths, recipe)
    mistakes.collect(_check_engine_services, recipe)
    for name, policy in recipe.trained.items():
        mistakes.collect(_check_learns, name, policy)
    sources = _check_sources(recipe, mistakes, broken, unbuilt)
    whole = recipe
    if not mistakes.texts and not any(policy.model in unbuilt for policy in recipe.policies.values()):
        whole = mistakes.collect(derive_numbers, recipe, sources) or recipe
    _check_machine(recipe, whole, mistakes, run_dir)
    mistakes.raise_all()
    return CheckedRecipe(whole, sources)


def with_other_mistakes(
    error: ConfigError, file: Path, overrides: Sequence[str], run_dir: Path | None
) -> ConfigError:
    """Adds the mistakes in the valid parts of a recipe to the error with which loading it failed."""
    try:
        pairs = dict(override_pairs(overrides))
        mapping = full_mapping(file, pairs)
    except ConfigError:
        return error  # for example, invalid YAML: there are no parts to check
    recipe = None if "scale" in pairs else salvage(mapping, Recipe)
    others = _other_mistakes(recipe, run_dir or Path("runs") / recipe.name) if recipe is not None else []
    if not others:
        return error
    return ConfigError(format_mistakes([*(error.mistakes or [str(error)]), *others], str(file)))


def _other_mistakes(recipe: Recipe, run_dir: Path) -> list[str]:
    """Finds further mistakes in a recipe whose invalid keys were left out.

    Only parts that don't depend on other parts are checked, so that the missing keys cause no false mistakes.
    """
    mistakes = _Mistakes()
    first = {policy.model: name for name, policy in reversed(recipe.policies.items())}
    for name in first.values():
        mistakes.collect(check_model, name, recipe.policies[name])
    _check_components(recipe, mistakes)
    for name, config in recipe.tasks.sources.items():
        is_alone = isinstance(config, PromptsConfig) or (
            isinstance(config, SourceVariant) and not config.needs_workflow
        )
        if is_alone and not _counts_tokens(config):
            mistakes.collect(open_source, config, recipe, name, f"tasks.sources.{name}", recipe.workflow)
    _check_machine(recipe, recipe, mistakes, run_dir)
    return mistakes.texts


def _check_machine(recipe: Recipe, whole: Recipe, mistakes: _Mistakes, run_dir: Path | None) -> None:
    """Checks servers, and what packages add; with a run folder, also the folder, ports and certificates.

    `whole`: the recipe with numbers in place of `auto`, as far as they are known.
    """
    for entry in find_entries("astraflow.checks"):
        if (check := load_entry(entry)) is not None:
            mistakes.collect(check, whole)
    mistakes.collect(check_engine, recipe)
    if run_dir is None:
        return
    mistakes.collect(check_run_folder, recipe, run_dir)
    mistakes.collect(check_addresses, recipe, run_dir)
    mistakes.add(check_certificates(recipe))


def _check_roles(recipe: Recipe) -> None:
    """Checks the roles of the workflow. Nothing is known about the user's own workflows.

    Raises: ConfigError if no policy is trained, a role is not a policy, or a trained policy has no role.
    """
    if not recipe.trained:
        raise ConfigError("policies: none has `role: trained`, so nothing would be trained")
    for name, config in recipe.eval.sets.items():
        if not isinstance(config.workflow, TrainingWorkflow):
            _find_roles(config.workflow, recipe, f"eval.sets.{name}.workflow")
    acting = _find_roles(recipe.workflow, recipe, "workflow")
    if isinstance(recipe.workflow, Use):
        return
    idle = [name for name in recipe.trained if name not in acting]
    if idle:
        listed = ", ".join(repr(name) for name in dict.fromkeys(acting))
        raise ConfigError(
            f"policies.{idle[0]} is trained, but the workflow {recipe.workflow.name} lets only {listed} act, "
            "so its table could never fill a batch; give it `role: frozen`, or name a workflow that uses it"
            f"{nearest_hint(idle[0], acting)}"
        )


def _find_roles(workflow: WorkflowConfig, recipe: Recipe, where: str) -> list[str]:
    """Returns the policy of each role. Raises: ConfigError if it does not exist."""
    if isinstance(workflow, Use):
        return []
    acting = workflow.acting(tuple(recipe.policies))
    for role, name in acting.items():
        if name not in recipe.policies:
            known = hint(name, list(recipe.policies))
            raise ConfigError(f"{where}.{role} = {name!r} is not a policy{known}")
    return list(acting.values())


# --- components of the user's own -----------------------------------------------------------------


def _check_components(recipe: Recipe, mistakes: _Mistakes) -> frozenset[str]:
    """Loads every component. Returns the names of those that are broken.

    A module that cannot be imported is reported once, however many of its components are used.
    """
    broken: dict[str, bool] = {}
    modules: set[str] = set()
    for where, use in named_uses(recipe):
        module = use.use.partition(":")[0]
        if module not in modules:
            broken[use.use] = not mistakes.collect(_check_component, where, use)
        if broken.get(use.use, True) and module not in sys.modules:
            modules.add(module)
            broken[use.use] = True
    return frozenset(name for name, is_broken in broken.items() if is_broken)


def _check_component(key: str, use: Use) -> bool:
    """Checks a component, and returns True.

    Raises: ConfigError if it cannot be loaded, or cannot be called with its arguments.
    """
    where = as_written(key)
    target = load_attr(use.use, where=f"{where}.use")
    if not callable(target):
        raise ConfigError(
            f"{where}.use = {use.use!r} has the type {type(target).__name__}, which cannot be called; name a "
            "function or a class"
        )
    check_args(target, use.args, where=f"{where}.args")
    return True


def _is_valid(config: Config, broken: Collection[str]) -> bool:
    """Returns whether a section uses no broken component. Broken ones have already been reported."""
    return not any(use.use in broken for use in uses(config))


def _check_learns(name: str, policy: PolicyConfig) -> None:
    """Checks that a policy can learn.

    Raises: ConfigError if the credit compares the episodes of a group, but groups have only one.
    """
    train = policy.train
    is_by_reward = not isinstance(train.loss, DistillLossConfig | SftLossConfig | Use)
    backend = train.backend
    is_own = isinstance(backend, Use) or (isinstance(backend, BackendVariant) and backend.decides_on_loss)
    credit = policy.table.credit
    compares = isinstance(credit, _COMPARING) or (
        isinstance(credit, ReinforcePlusPlusCredit) and credit.baseline == "group"
    )
    if policy.table.group_size == 1 and compares and is_by_reward and not is_own and train.lr > 0:
        raise ConfigError(
            f"{as_written(f'policies.{name}.table.group_size')} = 1: the credit {credit.name!r} compares the "
            "episodes of a group with one another, so all advantages would be 0 and nothing would "
            "be learned; set it to 2 or more (8 is usual), or use a credit that works with single episodes: "
            "rae, reinforce_plus_plus, or gae with a critic"
        )


# --- models ---------------------------------------------------------------------------------------


def _check_models(recipe: Recipe, mistakes: _Mistakes, unbuilt: Collection[str]) -> None:
    """Checks the existing models and the folders of offline data. A bad model is reported once."""
    reported: set[str] = set()
    for name, policy in recipe.policies.items():
        if policy.model in reported or policy.model in unbuilt:
            continue
        if mistakes.collect(check_model, name, policy):
            mistakes.collect(check_family, name, policy, recipe.rollout, exact=recipe.exact)
        else:
            reported.add(policy.model)
    for policy in recipe.policies.values():
        if (offline := policy.train.auxiliary.offline) is not None:
            mistakes.collect(offline_files, Path(offline.folder).expanduser())


def _check_sources(
    recipe: Recipe, mistakes: _Mistakes, broken: Collection[str], unbuilt: Collection[str]
) -> OpenSources:
    """Opens the sources. Checks their sizes, and whether the rewards can score their tasks."""
    if not any(use.use in broken for config in recipe.tasks.environments.values() for use in uses(config)):
        mistakes.collect(check_environments, recipe.tasks, played=_find_played_sources(recipe))
    opened: dict[str, TaskSource] = {}
    for name, where, config, workflow in named_sources(recipe):
        is_countable = not (recipe.tokenizer_model in unbuilt and _counts_tokens(config))
        if is_countable and _is_valid(config, broken):
            source = mistakes.collect(open_source, config, recipe, name, where, workflow)
            if source is not None:
                opened[where] = source
    sources = sources_by_name(recipe, opened)
    if sources.train.keys() == recipe.tasks.sources.keys():
        for name, policy in recipe.trained.items():
            mistakes.collect(_check_batch, name, policy, sources)
    for name in sources.eval:
        mistakes.collect(_check_eval_size, name, recipe, sources)
    _check_answers(recipe, sources, mistakes, broken)
    _check_fits_workflow(recipe, sources, mistakes, has_models=not unbuilt)
    return sources


def _counts_tokens(config: TaskSourceConfig) -> bool:
    """Returns whether a source counts the tokens of its prompts, and therefore needs a tokenizer."""
    return isinstance(config, PromptsConfig) and config.max_prompt_tokens > 0


def _check_workflow(where: str, config: EvalSetConfig) -> None:
    """Checks that the workflow of an evaluation set can be made. Raises: ConfigError if it can't."""
    if isinstance(config.workflow, TrainingWorkflow):
        return
    try:
        make_workflow(config.workflow)
    except ConfigError as err:
        raise ConfigError(f"{where}: {err}") from err


def _check_judges(recipe: Recipe) -> None:
    """Checks that each judge is a policy whose weights don't change. Raises: ConfigError if one isn't."""
    for where, tasks in scoring_tasks(recipe).items():
        for judge in judges_of(tasks).values():
            name = judge.judging_policy
            if not name:
                continue
            if name not in recipe.policies:
                known = hint(name, list(recipe.policies))
                raise ConfigError(f"{where}.reward: the judge {name!r} is not a policy{known}")
            role = recipe.policies[name].role
            if role != "frozen":
                raise ConfigError(
                    f"{where}.reward: the judge {name!r} is a policy with the role {role}; give it "
                    "`role: frozen`, because scores of a judge that changes are not comparable"
                )


def _find_played_sources(recipe: Recipe) -> dict[str, TaskSourceConfig]:
    """Returns the sources whose tasks a workflow plays in their environments."""
    played: dict[str, TaskSourceConfig] = {}
    if isinstance(recipe.workflow, EnvironmentWorkflowConfig):
        played |= {f"tasks.sources.{name}": source for name, source in recipe.tasks.sources.items()}
    for name, config in recipe.eval.sets.items():
        if isinstance(workflow_of(config, recipe), EnvironmentWorkflowConfig):
            played[f"eval.sets.{name}.source"] = config.source
    return played


def _check_lengths(recipe: Recipe) -> None:
    engine = recipe.rollout.engine
    if not isinstance(engine, ModelEngineConfig):
        return
    for name, policy in recipe.policies.items():
        if engine.max_context != "auto" and policy.sampling.max_tokens >= engine.max_context:
            raise ConfigError(
                f"{as_written(f'policies.{name}.sampling.max_tokens')} = {policy.sampling.max_tokens} leaves "
                f"no room for a prompt in rollout.engine.max_context = {engine.max_context}"
            )


def _check_engine_services(recipe: Recipe) -> None:
    engine = recipe.rollout.engine
    if isinstance(engine, EngineVariant):
        engine.check_services(
            num_policies=len(recipe.policies),
            num_services=recipe.max_services,
            has_evals=bool(recipe.eval.sets),
        )


def _check_answers(
    recipe: Recipe, sources: OpenSources, mistakes: _Mistakes, broken: Collection[str]
) -> None:
    """Checks that the reward can score every task, unless the workflow may reward its episodes itself."""
    of_training = recipe.tasks.reward
    checks = [
        (f"tasks.sources.{name}", of_training, source, recipe.tasks.sources[name], recipe.workflow)
        for name, source in sources.train.items()
    ]
    for name, source in sources.eval.items():
        config = recipe.eval.sets[name]
        reward = of_training if isinstance(config.reward, TrainingReward) else config.reward
        checks.append((f"eval.sets.{name}", reward, source, config.source, workflow_of(config, recipe)))
    reported: list[RewardConfig] = []
    for where, reward, source, config, workflow in checks:
        if isinstance(workflow, Use) or workflow.rewards_itself or reward in reported:
            continue
        if _is_valid(reward, broken) and not mistakes.collect(_check_gradable, where, reward, source, config):
            reported.append(reward)  # a reward that does not fit is reported for only one source


def _check_gradable(where: str, reward: RewardConfig, source: TaskSource, config: TaskSourceConfig) -> bool:
    try:
        check_gradable(reward, source, config)
    except (ConfigError, DataError) as err:
        raise type(err)(f"{where}: {err}") from err
    return True


def _check_fits_workflow(
    recipe: Recipe, sources: OpenSources, mistakes: _Mistakes, *, has_models: bool
) -> None:
    """Checks that the workflow can use the reward and the tasks."""
    if not isinstance(recipe.workflow, Use):
        mistakes.collect(recipe.workflow.check_scoring, recipe.tasks.reward, recipe.tasks.extract)
    if has_models and not mistakes.texts:  # so the models are complete
        models = {name: (p.model_dir, p.template_args) for name, p in recipe.policies.items()}
        for workflow in (recipe.workflow, *(workflow_of(each, recipe) for each in recipe.eval.sets.values())):
            if not isinstance(workflow, Use):
                mistakes.collect(workflow.check_templates, models)
    for name, source in sources.train.items():
        tasks = tasks_to_check(source, recipe.tasks.sources[name])
        mistakes.collect(_check_tasks, f"tasks.sources.{name}", tasks, recipe.workflow)
    for name, source in sources.eval.items():
        config = recipe.eval.sets[name]
        tasks = tasks_to_check(source, config.source)
        mistakes.collect(_check_tasks, f"eval.sets.{name}", tasks, workflow_of(config, recipe))


def _check_tasks(where: str, tasks: Iterable[Task], workflow: WorkflowConfig) -> None:
    try:
        if not isinstance(workflow, Use):
            workflow.check_tasks(tasks)
    except DataError as err:
        raise DataError(f"{where}: {err}") from err


def _check_batch(name: str, policy: PolicyConfig, sources: OpenSources) -> None:
    """Checks that there are enough tasks. Raises: ConfigError if there are fewer than groups in a batch."""
    sizes = {name: len(source) for name, source in sources.train.items()}
    total = sum(sizes.values())
    need = policy.table.groups_per_batch
    if need != "auto" and total < need:
        per_source = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ConfigError(
            f"{as_written(f'policies.{name}.table.groups_per_batch')} = {need}, but tasks.sources have only "
            f"{total} tasks ({per_source}): a batch could never be filled with different tasks; "
            f"add tasks, or lower it to at most {total}"
        )


def _check_eval_size(name: str, recipe: Recipe, sources: OpenSources) -> None:
    """Checks the tasks of an evaluation set.

    Raises: ConfigError if there are too few tasks, or if they are the same as in training.
    """
    config = recipe.eval.sets[name]
    size = len(sources.eval[name])
    if size < config.num_tasks:
        raise ConfigError(
            f"eval.sets.{name}.num_tasks = {config.num_tasks}, but its source has only {size} tasks; "
            "lower it, or add tasks"
        )
    if config.source in recipe.tasks.sources.values():
        raise ConfigError(
            f"eval.sets.{name}.source is also a training source, so its tasks would be trained on; "
            "give it another seed, split or file"
        )
