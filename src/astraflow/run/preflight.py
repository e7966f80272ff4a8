"""Finds the mistakes in a recipe that can be found before any process starts.

This module reads and checks. It doesn't write, download or start anything. `CHECKS`, at its end, lists all
checks with their phases; packages add theirs by entry points of the group `astraflow.checks`.
"""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

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
from astraflow.config import Config, Use, load_component, salvage
from astraflow.errors import ConfigError
from astraflow.losses.config import DistillLossConfig, SftLossConfig
from astraflow.losses.variant import LossVariant
from astraflow.processes.program import choose_addresses
from astraflow.protocols import TaskSource
from astraflow.recipe.access import tls_files
from astraflow.recipe.derived import derive_numbers
from astraflow.recipe.document import full_mapping
from astraflow.recipe.eval_config import TrainingReward, TrainingWorkflow
from astraflow.recipe.model_checks import check_family, check_model, is_to_be_fetched
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.recipe.resume import check_resume
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.run_plan import eval_rules, named_uses, uses
from astraflow.recipe.sources import OpenSources, named_sources, open_source, sources_by_name, workflow_of
from astraflow.recipe.trackers import check_tracker
from astraflow.rollout.engine_config import EngineVariant, ModelEngineConfig
from astraflow.run.checks import Check, Examined, Finding, Phase, make_checks
from astraflow.tasks.config import RewardConfig, TasksConfig, TaskSourceConfig
from astraflow.tasks.environment import check_environments
from astraflow.tasks.rewards import check_gradable
from astraflow.tasks.selection import tasks_to_check
from astraflow.tasks.variants import PromptsConfig, SourceVariant
from astraflow.trainer.backend_config import BackendVariant, torch_settings
from astraflow.user_input.installed import find_entries, load_entry
from astraflow.user_input.mistakes import as_written, hint, nearest_hint
from astraflow.user_input.yaml_files import override_pairs
from astraflow.workflows.config import EnvironmentWorkflowConfig, WorkflowConfig
from astraflow.workflows.factory import make_workflow

__all__ = [
    "CHECKS",
    "all_checks",
    "check_recipe",
    "examine_recipe",
    "format_mistakes",
    "with_other_mistakes",
]

_COMPARING = (GdpoCredit, GroupRelativeCredit, MaxRlCredit, OpoCredit, PassAtKCredit, RlooCredit)
"""Credits that are always 0 for a group with a single episode."""


def format_mistakes(mistakes: Sequence[str], what: str = "the recipe") -> str:
    """Returns one text with an item for each mistake in `what`."""
    items = ["\n  - " + text.replace("\n", "\n    ") for text in mistakes]
    return f"{what} has {len(items)} mistakes:" + "".join(items)


def check_recipe(
    recipe: Recipe, run_dir: Path | None = None, *, unbuilt: Collection[str] = (), with_trials: bool = False
) -> Examined:
    """Checks everything that can be checked without starting a service.

    If `run_dir` is given, also checks what a start in this folder needs: the folder, ports and certificates.
    The models in `unbuilt`, which will be built before the run, and hub models that are not in the cache yet,
    are not checked. `with_trials`: also tries parts of the run, which may take seconds.

    Returns the recipe, with numbers in place of `auto` unless a model must still be built, and its opened
    sources. Raises: ConfigError or DataError that lists all mistakes.
    """
    examined = Examined(recipe, run_dir or Path("runs"), unbuilt=unbuilt)
    folder: Sequence[Phase] = () if run_dir is None else ("folder",)
    trial: Sequence[Phase] = ("trial",) if with_trials else ()
    list(examine_recipe(examined, ("recipe", *folder, *trial)))
    if len(examined.mistakes) == 1:
        raise examined.errors[0]
    if examined.errors:
        raise ConfigError(format_mistakes(examined.mistakes))
    return examined


def examine_recipe(
    examined: Examined, phases: Collection[Phase], *, advice: Sequence[Check] = ()
) -> Iterator[Finding]:
    """Makes the checks of these phases, and those of `advice` last. Yields what each has found."""
    policies = examined.recipe.policies.values()
    examined.unbuilt = {*examined.unbuilt, *(p.model for p in policies if is_to_be_fetched(p.model))}
    return make_checks((*all_checks(), *advice), phases, examined)


