"""Fills in the keys of a recipe whose value is `auto`, from the recipe's tasks and models.

    policies.*.table.groups_per_batch ... 64, or the number of tasks if there are fewer
    rollout.engine.max_context .......... what prompts and completions need, at most the models' limit
    rollout.engine.num_slots ............ 128, or fewer if the KV caches would take too much memory

A workflow with one completion per task needs room for the longest prompt, the tokens of the chat template,
and `sampling.max_tokens`. Any other workflow decides by itself how long a conversation becomes: it gets 4,096
tokens, or more if one completion needs more. A value that the recipe sets is never changed.

The embedded engine reserves a slot's keys and values for the whole `max_context` when it starts. Each policy
has its own cache, and an evaluation uses a second one. A recipe that leaves `num_slots` open gets the largest
number of `SLOT_STEPS` with which the caches of all rollout services of this machine take at most half of the
memory that is available when the run starts. If the services run on GPUs or on other machines, `num_slots`
stays open, and each engine chooses by the memory of its own device.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from astraflow import added
from astraflow.config import Config
from astraflow.dataflow.config import AUTO_BATCH
from astraflow.errors import ConfigError, DataError
from astraflow.models.families import cached_values, context_limit
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.recipe.run_plan import scoring_tasks
from astraflow.recipe.sources import OpenSources, open_sources, workflow_of
from astraflow.rollout.engine_config import SLOT_STEPS, ModelEngineConfig, TorchEngineConfig
from astraflow.service.memory import available_bytes
from astraflow.tasks.config import judges_of
from astraflow.tasks.selection import longest_prompt
from astraflow.user_input.mistakes import problem_of
from astraflow.user_input.user_files import json_object
from astraflow.workflows.config import SingleTurnConfig

__all__ = ["choose_slots", "derive_numbers", "find_open_keys", "slot_bytes", "stop_notes"]

_CONVERSATION = 4_096
"""Tokens for a conversation of several turns. Each slot of the engine reserves memory for all of them."""
_TEMPLATE = 256
"""Tokens reserved for what a chat template adds to the texts of a prompt; few templates add more than 100."""
_MULTIPLE = 64
"""Contexts are rounded up to a multiple of this number, which suits every kernel."""
_CACHE_SHARE = 0.5
"""Largest share of the available memory for caches. Weights, gradients, and optimizers need the rest."""
_ConfigT = TypeVar("_ConfigT", bound=Config)


def find_open_keys(recipe: Recipe) -> list[str]:
    """Returns the keys whose value is `auto`."""
    keys = [
        f"policies.{name}.table.groups_per_batch"
        for name, policy in recipe.policies.items()
        if policy.table.groups_per_batch == "auto"
    ]
    engine = recipe.rollout.engine
    if isinstance(engine, ModelEngineConfig) and engine.max_context == "auto":
        keys.append("rollout.engine.max_context")
    return keys


def derive_numbers(recipe: Recipe, sources: OpenSources | None = None) -> Recipe:
    """Returns the recipe with a number in place of each `auto`. Opens its sources if they are not given.

    Without any source, a batch has 64 groups, and the context is that of a conversation.

    Raises: ConfigError or DataError if a source cannot be opened, or a number does not fit the other keys.
    """
    if not find_open_keys(recipe):
        return _with_slots(recipe)
    sources = sources or open_sources(recipe)
    num_tasks = sum(map(len, sources.train.values()))
    policies = {name: _with_batch(policy, num_tasks) for name, policy in recipe.policies.items()}
    rollout = recipe.rollout
    engine = rollout.engine
    if isinstance(engine, ModelEngineConfig) and engine.max_context == "auto":
        rollout = _change(rollout, engine=_change(engine, max_context=_context(recipe, sources)))
    return _with_slots(_change(recipe, policies=policies, rollout=rollout))


def _with_slots(recipe: Recipe) -> Recipe:
    """The recipe with a number of slots, if its engines compute on CPUs of this machine."""
    rollout = recipe.rollout
    engine = rollout.engine
    is_open = isinstance(engine, TorchEngineConfig) and engine.num_slots == "auto" and engine.device == "cpu"
    if not is_open or not recipe.has_services_here:
        return recipe
    engine = _change(engine, num_slots=choose_slots(recipe))
    return _change(recipe, rollout=_change(rollout, engine=engine))


def slot_bytes(recipe: Recipe, *, with_evals: bool = True) -> float:
    """What one slot of the embedded engine needs in a rollout service: a row of each policy's caches, and its
    share of their pools.

    0 for other engines, whose servers manage their own memory.
    """
    engine = recipe.rollout.engine
    if not isinstance(engine, TorchEngineConfig):
        return 0.0
    size = 4 if engine.dtype == "float32" else 2
    total = 0.0
    served_with = added.served_with(recipe)
    for name, policy in recipe.policies.items():
        if name in served_with:
            continue
        # Evaluations of a policy whose weights change run from a second weight slot with its own cache. In an
        # engine that policies share, that is one more adapter.
        has_two = with_evals and recipe.eval.sets and policy.role != "frozen"
        num_caches = 2 if has_two and name not in served_with.values() else 1
        total += num_caches * cached_values(_model_config(policy.model_dir)) * size * engine.context
    return total * (1 + engine.prefix_pool)


def choose_slots(recipe: Recipe, num_bytes: float | None = None) -> int:
    """The number of slots for a recipe with a known `max_context`, by the available memory."""
    each = slot_bytes(recipe) * recipe.max_services
    room = _CACHE_SHARE * (available_bytes() if num_bytes is None else num_bytes)
    return next((num for num in SLOT_STEPS if num * each <= room), SLOT_STEPS[-1])


def _model_config(folder: Path) -> Mapping[str, Any]:
    """The model's config.json; empty if there is none yet, or if it is broken, which the model's own check
    reports."""
    try:
        return json_object(folder / "config.json")
    except DataError:
        return {}


def stop_notes(recipe: Recipe, sources: OpenSources) -> Iterator[str]:
    """Yields what the recipe's `stop` means for each policy, in steps."""
    stop = recipe.stop
    num_draws = stop.epochs * sum(map(len, sources.train.values()))
    for name, policy in recipe.trained.items():
        num_groups = policy.table.batch_groups
        num = num_groups * policy.table.group_size
        limits: list[str] = []
        if stop.epochs:
            num_steps = num_draws // policy.table.least_fresh
            limits.append(f"stop.epochs (draws {num_draws:,} groups, enough for at most {num_steps:,} steps)")
        if stop.sequences:
            num_steps = math.ceil(stop.sequences / num)
            limits.append(f"stop.sequences (about {num_steps:,} steps of {num:,} episodes, if each is one)")
        if stop.tokens:
            limits.append(f"stop.tokens ({stop.tokens:,})")
        if limits:
            yield f"{name}: trains for train.steps = {policy.train.steps:,}, or less by {' or '.join(limits)}"


