"""Finds the mistakes in a recipe that can be known before a process starts.

It reads and checks; it writes, downloads and starts nothing.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from astraflow.config import Use, load_attr
from astraflow.envs.code_config import CodeTestsReward
from astraflow.envs.config import RewardConfig, TasksConfig, TaskSourceConfig, WeightedReward
from astraflow.envs.environment import check_environments
from astraflow.envs.rewards import check_gradable
from astraflow.envs.selection import looked_at
from astraflow.envs.sources import make_source
from astraflow.errors import ConfigError, DataError
from astraflow.launch.config import PolicyConfig, Recipe
from astraflow.launch.eval_config import EvalSetConfig, TrainingReward, TrainingWorkflow
from astraflow.launch.plan import named_uses, scoring_tasks
from astraflow.launch.roles import check_roles
from astraflow.mistakes import hint
from astraflow.models.families import (
    engine_refusal,
    exact_refusal,
    family_of,
    length_refusal,
    quantization_of,
    shard_refusal,
)
from astraflow.models.weight_files import check_weight_files
from astraflow.protocols import TaskSource
from astraflow.rollout.config import RolloutConfig, ServerEngineConfig, TorchEngineConfig
from astraflow.rollout.judging import judges_of
from astraflow.trackers.factory import check_tracker
from astraflow.trainer.offline import offline_files
from astraflow.types import Task
from astraflow.workflows.code_and_test import reference_of
from astraflow.workflows.config import (
    AgentConfig,
    CodeAndTestConfig,
    EnvironmentWorkflowConfig,
    HostedConfig,
    WorkflowConfig,
)
from astraflow.workflows.factory import make_workflow

__all__ = ["OpenSources", "check_model", "check_recipe", "open_sources"]

_HUB_NAME = re.compile(r"[\w.-]*\w[\w.-]*/[\w.-]+")
"""A name on the Hugging Face Hub, `OWNER/NAME`; `./model` is none."""


@dataclass(frozen=True, slots=True)
class OpenSources:
    """The recipe's task sources and evaluation sets, open."""

    train: Mapping[str, TaskSource]
    eval: Mapping[str, TaskSource]


def check_recipe(recipe: Recipe) -> OpenSources:
    """Checks models, components of the user's own, sizes and task sources; returns the open sources.

    Raises: ConfigError or DataError for the first thing that is wrong.
    """
    check_roles(recipe)
    for name, policy in recipe.policies.items():
        check_model(name, policy)
        _check_family(name, policy, recipe.rollout, exact=recipe.exact)
        if (offline := policy.train.auxiliary.offline) is not None:
            offline_files(Path(offline.folder).expanduser())
    for where, use in named_uses(recipe):
        load_attr(use.use, where=f"{where}.use")
    for tracker in recipe.trackers:
        check_tracker(tracker)
    _check_workflows(recipe)
    _check_judges(recipe)
    check_environments(recipe.tasks, played=_played(recipe))
    _check_lengths(recipe)
    _check_attached(recipe)
    sources = open_sources(recipe)
    _check_sizes(recipe, sources)
    _check_answers(recipe, sources)
    _check_test_writers(recipe, sources)
    return sources


def check_model(name: str, policy: PolicyConfig) -> None:
    """Raises: DataError if a model of a policy (own, reference, teacher) is not a Hugging Face folder."""
    auxiliary = policy.train.auxiliary
    _check_folder(f"policies.{name}.model = {policy.model!r}", policy.model)
    for key, model in (("reference", auxiliary.reference), ("teacher", auxiliary.teacher)):
        if model:
            _check_folder(f"policies.{name}.train.auxiliary.{key} = {model!r}", model)


def _check_family(name: str, policy: PolicyConfig, rollout: RolloutConfig, *, exact: bool) -> None:
    """Raises: ConfigError if the model is of a kind that the engine or the trainer cannot run exactly."""
    config = json.loads((policy.model_dir / "config.json").read_text(encoding="utf-8"))
    who = f"policies.{name}.model = {policy.model!r} ({family_of(config)})"
    if method := quantization_of(config):
        raise ConfigError(
            f"{who}: its weights are quantized ({method}); versions hold plain float32, float16 or bfloat16 "
            "numbers, so use the folder that it was quantized from"
        )
    if exact and (reason := exact_refusal(config)):
        raise ConfigError(f"{who}: exact: true is not promised for it: {reason}; leave exact out")
    shard = policy.train.shard
    reason = shard_refusal(config, tensor=shard.tensor, expert=shard.expert, context=shard.context)
    if exact and shard.context > 1:
        reason = f"context = {shard.context}: exact: true computes whole sequences; set context: 1"
    if policy.role == "trained" and reason:
        raise ConfigError(f"{who}: policies.{name}.train.shard.{reason}")
    engine = rollout.engine
    if not isinstance(engine, TorchEngineConfig | ServerEngineConfig):
        return
    if isinstance(engine, TorchEngineConfig) and (reason := engine_refusal(config)):
        raise ConfigError(
            f"{who} cannot generate with rollout.engine `torch`: {reason}. Use rollout.engine `vllm` or "
            "`sglang` (docs/models.md says what was tried)"
        )
    if reason := length_refusal(config, max_context=engine.max_context):
        raise ConfigError(f"{who}: {reason}")