def with_other_mistakes(
    error: ConfigError, file: Path, overrides: Sequence[str], run_dir: Path | None
) -> ConfigError:
    """Adds the mistakes in the valid parts of a recipe to the error with which loading it failed."""
    try:
        pairs = dict(override_pairs(overrides))
        mapping = full_mapping(file, pairs)
    except ConfigError:
        return error  # for example, invalid YAML: there are no parts to check
    if "scale" in pairs or (recipe := salvage(mapping, Recipe)) is None:
        return error
    examined = Examined(recipe, run_dir or Path("runs") / recipe.name)
    list(examine_recipe(examined, ("parts", "folder")))
    if not examined.errors:
        return error
    return ConfigError(format_mistakes([*(error.mistakes or [str(error)]), *examined.mistakes], str(file)))


def _check_roles(examined: Examined) -> None:
    """Checks the roles of the workflow. Nothing is known about the user's own workflows.

    Raises: ConfigError if no policy is trained, a role is not a policy, or a trained policy has no role.
    """
    recipe = examined.recipe
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


def _check_components(examined: Examined) -> None:
    """Loads every component. A module that cannot be imported is reported once, however many of its
    components are used."""
    broken: dict[str, bool] = {}
    modules: set[str] = set()
    for where, use in named_uses(examined.recipe):
        module = use.use.partition(":")[0]
        if module not in modules:
            loaded = examined.collect("components", load_component, use, where=as_written(where))
            broken[use.use] = loaded is None
        if broken.get(use.use, True) and module not in sys.modules:
            modules.add(module)
            broken[use.use] = True
    examined.broken = frozenset(name for name, is_broken in broken.items() if is_broken)


def _is_valid(config: Config, broken: Collection[str]) -> bool:
    """Returns whether a section uses no broken component. Broken ones have already been reported."""
    return not any(use.use in broken for use in uses(config))


def _check_added(examined: Examined) -> None:
    """Checks that the packages are installed that keys of the recipe need."""
    recipe = examined.recipe
    if recipe.cluster.max_services:
        examined.collect("packages", added.require, "SizedPool")
    if recipe.eval.best.metric:
        examined.collect("packages", added.require, "best_page")
    settings = [torch_settings(policy.train.backend) for policy in recipe.trained.values()]
    if any(each is not None and each.lora.rank for each in settings):
        examined.collect("packages", added.require, "Lora")
    for tracker in recipe.trackers:
        if _is_valid(tracker, examined.broken):
            examined.collect("packages", check_tracker, tracker)


def _check_workflows(examined: Examined) -> None:
    recipe = examined.recipe
    if _is_valid(recipe.workflow, examined.broken):
        examined.collect("workflow", make_workflow, recipe.workflow)
    for name, config in recipe.eval.sets.items():
        workflow = config.workflow
        if not isinstance(workflow, TrainingWorkflow) and _is_valid(workflow, examined.broken):
            examined.collect("workflow", make_workflow, workflow, prefix=f"eval.sets.{name}.workflow")


def _check_learns(name: str, policy: PolicyConfig) -> None:
    """Checks that a policy can learn.

    Raises: ConfigError if the credit compares the episodes of a group, but groups have only one.
    """
    train = policy.train
    is_by_reward = not isinstance(train.loss, DistillLossConfig | SftLossConfig | Use)
    if isinstance(train.loss, LossVariant):
        is_by_reward = train.loss.learns_from_rewards
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


def _check_models(examined: Examined) -> None:
    """Checks the existing models. A bad model is reported once."""
    bad: set[str] = set()
    sound: list[str] = []
    for name, policy in examined.recipe.policies.items():
        if policy.model in examined.unbuilt or policy.model in bad:
            continue
        if examined.collect(f"model of {name}", check_model, name, policy):
            sound.append(name)
        else:
            bad.add(policy.model)
    examined.sound = sound


def _check_training(examined: Examined) -> None:
    """Checks that engine and trainer can run the models, and what they are trained on."""
    recipe = examined.recipe
    for name in examined.sound:
        policy = recipe.policies[name]
        examined.collect(f"model of {name}", check_family, name, policy, recipe.rollout, exact=recipe.exact)
    has_one_answer = isinstance(recipe.workflow, Use) or not recipe.workflow.compares_answers
    for name, policy in recipe.trained.items() if has_one_answer else ():
        examined.collect("learning", _check_learns, name, policy)
    for policy in recipe.policies.values():
        if (offline := policy.train.auxiliary.offline) is not None:
            examined.collect("offline data", added.offline_files, Path(offline.folder).expanduser())


# --- tasks ----------------------------------------------------------------------------------------


def _open_lone_sources(examined: Examined) -> None:
    """Opens the sources that depend on no other part of the recipe, so that its missing keys cause no false
    mistakes."""
    recipe = examined.recipe
    for name, config in recipe.tasks.sources.items():
        is_alone = isinstance(config, PromptsConfig) or (
            isinstance(config, SourceVariant) and not config.needs_workflow
        )
        if is_alone and not _counts_tokens(config):
            where = f"tasks.sources.{name}"
            examined.collect("data", open_source, config, recipe, name, where, recipe.workflow)


