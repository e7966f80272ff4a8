"""Finds the mistakes in a recipe that can be known before a process starts.

It reads and checks; it writes, downloads and starts nothing.
"""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from astraflow.algorithms.credit import (
    GdpoCredit,
    GroupRelativeCredit,
    MaxRlCredit,
    OpoCredit,
    PassAtKCredit,
    ReinforcePlusPlusCredit,
    RlooCredit,
)
from astraflow.config import Config, Use, check_args, load_attr, override_pairs, salvaged
from astraflow.errors import ConfigError, DataError
from astraflow.losses.config import DistillLossConfig, SftLossConfig
from astraflow.protocols import TaskSource
from astraflow.recipe.derived import derived
from astraflow.recipe.eval_config import EvalSetConfig, TrainingReward, TrainingWorkflow
from astraflow.recipe.model_checks import check_family, check_model, is_to_be_fetched
from astraflow.recipe.recipe import PolicyConfig, Recipe, recipe_mapping
from astraflow.recipe.roles import check_roles
from astraflow.recipe.run_plan import named_uses, scoring_tasks, uses
from astraflow.recipe.sources import OpenSources, named_sources, open_source, sources_by_name, workflow_of
from astraflow.recipe.trackers import check_tracker
from astraflow.rollout.engine_config import EngineVariant, ModelEngineConfig
from astraflow.rollout.judging import judges_of
from astraflow.run.start_checks import (
    check_addresses,
    check_certificates,
    check_devices,
    check_engine,
    check_run_folder,
)
from astraflow.tasks.config import (
    RewardConfig,
    TaskSourceConfig,
)
from astraflow.tasks.environment import check_environments
from astraflow.tasks.rewards import check_gradable
from astraflow.tasks.selection import tasks_to_check
from astraflow.tasks.variants import PromptsConfig, SourceVariant
from astraflow.trainer.backend_config import BackendVariant
from astraflow.trainer.offline import offline_files
from astraflow.types import Task
from astraflow.user_input.mistakes import hint
from astraflow.workflows.config import EnvironmentWorkflowConfig, WorkflowConfig
from astraflow.workflows.factory import make_workflow

__all__ = ["CheckedRecipe", "check_recipe", "listed", "with_other_mistakes"]