def _check_folder(where: str, model: str) -> None:
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise DataError(f"{where}: no such folder. {_how_to_get(model)}")
    config = folder / "config.json"
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise DataError(f"{where}: it has no config.json, so it is not a Hugging Face model folder") from err
    except ValueError as err:
        raise DataError(f"{where}: its config.json is broken: {err}") from err
    if not isinstance(content, dict):
        raise DataError(f"{where}: its config.json is broken: it holds no mapping")
    try:
        check_weight_files(folder)
    except DataError as err:
        raise DataError(f"{where}: {err}") from err


def _how_to_get(model: str) -> str:
    """What makes a model folder that does not exist."""
    first_part = Path(model).parts[0]
    if _HUB_NAME.fullmatch(model) and first_part != "models" and not Path(first_part).is_dir():
        folder = f"models/{Path(model).name}"
        return (
            "A model is a folder, and AstraFlow downloads nothing by itself. If this is its name on the "
            f"Hugging Face Hub, run `hf download {model} --local-dir {folder}` and put {folder} here"
        )
    folder = shlex.quote(str(Path(model).expanduser()))
    return (
        f"Build a tiny model with `astraflow model init SPEC.yaml --out {folder}` (for the quickstart, "
        "SPEC.yaml is recipes/models/quickstart.yaml), or download one from the Hugging Face Hub with "
        f"`hf download OWNER/NAME --local-dir {folder}`"
    )


def open_sources(recipe: Recipe) -> OpenSources:
    """Opens every task source. Raises: ConfigError or DataError, naming the source."""
    train = {
        name: _open(config, recipe, name, f"tasks.sources.{name}", recipe.workflow)
        for name, config in recipe.tasks.sources.items()
    }
    held_out = {
        name: _open(config.source, recipe, name, f"eval.sets.{name}.source", _workflow_of(config, recipe))
        for name, config in recipe.eval.sets.items()
    }
    return OpenSources(train, held_out)


def _open(
    config: TaskSourceConfig, recipe: Recipe, name: str, where: str, workflow: WorkflowConfig
) -> TaskSource:
    try:
        return make_source(
            config,
            name=name,
            environments=recipe.tasks.environments,
            host=workflow if isinstance(workflow, HostedConfig) else None,
            tokenizer_dir=recipe.tokenizer_dir,
        )
    except (ConfigError, DataError) as err:
        raise type(err)(f"{where}: {err}") from err


def _check_workflows(recipe: Recipe) -> None:
    """Raises: ConfigError if a workflow cannot be made."""
    make_workflow(recipe.workflow)
    for name, config in recipe.eval.sets.items():
        if isinstance(config.workflow, TrainingWorkflow):
            continue
        try:
            make_workflow(config.workflow)
        except ConfigError as err:
            raise ConfigError(f"eval.sets.{name}.workflow: {err}") from err


def _check_judges(recipe: Recipe) -> None:
    """A judge that is a policy of the run keeps its weights, so that scores stay comparable."""
    for where, tasks in scoring_tasks(recipe).items():
        for judge in judges_of(tasks).values():
            if not judge.policy:
                continue
            if judge.policy not in recipe.policies:
                known = hint(judge.policy, list(recipe.policies))
                raise ConfigError(f"{where}.reward: the judge {judge.policy!r} is not a policy{known}")
            role = recipe.policies[judge.policy].role
            if role != "frozen":
                raise ConfigError(
                    f"{where}.reward: the judge {judge.policy!r} is a policy of the role {role}; give it "
                    "`role: frozen`, since a judge that changes would change what the scores mean"
                )


def _workflow_of(config: EvalSetConfig, recipe: Recipe) -> WorkflowConfig:
    """The workflow of an evaluation set: its own, or that of training."""
    return recipe.workflow if isinstance(config.workflow, TrainingWorkflow) else config.workflow


def _played(recipe: Recipe) -> dict[str, TaskSourceConfig]:
    """Sources whose tasks a workflow plays in their environments."""
    played: dict[str, TaskSourceConfig] = {}
    if isinstance(recipe.workflow, EnvironmentWorkflowConfig):
        played |= {f"tasks.sources.{name}": source for name, source in recipe.tasks.sources.items()}
    for name, config in recipe.eval.sets.items():
        if isinstance(_workflow_of(config, recipe), EnvironmentWorkflowConfig):
            played[f"eval.sets.{name}.source"] = config.source
    return played