def _open_sources(examined: Examined) -> None:
    recipe = examined.recipe
    broken = examined.broken
    if not any(use.use in broken for config in recipe.tasks.environments.values() for use in uses(config)):
        examined.collect("data", check_environments, recipe.tasks, played=_find_played_sources(recipe))
    opened: dict[str, TaskSource] = {}
    for name, where, config, workflow in named_sources(recipe):
        is_countable = not (recipe.tokenizer_model in examined.unbuilt and _counts_tokens(config))
        if is_countable and _is_valid(config, broken):
            source = examined.collect("data", open_source, config, recipe, name, where, workflow)
            if source is not None:
                opened[where] = source
    sources = sources_by_name(recipe, opened)
    examined.sources = sources
    if sources.train.keys() == recipe.tasks.sources.keys():
        for name, policy in recipe.trained.items():
            examined.collect("data", _check_batch, name, policy, sources)
    for name in sources.eval:
        examined.collect("data", _check_eval_size, name, recipe, sources)


def _counts_tokens(config: TaskSourceConfig) -> bool:
    """Returns whether a source counts the tokens of its prompts, and therefore needs a tokenizer."""
    return isinstance(config, PromptsConfig) and config.max_prompt_tokens > 0


def _find_played_sources(recipe: Recipe) -> dict[str, TaskSourceConfig]:
    """Returns the sources whose tasks a workflow plays in their environments."""
    played: dict[str, TaskSourceConfig] = {}
    if isinstance(recipe.workflow, EnvironmentWorkflowConfig):
        played |= {f"tasks.sources.{name}": source for name, source in recipe.tasks.sources.items()}
    for name, config in recipe.eval.sets.items():
        if isinstance(workflow_of(config, recipe), EnvironmentWorkflowConfig):
            played[f"eval.sets.{name}.source"] = config.source
    return played


def _check_lengths(examined: Examined) -> None:
    recipe = examined.recipe
    engine = recipe.rollout.engine
    if not isinstance(engine, ModelEngineConfig):
        return
    for name, policy in recipe.policies.items():
        if engine.max_context != "auto" and policy.sampling.max_tokens >= engine.max_context:
            raise ConfigError(
                f"{as_written(f'policies.{name}.sampling.max_tokens')} = {policy.sampling.max_tokens} leaves "
                f"no room for a prompt in rollout.engine.max_context = {engine.max_context}"
            )


def _check_engine_services(examined: Examined) -> None:
    recipe = examined.recipe
    engine = recipe.rollout.engine
    if isinstance(engine, EngineVariant):
        engine.check_services(
            num_policies=len(recipe.policies),
            num_services=recipe.max_services,
            has_evals=bool(recipe.eval.sets),
        )


def _opened_sources(
    examined: Examined,
) -> Iterator[tuple[str, RewardConfig, TaskSource, TaskSourceConfig, WorkflowConfig]]:
    """Yields place, reward, source, config and workflow of every opened source; evaluation sets come last."""
    recipe = examined.recipe
    reward = recipe.tasks.reward
    for name, source in examined.sources.train.items():
        yield f"tasks.sources.{name}", reward, source, recipe.tasks.sources[name], recipe.workflow
    for name, source in examined.sources.eval.items():
        config = recipe.eval.sets[name]
        own = reward if isinstance(config.reward, TrainingReward) else config.reward
        yield f"eval.sets.{name}", own, source, config.source, workflow_of(config, recipe)


def _check_answers(examined: Examined) -> None:
    """Checks that the reward can score every task, unless the workflow may reward its episodes itself."""
    reported: list[RewardConfig] = []
    for where, reward, source, config, workflow in _opened_sources(examined):
        if isinstance(workflow, Use) or workflow.rewards_itself or reward in reported:
            continue
        if not _is_valid(reward, examined.broken):
            continue
        num_errors = len(examined.errors)
        examined.collect("rewards", check_gradable, reward, source, config, prefix=where)
        if len(examined.errors) > num_errors:
            reported.append(reward)  # a reward that does not fit is reported for only one source


