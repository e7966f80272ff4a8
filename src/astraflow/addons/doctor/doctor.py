"""Checks a machine and a recipe before a run, with one line per finding.

The checks read files, and run episodes for a second in this process. They write only a file that they delete
at once. Findings are yielded one by one, since some take seconds. A failure means that `astraflow run` would
not work, and a warning means that it would work poorly.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psutil

from astraflow.addons.doctor.host_memory import host_memory_finding
from astraflow.addons.doctor.machine import (
    GIB,
    Finding,
    check_folder,
    examine_machine,
    existing_parent,
    found,
    num_cores,
    sandbox_finding,
)
from astraflow.addons.doctor.model_size import num_parameters
from astraflow.addons.one_process.hosting import host_models, open_runner, starting_weights
from astraflow.algorithms.limiters import make_limiter
from astraflow.errors import Error
from astraflow.models.hub import cache_folder
from astraflow.models.stop_ids import declared_stop_ids, folder_stop_ids, template_end
from astraflow.models.weight_files import weight_paths
from astraflow.processes.program import choose_addresses, num_threads
from astraflow.protocols import TaskSource
from astraflow.recipe.access import built_in_workflows
from astraflow.recipe.derived import derive_numbers
from astraflow.recipe.model_checks import check_model, is_to_be_fetched
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.sources import OpenSources, open_sources
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.renderer import load_renderer, load_tokenizer
from astraflow.rollout.runner import EpisodeRunner
from astraflow.run.preflight import check_recipe
from astraflow.tasks.rewards import needs_sandbox
from astraflow.trainer.backend_config import TorchBackendConfig, torch_settings
from astraflow.types import Episode, Lease, Message

__all__ = ["examine", "thread_finding"]

_SHOWN = 60
"""Number of characters of a task that are shown."""
_TRIAL_S = 1.0
"""Time during which episodes are started."""
_TRIAL_LIMIT_S = 60.0
"""Time within which these episodes must end."""
_ENOUGH = 16
"""Minimum number of episodes that show whether scores differ."""
_ENGINE = "engine"


async def examine(recipe: Recipe | None, run_dir: Path) -> AsyncIterator[Finding]:
    """Yields findings as they are made; without a recipe, only those about the machine."""
    for finding in examine_machine(run_dir):
        yield finding
    yield await sandbox_finding(
        is_needed=recipe is not None and needs_sandbox(recipe.tasks),
        has_agents=recipe is not None and any(flow.needs_sandbox for flow in built_in_workflows(recipe)),
    )
    yield found("run folder", lambda: check_folder(run_dir))
    if recipe is None:
        return
    yield thread_finding(_threads(recipe), num_cores())
    yield found("ports", lambda: _ports(recipe))
    problems = 0
    for finding in _static(recipe, run_dir):
        problems += finding.level == "fail"
        yield finding
    if problems:
        yield Finding("warn", _ENGINE, "not tried, because a check above failed")
        return
    if any(is_to_be_fetched(policy.model) for policy in recipe.policies.values()):
        yield Finding("warn", _ENGINE, "not tried, because a model is not downloaded yet")
        return
    try:
        checked = check_recipe(recipe)
        yield await _trial(checked.recipe, checked.sources)
    except Error as err:
        yield Finding("fail", _ENGINE, str(err))


def _static(recipe: Recipe, run_dir: Path) -> Iterator[Finding]:
    """Checks memory and disk, models, data, and whether they fit together."""
    models = [found(f"model of {name}", lambda n=name: _model(n, recipe)) for name in recipe.policies]
    yield from models
    if all(finding.level == "ok" for finding in models):
        yield found("memory of the run", lambda: host_memory_finding(derive_numbers(recipe)))
        yield from _gpus(recipe)
        yield found("disk of the run", lambda: _disk(recipe, run_dir))
    try:
        sources = open_sources(recipe)
    except Error as err:
        yield Finding("fail", "data", str(err))
        return
    for name, source in {**sources.train, **sources.eval}.items():
        yield found(f"data of {name}", lambda n=name, s=source: _data(n, s))
    yield found("recipe", lambda: _whole(recipe))


# --- threads and ports ----------------------------------------------------------------------------


def _threads(recipe: Recipe) -> dict[str, int]:
    """Returns the number of compute threads of each process. Dataflow and publishers mostly wait."""
    trainers: dict[str, int] = {}
    for name, policy in recipe.trained.items():
        for rank in range(policy.train.local_ranks):
            trainers[f"trainer-{name}" + (f" rank {rank}" if rank else "")] = num_threads(
                policy.train.backend
            )
    engine = num_threads(recipe.rollout.engine)
    return {**trainers, **{f"rollout-{idx}": engine for idx in range(recipe.max_services)}}


def thread_finding(threads: Mapping[str, int], cores: int) -> Finding:
    """Checks whether there are enough cores for the compute threads.

    Processes with one thread can share cores. Processes with several threads become very slow on shared
    cores, because their threads wait for each other.
    """
    total = sum(threads.values())
    text = f"{total} compute threads ({', '.join(f'{n}: {t}' for n, t in threads.items())}) on {cores} cores"
    if total <= cores:
        return Finding("ok", "threads", text)
    if max(threads.values()) > 1:
        remedy = "set num_threads to 1: threads that wait for each other on shared cores become very slow"
        return Finding("warn", "threads", text, remedy)
    if total > 2 * cores:
        return Finding("warn", "threads", text, "lower rollout.services: more of them would only take turns")
    return Finding("ok", "threads", f"{text}; they take turns")


def _ports(recipe: Recipe) -> Finding:
    addresses = choose_addresses(recipe, {})
    listed = [addresses.dataflow, *addresses.publishers.values()]
    fixed = recipe.dataflow.port or recipe.weights.port
    text = ", ".join(f"{host}:{port}" for host, port in listed) + " can be bound"
    return Finding("ok", "ports", text if fixed else f"{text} (the recipe takes any free ones)")


# --- models and data ------------------------------------------------------------------------------


def _model(name: str, recipe: Recipe) -> Finding:
    policy = recipe.policies[name]
    check = f"model of {name}"
    if is_to_be_fetched(policy.model):
        text = f"{policy.model} is not in the cache {cache_folder()}, so it was not checked"
        return Finding("warn", check, text, "`astraflow run` downloads it before it starts anything")
    check_model(name, policy)
    renderer = load_renderer(policy.model_dir, policy.template_args)
    renderer.render((Message(role="user", content="1 + 1"),))
    num_files = len(weight_paths(policy.model_dir))
    text = (
        f"{policy.model}: {num_parameters(policy.model_dir):,} parameters in {num_files} safetensors, "
        f"tokenizer, chat template, ends with {_ids(renderer.stop_ids)}"
    )
    if remedy := _undeclared_end(policy.model_dir):
        return Finding("warn", check, text, remedy)
    return Finding("ok", check, text)


def _undeclared_end(model_dir: Path) -> str:
    """Returns what to set if the chat template ends a reply with a token that the folder does not declare;
    empty if there is nothing to set."""
    tokenizer = load_tokenizer(model_dir)
    declared = declared_stop_ids(model_dir, tokenizer)
    end = template_end(tokenizer)
    if end is None or end in declared or end not in folder_stop_ids(model_dir, tokenizer):
        return ""
    return (
        f"set eos_token_id in generation_config.json to {[*declared, end]}: the chat template ends a reply "
        f"with {tokenizer.convert_ids_to_tokens(end)} ({end}), which no file of the folder declares. "
        "AstraFlow ends completions there anyway, but other programs do not"
    )


def _ids(stop_ids: frozenset[int]) -> str:
    return ("token " if len(stop_ids) == 1 else "tokens ") + ", ".join(map(str, sorted(stop_ids)))


def _gpus(recipe: Recipe) -> Iterator[Finding]:
    """Tells who uses which GPU, and what each trainer needs there."""
    engine = recipe.rollout.engine
    settings = [torch_settings(policy.train.backend) for policy in recipe.trained.values()]
    if not any(map(_is_on_gpu, (engine, *settings))):
        return
    import torch

    from astraflow.addons.doctor.gpu_memory import gpu_memory_finding, share_finding

    yield found("users of GPUs", lambda: share_finding(recipe))
    for name, policy in recipe.trained.items():
        if _is_on_gpu(torch_settings(policy.train.backend)):
            check = f"GPU memory of trainer-{name}"
            yield found(check, lambda n=name, p=policy: gpu_memory_finding(n, p, torch.cuda.device_count()))


def _is_on_gpu(config: object) -> bool:
    return isinstance(config, TorchEngineConfig | TorchBackendConfig) and config.device.startswith("cuda")


def _disk(recipe: Recipe, run_dir: Path) -> Finding:
    """Checks whether the run folder fits on the disk.

    The folder has the published versions, and the checkpoints with their two moments. Both include the one
    that is being written.
    """
    # Bytes per parameter: 4 in a version, 12 in a checkpoint with its two moments.
    need = sum(
        num_parameters(policy.model_dir)
        * (4 * (recipe.weights.keep + 2) + 12 * (policy.train.keep_checkpoints + 1))
        for policy in recipe.trained.values()
    )
    free = psutil.disk_usage(str(existing_parent(run_dir))).free
    text = f"about {need / GIB:.2f} GiB for weights and checkpoints, of {free / GIB:.1f} GiB free"
    remedy = "choose another --run-dir, or keep fewer: weights.keep, train.keep_checkpoints"
    if need > free:
        return Finding("fail", "disk of the run", text, remedy)
    if 2 * need > free:
        return Finding("warn", "disk of the run", text, remedy)
    return Finding("ok", "disk of the run", text)


def _data(name: str, source: TaskSource) -> Finding:
    task = source.task(0)
    prompt = task.prompt if len(task.prompt) <= _SHOWN else f"{task.prompt[: _SHOWN - 3]}..."
    answer = task.answer if len(task.answer) <= _SHOWN else f"{task.answer[: _SHOWN - 3]}..."
    return Finding("ok", f"data of {name}", f"{len(source):,} tasks; {task.id}: {prompt!r} -> {answer!r}")


def _whole(recipe: Recipe) -> Finding:
    recipe = check_recipe(recipe).recipe
    parts = [
        f"{name}: {p.train.steps} steps of {p.table.batch_groups} groups of {p.table.group_size}, "
        f"{make_limiter(p.table.limiter).max_tickets(p.table.sizes)} groups in flight"
        for name, p in recipe.trained.items()
    ]
    return Finding("ok", "recipe", f"{'; '.join(parts)}: the tables can be filled")


# --- a second of episodes -------------------------------------------------------------------------


@dataclass(slots=True)
class _Trial:
    """The results of the episodes so far: scores, and messages of those that failed."""

    scores: list[float] = field(default_factory=list[float])
    failures: list[str] = field(default_factory=list[str])


async def _trial(recipe: Recipe, sources: OpenSources) -> Finding:
    """Runs workflow, engine and reward for about a second."""
    source = next(iter(sources.train.values()))
    trial = _Trial()
    async with (
        host_models(recipe, starting_weights(recipe)) as hosted,
        open_runner(recipe, hosted, num_scorers=1) as runner,
    ):
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(_TRIAL_LIMIT_S):
                await _run_episodes(recipe, runner, source, trial)
        except TimeoutError:
            if not trial.scores:
                trial.failures.append(f"no episode ended within {_TRIAL_LIMIT_S:.0f} s")
        return _trial_finding(trial, hosted, time.perf_counter() - began_s)


async def _run_episodes(recipe: Recipe, runner: EpisodeRunner, source: TaskSource, trial: _Trial) -> None:
    numbers = count()
    end_s = time.perf_counter() + _TRIAL_S

    async def work() -> None:
        while time.perf_counter() < end_s and not trial.failures:
            number = next(numbers)
            task = source.task(number % len(source))
            lease = Lease(
                id=f"doctor.{number}",
                kind="train",
                group_id=0,
                episode_idx=0,
                attempt=0,
                task=task,
                seed=number,
            )
            outcome = (await runner.run(lease)).outcome
            if isinstance(outcome, Episode):
                trial.scores.append(outcome.score)
            else:
                trial.failures.append(f"{outcome.error_class}: {outcome.message}")

    async with asyncio.TaskGroup() as group:
        for _ in range(recipe.rollout.max_episodes):
            group.create_task(work())


def _trial_finding(trial: _Trial, hosted: Mapping[str, HostedPolicy], seconds: float) -> Finding:
    if trial.failures:
        return Finding("fail", _ENGINE, f"an episode failed with {trial.failures[0]}")
    tokens = sum(policy.engine.capacity().generated_tokens for policy in hosted.values())
    mean = sum(trial.scores) / len(trial.scores)
    speed = f"{tokens / seconds:,.0f} tokens/s in one process"
    text = f"{len(trial.scores)} episodes, {speed}, mean score {mean:.3f}"
    if len(trial.scores) >= _ENOUGH and min(trial.scores) == max(trial.scores):
        remedy = "all scores are equal, so there may be nothing to learn: look at `astraflow try RECIPE`"
        return Finding("warn", _ENGINE, text, remedy)
    return Finding("ok", _ENGINE, text)