def _check_lengths(recipe: Recipe) -> None:
    engine = recipe.rollout.engine
    if not isinstance(engine, TorchEngineConfig | ServerEngineConfig):
        return
    for name, policy in recipe.policies.items():
        if policy.sampling.max_tokens >= engine.max_context:
            raise ConfigError(
                f"policies.{name}.sampling.max_tokens = {policy.sampling.max_tokens} leaves no room for a "
                f"prompt in rollout.engine.max_context = {engine.max_context}"
            )


def _check_attached(recipe: Recipe) -> None:
    """A server that the run did not start holds the weights of one policy, for one service."""
    engine = recipe.rollout.engine
    if not isinstance(engine, ServerEngineConfig) or not engine.attach.url:
        return
    where = "rollout.engine.attach.url"
    num_policies = len(recipe.policies)
    if num_policies > 1 or recipe.most_services > 1:
        raise ConfigError(
            f"{where} is one server, which cannot serve {num_policies} policies for "
            f"{recipe.most_services} services; let the engine start its own servers, or "
            "use one policy and rollout.services = 1"
        )
    if recipe.eval.sets and not engine.attach.pinned_url:
        raise ConfigError(
            f"{where} is set and eval.sets need a second server; name it in "
            "rollout.engine.attach.pinned_url, or remove eval.sets and evaluate with `astraflow eval`"
        )


def _check_answers(recipe: Recipe, sources: OpenSources) -> None:
    """The reward must be able to score every task. Agents and workflows of the user need not use it."""
    if not isinstance(recipe.workflow, Use | AgentConfig | HostedConfig):
        for name, config in recipe.tasks.sources.items():
            _check_gradable(f"tasks.sources.{name}", recipe.tasks.reward, sources.train[name], config)
    for name, config in recipe.eval.sets.items():
        if isinstance(_workflow_of(config, recipe), Use | AgentConfig | HostedConfig):
            continue
        reward = recipe.tasks.reward if isinstance(config.reward, TrainingReward) else config.reward
        _check_gradable(f"eval.sets.{name}", reward, sources.eval[name], config.source)


def _check_gradable(where: str, reward: RewardConfig, source: TaskSource, config: TaskSourceConfig) -> None:
    try:
        check_gradable(reward, source, config)
    except (ConfigError, DataError) as err:
        raise type(err)(f"{where}: {err}") from err


def _check_test_writers(recipe: Recipe, sources: OpenSources) -> None:
    """Where a policy writes test cases, the reward must run them, and the tasks must have right programs."""
    if isinstance(recipe.workflow, CodeAndTestConfig):
        _check_runs_cases(recipe.tasks)
        for name, source in sources.train.items():
            tasks = looked_at(source, recipe.tasks.sources[name])
            _check_references(f"tasks.sources.{name}", tasks, recipe.workflow)
    for name, config in recipe.eval.sets.items():
        workflow = _workflow_of(config, recipe)
        if isinstance(workflow, CodeAndTestConfig):
            _check_references(f"eval.sets.{name}", looked_at(sources.eval[name], config.source), workflow)


def _check_runs_cases(tasks: TasksConfig) -> None:
    reward = tasks.reward
    parts = reward.rewards.values() if isinstance(reward, WeightedReward) else [reward]
    if not any(isinstance(part, CodeTestsReward | Use) for part in parts):
        raise ConfigError(
            f"the workflow code_and_test runs programs on test cases, which tasks.reward = {reward.name!r} "
            "does not do; use {name: code_tests}"
        )
    if tasks.extract != "whole":
        raise ConfigError(
            f"tasks.extract = {tasks.extract!r} would also be looked for in the right programs, which the "
            "workflow code_and_test runs; use `whole`, of which code_tests takes the last block of code"
        )


def _check_references(where: str, tasks: Iterable[Task], workflow: CodeAndTestConfig) -> None:
    for task in tasks:
        try:
            reference_of(task, workflow.reference)
        except DataError as err:
            raise DataError(f"{where}: {err}") from err


def _check_sizes(recipe: Recipe, sources: OpenSources) -> None:
    sizes = {name: len(source) for name, source in sources.train.items()}
    total = sum(sizes.values())
    listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
    for name, policy in recipe.trained.items():
        need = policy.table.groups_per_batch
        if total < need:
            raise ConfigError(
                f"policies.{name}.table.groups_per_batch = {need}, but tasks.sources hold only {total} tasks "
                f"({listed}): a batch could never be filled with different tasks; add tasks, or lower it to "
                f"at most {total}"
            )
    for name, config in recipe.eval.sets.items():
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