def _change(config: _ConfigT, **values: object) -> _ConfigT:
    """Returns the config with other values, validated again. Doesn't use JSON, which leaves out secrets."""
    try:
        return type(config)(**{**dict(config), **values})
    except ValidationError as err:
        problems = "; ".join(map(problem_of, err.errors()))
        raise ConfigError(f"{problems}; the number of tasks makes the batch that small: add tasks") from err


def _with_batch(policy: PolicyConfig, num_tasks: int) -> PolicyConfig:
    if policy.table.groups_per_batch != "auto":
        return policy
    table = _change(policy.table, groups_per_batch=min(AUTO_BATCH, num_tasks or AUTO_BATCH))
    return _change(policy, table=table)


def _context(recipe: Recipe, sources: OpenSources) -> int:
    """Returns `max_context` of the engines, which all policies share."""
    folder = recipe.tokenizer_dir
    configs = {name: config.source for name, config in recipe.eval.sets.items()}
    prompts = [longest_prompt(s, recipe.tasks.sources[name], folder) for name, s in sources.train.items()]
    prompts += [longest_prompt(source, configs[name], folder) for name, source in sources.eval.items()]
    of_policies = [policy.sampling.max_tokens for policy in recipe.policies.values()]
    of_sets = [config.sampling.max_tokens for config in recipe.eval.sets.values()]
    need = max(prompts, default=0) + _TEMPLATE + max(of_policies + of_sets)
    if not prompts or not _asks_once(recipe):
        need = max(need, _CONVERSATION)
    need = -(-need // _MULTIPLE) * _MULTIPLE
    limits = [context_limit(_model_config(policy.model_dir)) for policy in recipe.policies.values()]
    return max(2, min([need, *[limit for limit in limits if limit]]))


def _asks_once(recipe: Recipe) -> bool:
    """Returns whether every trajectory is one prompt and one completion."""
    workflows = [recipe.workflow, *(workflow_of(config, recipe) for config in recipe.eval.sets.values())]
    has_judges = any(
        judge.judging_policy
        for tasks in scoring_tasks(recipe).values()
        for judge in judges_of(tasks).values()
    )
    return not has_judges and all(isinstance(workflow, SingleTurnConfig) for workflow in workflows)