_COMPARING = (GdpoCredit, GroupRelativeCredit, MaxRlCredit, OpoCredit, PassAtKCredit, RlooCredit)
"""Credits that are 0 for the only episode of a group."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CheckedRecipe:
    """A recipe without mistakes, and its sources."""

    recipe: Recipe
    """With numbers for what it leaves to its data, unless a model is still to be built."""
    sources: OpenSources


class _Mistakes:
    """Collects what is wrong with a recipe, so that all of it is told at once.

    Example: `mistakes.of(check_roles, recipe)` notes the error that the check raises, and returns None then.
    """

    def __init__(self) -> None:
        self._errors: list[ConfigError | DataError] = []

    def of(self, check: Callable[..., _T], *args: Any, **named: Any) -> _T | None:
        """What the check returns; None if it raises, and the error is noted."""
        try:
            return check(*args, **named)
        except (ConfigError, DataError) as err:
            self._errors.append(err)
            return None

    def add(self, texts: Iterable[str]) -> None:
        """Notes mistakes that a check has found."""
        self._errors += [ConfigError(text) for text in texts]

    @property
    def texts(self) -> list[str]:
        """Each mistake once, in the order in which they were found."""
        return list(dict.fromkeys(map(str, self._errors)))

    def tell(self) -> None:
        """Raises: the only error as it is, or a ConfigError with all of them."""
        if len(self.texts) == 1:
            raise self._errors[0]
        if self._errors:
            raise ConfigError(listed(self.texts))


def listed(mistakes: Sequence[str], what: str = "the recipe") -> str:
    """Several mistakes of `what` as one text, with an item for each."""
    items = ["\n  - " + text.replace("\n", "\n    ") for text in mistakes]
    return f"{what} has {len(items)} mistakes:" + "".join(items)


def check_recipe(
    recipe: Recipe, run_dir: Path | None = None, *, unbuilt: Collection[str] = ()
) -> CheckedRecipe:
    """Checks everything that can be known without starting a service.

    `run_dir`: also checks what a start in this folder needs: the folder, ports and certificates. `unbuilt`:
    models that do not exist yet and that are built before the run. Nothing is said about these, and about
    models on the hub that are not in its cache.

    Raises: ConfigError or DataError that tells all mistakes.
    """
    unbuilt = {*unbuilt, *(p.model for p in recipe.policies.values() if is_to_be_fetched(p.model))}
    mistakes = _Mistakes()
    mistakes.of(check_roles, recipe)
    _check_models(recipe, mistakes, unbuilt)
    broken = _check_components(recipe, mistakes)
    for tracker in recipe.trackers:
        if _is_whole(tracker, broken):
            mistakes.of(check_tracker, tracker)
    if _is_whole(recipe.workflow, broken):
        mistakes.of(make_workflow, recipe.workflow)
    for name, config in recipe.eval.sets.items():
        if _is_whole(config.workflow, broken):
            mistakes.of(_check_workflow, f"eval.sets.{name}.workflow", config)
    mistakes.of(_check_judges, recipe)
    mistakes.of(_check_lengths, recipe)
    mistakes.of(_check_engine_services, recipe)
    for name, policy in recipe.trained.items():
        mistakes.of(_check_learns, name, policy)
    sources = _checked_sources(recipe, mistakes, broken, unbuilt)
    _check_machine(recipe, mistakes, run_dir)
    mistakes.tell()
    is_unbuilt = any(policy.model in unbuilt for policy in recipe.policies.values())
    return CheckedRecipe(recipe if is_unbuilt else derived(recipe, sources), sources)


def with_other_mistakes(
    error: ConfigError, file: Path, overrides: Sequence[str], run_dir: Path | None
) -> ConfigError:
    """The error of a recipe that does not load, with what else is wrong with the parts that are valid."""
    try:
        pairs = dict(override_pairs(overrides))
        mapping = recipe_mapping(file, pairs)
    except ConfigError:
        return error  # it is not valid YAML, for example, so there are no parts
    recipe = None if "scale" in pairs else salvaged(mapping, Recipe)
    others = _other_mistakes(recipe, run_dir or Path("runs") / recipe.name) if recipe is not None else []
    if not others:
        return error
    own = re.split(
        r"\n(?! )", str(error).removeprefix(f"{file}: ")
    )  # a line each; what is indented belongs to it
    return ConfigError(listed([*own, *others], str(file)))


def _other_mistakes(recipe: Recipe, run_dir: Path) -> list[str]:
    """What else is wrong with a recipe some of whose keys are left out because they are not valid.

    Only checks of parts that need no others, so that no mistake is a consequence of what was left out.
    """
    mistakes = _Mistakes()
    first = {policy.model: name for name, policy in reversed(recipe.policies.items())}
    for name in first.values():
        mistakes.of(check_model, name, recipe.policies[name])
    _check_components(recipe, mistakes)
    for name, config in recipe.tasks.sources.items():
        is_alone = isinstance(config, PromptsConfig) or (
            isinstance(config, SourceVariant) and not config.needs_workflow
        )
        if is_alone and not _counts_tokens(config):
            mistakes.of(open_source, config, recipe, name, f"tasks.sources.{name}", recipe.workflow)
    _check_machine(recipe, mistakes, run_dir)
    return mistakes.texts


def _check_machine(recipe: Recipe, mistakes: _Mistakes, run_dir: Path | None) -> None:
    """GPUs and servers; with a run folder, also the folder, ports and certificates."""
    mistakes.of(check_devices, recipe)
    mistakes.of(check_engine, recipe)
    if run_dir is None:
        return
    mistakes.of(check_run_folder, recipe, run_dir)
    mistakes.of(check_addresses, recipe, run_dir)
    mistakes.add(check_certificates(recipe))


# --- components of the user's own -----------------------------------------------------------------


def _check_components(recipe: Recipe, mistakes: _Mistakes) -> frozenset[str]:
    """Loads every component; returns those that are broken, as the recipe names them.

    A module that does not import is told once, whatever the number of its components.
    """
    broken: dict[str, bool] = {}
    modules: set[str] = set()
    for where, use in named_uses(recipe):
        module = use.use.partition(":")[0]
        if module not in modules:
            broken[use.use] = not mistakes.of(_check_component, where, use)
        if broken.get(use.use, True) and module not in sys.modules:
            modules.add(module)
            broken[use.use] = True
    return frozenset(name for name, is_broken in broken.items() if is_broken)


def _check_component(where: str, use: Use) -> bool:
    """True. Raises: ConfigError if it does not load, or cannot be called with its arguments."""
    target = load_attr(use.use, where=f"{where}.use")
    if not callable(target):
        raise ConfigError(
            f"{where}.use = {use.use!r} is of the type {type(target).__name__}, which cannot be called; name "
            "a function or a class"
        )
    check_args(target, use.args, where=f"{where}.args")
    return True


def _is_whole(config: Config, broken: Collection[str]) -> bool:
    """Whether nothing that a section names is broken. What is broken has been told."""
    return not any(use.use in broken for use in uses(config))


def _check_learns(name: str, policy: PolicyConfig) -> None:
    """Raises: ConfigError if an advantage compares episodes of a group, and there is only one."""
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
            f"policies.{name}.table.group_size = 1: the credit {credit.name!r} compares the episodes of a "
            "group with one another, so all advantages would be 0 and nothing would be learned; set it to 2 "
            "or more (8 is usual), or name a credit that works with single episodes: rae, "
            "reinforce_plus_plus, or gae with a critic"
        )


# --- models ---------------------------------------------------------------------------------------


def _check_models(recipe: Recipe, mistakes: _Mistakes, unbuilt: Collection[str]) -> None:
    """Checks the models that exist, each once if it is not good, and the folders of offline data."""
    told: set[str] = set()
    for name, policy in recipe.policies.items():
        if policy.model in told or policy.model in unbuilt:
            continue
        if mistakes.of(check_model, name, policy):
            mistakes.of(check_family, name, policy, recipe.rollout, exact=recipe.exact)
        else:
            told.add(policy.model)
    for policy in recipe.policies.values():
        if (offline := policy.train.auxiliary.offline) is not None:
            mistakes.of(offline_files, Path(offline.folder).expanduser())


def _checked_sources(
    recipe: Recipe, mistakes: _Mistakes, broken: Collection[str], unbuilt: Collection[str]
) -> OpenSources:
    """Opens the sources, and checks their sizes and whether the rewards can score their tasks."""
    if not any(use.use in broken for config in recipe.tasks.environments.values() for use in uses(config)):
        mistakes.of(check_environments, recipe.tasks, played=_played(recipe))
    opened: dict[str, TaskSource] = {}
    for name, where, config, workflow in named_sources(recipe):
        is_countable = not (recipe.tokenizer_model in unbuilt and _counts_tokens(config))
        if is_countable and _is_whole(config, broken):
            source = mistakes.of(open_source, config, recipe, name, where, workflow)
            if source is not None:
                opened[where] = source
    sources = sources_by_name(recipe, opened)
    if sources.train.keys() == recipe.tasks.sources.keys():
        for name, policy in recipe.trained.items():
            mistakes.of(_check_batch, name, policy, sources)
    for name in sources.eval:
        mistakes.of(_check_eval_size, name, recipe, sources)
    _check_answers(recipe, sources, mistakes, broken)
    _check_fits_workflow(recipe, sources, mistakes)
    return sources


def _counts_tokens(config: TaskSourceConfig) -> bool:
    """Whether a source counts the tokens of its prompts, and so needs a tokenizer."""
    return isinstance(config, PromptsConfig) and config.max_prompt_tokens > 0


def _check_workflow(where: str, config: EvalSetConfig) -> None:
    """Raises: ConfigError if the workflow of an evaluation set cannot be made."""
    if isinstance(config.workflow, TrainingWorkflow):
        return
    try:
        make_workflow(config.workflow)
    except ConfigError as err:
        raise ConfigError(f"{where}: {err}") from err


def _check_judges(recipe: Recipe) -> None:
    """A judge that is a policy of the run keeps its weights, so that scores stay comparable."""
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
                    f"{where}.reward: the judge {name!r} is a policy of the role {role}; give it "
                    "`role: frozen`, since a judge that changes would change what the scores mean"
                )


def _played(recipe: Recipe) -> dict[str, TaskSourceConfig]:
    """Sources whose tasks a workflow plays in their environments."""
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
                f"policies.{name}.sampling.max_tokens = {policy.sampling.max_tokens} leaves no room for a "
                f"prompt in rollout.engine.max_context = {engine.max_context}"
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
    """The reward must be able to score every task, unless the workflow may reward its episodes itself."""
    of_training = recipe.tasks.reward
    checks = [
        (f"tasks.sources.{name}", of_training, source, recipe.tasks.sources[name], recipe.workflow)
        for name, source in sources.train.items()
    ]
    for name, source in sources.eval.items():
        config = recipe.eval.sets[name]
        reward = of_training if isinstance(config.reward, TrainingReward) else config.reward
        checks.append((f"eval.sets.{name}", reward, source, config.source, workflow_of(config, recipe)))
    told: list[RewardConfig] = []
    for where, reward, source, config, workflow in checks:
        if isinstance(workflow, Use) or workflow.rewards_itself or reward in told:
            continue
        if _is_whole(reward, broken) and not mistakes.of(_check_gradable, where, reward, source, config):
            told.append(reward)  # a reward that does not fit one source is told once


def _check_gradable(where: str, reward: RewardConfig, source: TaskSource, config: TaskSourceConfig) -> bool:
    try:
        check_gradable(reward, source, config)
    except (ConfigError, DataError) as err:
        raise type(err)(f"{where}: {err}") from err
    return True


def _check_fits_workflow(recipe: Recipe, sources: OpenSources, mistakes: _Mistakes) -> None:
    """The reward and the tasks must be such that the workflow can use them."""
    if not isinstance(recipe.workflow, Use):
        mistakes.of(recipe.workflow.check_scoring, recipe.tasks.reward, recipe.tasks.extract)
    for name, source in sources.train.items():
        tasks = tasks_to_check(source, recipe.tasks.sources[name])
        mistakes.of(_check_tasks, f"tasks.sources.{name}", tasks, recipe.workflow)
    for name, source in sources.eval.items():
        config = recipe.eval.sets[name]
        tasks = tasks_to_check(source, config.source)
        mistakes.of(_check_tasks, f"eval.sets.{name}", tasks, workflow_of(config, recipe))


def _check_tasks(where: str, tasks: Iterable[Task], workflow: WorkflowConfig) -> None:
    try:
        if not isinstance(workflow, Use):
            workflow.check_tasks(tasks)
    except DataError as err:
        raise DataError(f"{where}: {err}") from err


def _check_batch(name: str, policy: PolicyConfig, sources: OpenSources) -> None:
    """Raises: ConfigError if there are fewer tasks than a batch has groups."""
    sizes = {name: len(source) for name, source in sources.train.items()}
    total = sum(sizes.values())
    need = policy.table.groups_per_batch
    if need != "auto" and total < need:
        per_source = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ConfigError(
            f"policies.{name}.table.groups_per_batch = {need}, but tasks.sources hold only {total} tasks "
            f"({per_source}): a batch could never be filled with different tasks; add tasks, or lower it to "
            f"at most {total}"
        )


def _check_eval_size(name: str, recipe: Recipe, sources: OpenSources) -> None:
    """Raises: ConfigError if an evaluation set has too few tasks, or those of training."""
    config = recipe.eval.sets[name]
    size = len(sources.eval[name])
    if size < config.num_tasks:
        raise ConfigError(
            f"eval.sets.{name}.num_tasks = {config.num_tasks}, but its source holds only {size} tasks; "
            "lower it, or add tasks"
        )
    if config.source in recipe.tasks.sources.values():
        raise ConfigError(
            f"eval.sets.{name}.source is also a training source, so its tasks would be trained on; "
            "give it another seed, split or file"
        )