def _check_fits_workflow(examined: Examined) -> None:
    recipe = examined.recipe
    sections: dict[str, tuple[WorkflowConfig, TasksConfig]] = {"": (recipe.workflow, recipe.tasks)}
    for name, rule in eval_rules(recipe).items():
        if rule.workflow is not None or rule.tasks is not None:
            own = workflow_of(recipe.eval.sets[name], recipe), rule.tasks or recipe.tasks
            sections[f"eval.sets.{name}"] = own
    for where, (workflow, tasks) in sections.items():
        if not isinstance(workflow, Use):
            scoring = (tasks.reward, tasks.extract)
            examined.collect("workflow", workflow.check_scoring, *scoring, prefix=where)
    if not examined.unbuilt and not examined.errors:  # so the models are complete
        models = {name: (p.model_dir, p.template_args, p.renderer) for name, p in recipe.policies.items()}
        for workflow in (recipe.workflow, *(workflow_of(each, recipe) for each in recipe.eval.sets.values())):
            if not isinstance(workflow, Use):
                examined.collect("workflow", workflow.check_templates, models)
    for where, _, source, config, workflow in _opened_sources(examined):
        if not isinstance(workflow, Use):
            tasks = tasks_to_check(source, config)
            examined.collect("tasks", workflow.check_tasks, tasks, prefix=where)


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


# --- what a start needs ---------------------------------------------------------------------------


def _check_addresses(examined: Examined) -> None:
    """Checks the ports in the recipe.

    Raises: ConfigError if a port is taken, unless a run that is active in the folder uses it.
    """
    if not RunFolder(examined.run_dir).is_locked:
        choose_addresses(examined.recipe, {})


def _check_certificates(examined: Examined) -> None:
    named = dict(zip(("cert", "key"), tls_files(examined.recipe) or (), strict=False))
    named |= {"ca": examined.recipe.dataflow.tls.ca}
    for key, path in named.items():
        if path and not Path(path).is_file():
            text = f"dataflow.tls.{key} = {path!r}: this file does not exist"
            examined.add(Finding("fail", "certificates", text))


def _check_run_folder(examined: Examined) -> None:
    """Checks the run folder.

    Raises: ConfigError if the folder cannot be written, or belongs to a run of another recipe.
    """
    run_dir = examined.run_dir
    above = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ConfigError(
            f"the run folder {run_dir} cannot be created: {above} is a file; choose another --run-dir"
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the run folder {run_dir} cannot be written: you have no write permission for {above}; choose "
            "another --run-dir"
        )
    folder = RunFolder(run_dir)
    if folder.recipe.is_file():
        check_resume(folder, examined.recipe)


# --- the list -------------------------------------------------------------------------------------


def _find_numbers(examined: Examined) -> None:
    """Puts numbers in place of `auto`, if nothing is wrong and all models are there."""
    policies = examined.recipe.policies.values()
    if not examined.errors and not any(policy.model in examined.unbuilt for policy in policies):
        examined.recipe = derive_numbers(examined.recipe, examined.sources)


_WHOLE: Collection[Phase] = ("recipe",)
_PARTS: Collection[Phase] = ("recipe", "parts")

CHECKS: Sequence[Check] = (
    Check("roles", _WHOLE, _check_roles),
    Check("models", _PARTS, _check_models),
    Check("training", _WHOLE, _check_training),
    Check("components", _PARTS, _check_components),
    Check("packages", _WHOLE, _check_added),
    Check("workflow", _WHOLE, _check_workflows),
    Check("lengths", _WHOLE, _check_lengths),
    Check("services of the engine", _WHOLE, _check_engine_services),
    Check("data", ("parts",), _open_lone_sources),
    Check("data", _WHOLE, _open_sources),
    Check("rewards", _WHOLE, _check_answers),
    Check("tasks", _WHOLE, _check_fits_workflow),
    # `auto` stays open for a run that is resumed, whose own numbers count.
    Check("run folder", ("folder",), _check_run_folder),
    Check("numbers in place of auto", _WHOLE, _find_numbers),
)
"""The checks in the order in which they are made. Those of packages and of the machine follow."""

_LAST: Sequence[Check] = (
    Check("ports", ("folder",), _check_addresses),
    Check("certificates", ("folder",), _check_certificates),
)


def all_checks() -> Sequence[Check]:
    """All checks, with those of installed packages: each is a `Check`, or a function that gets the recipe."""
    added_checks = [(entry.name, load_entry(entry)) for entry in find_entries("astraflow.checks")]
    others = [
        check if isinstance(check, Check) else _of_recipe(name, check)
        for name, check in added_checks
        if check
    ]
    return (*CHECKS, *others, *_LAST)


def _of_recipe(name: str, check: Callable[[Recipe], object]) -> Check:
    def look(examined: Examined) -> object:
        return check(examined.recipe)

    return Check(name, _PARTS, look)
