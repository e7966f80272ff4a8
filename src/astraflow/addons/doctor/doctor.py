"""Checks a machine and a recipe before a run, with one line per finding.

The checks are those of a run (`preflight.CHECKS`), and some whose findings are only advice. They read files,
and run a few episodes in this process. Findings are yielded one by one, since some take seconds. A failure
means that `astraflow run` would not work, and a warning means that it would work poorly.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from math import ceil
from pathlib import Path

import psutil

from astraflow.addons.doctor.machine import examine_machine, existing_parent
from astraflow.addons.doctor.memory import (
    GIB,
    gpu_memory_finding,
    known_parameters,
    moment_bytes,
    num_parameters,
)
from astraflow.addons.experiments.cores import num_cores
from astraflow.addons.one_process.hosting import host_models, open_runner, starting_weights
from astraflow.addons.sandbox.check import sandbox_finding
from astraflow.dataflow.core.table_parts import TableParts
from astraflow.errors import ConfigError, Error
from astraflow.losses.config import ValueModelConfig
from astraflow.models.chat_template import template_texts
from astraflow.models.hub import model_path
from astraflow.models.stop_ids import declared_stop_ids, folder_stop_ids, template_end
from astraflow.processes.program import num_threads
from astraflow.protocols import TaskSource
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.renderer import load_renderer, load_tokenizer
from astraflow.run.checks import Check, Examined, Finding
from astraflow.run.preflight import examine_recipe
from astraflow.trainer.backend_config import TorchBackendConfig, torch_settings
from astraflow.types import Episode, Lease, Message
from astraflow.user_input.extras import install_hint, missing_module

__all__ = ["examine", "thread_finding"]

_SHOWN = 60
"""Number of characters of a task that are shown."""
_NUM_EPISODES = 16
"""Episodes that are tried: enough to show whether scores differ."""
_LIMIT_S = 60.0
"""Time within which one of these episodes must end."""
_ENGINE = "engine"


async def examine(recipe: Recipe | None, run_dir: Path) -> AsyncGenerator[Finding]:
    """Yields findings as they are made; without a recipe, only those about the machine."""
    for finding in examine_machine(run_dir):
        yield finding
    if recipe is None:
        yield await sandbox_finding(is_needed=False)
        return
    examined = Examined(recipe, run_dir)
    checks = examine_recipe(examined, ("recipe", "folder", "trial"), advice=_ADVICE)
    while (finding := await asyncio.to_thread(next, checks, None)) is not None:
        yield finding
    yield await _try_engine(examined)


def _check_threads(examined: Examined) -> Finding:
    return thread_finding(_threads(examined.recipe), num_cores())


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


# --- tokenizers -----------------------------------------------------------------------------------


def _check_tokenizers(examined: Examined) -> None:
    for name in examined.sound:
        examined.collect(f"tokenizer of {name}", _render, name, examined.recipe.policies[name])


def _render(name: str, policy: PolicyConfig) -> Finding:
    """Renders a prompt with the tokenizer, and says which tokens end a completion."""
    try:
        renderer = load_renderer(policy.model_dir, policy.template_args, choice=policy.renderer)
    except ModuleNotFoundError as err:
        if not (module := missing_module(err)):
            raise
        raise ConfigError(install_hint("this check", [module])) from err
    renderer.render((Message(role="user", content="1 + 1"),))
    word = "token" if len(renderer.stop_ids) == 1 else "tokens"
    text = f"{policy.model} ends with {word} {', '.join(map(str, sorted(renderer.stop_ids)))}"
    remedy = _undeclared_end(policy.model_dir)
    return Finding("warn" if remedy else "ok", f"tokenizer of {name}", text, remedy)


def _undeclared_end(model_dir: Path) -> str:
    """Returns what to set if the chat template ends a reply with a token that the folder does not declare;
    empty if there is nothing to set."""
    if not template_texts(model_dir):
        return ""
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


# --- GPUs, disk, and data ------------------------------------------------------------------------


def _check_gpus(examined: Examined) -> None:
    """Says what each trainer needs on its GPUs."""
    for name in examined.sound:
        policy = examined.recipe.policies[name]
        if policy.role != "trained":
            continue
        config = torch_settings(policy.train.backend)
        is_torch = isinstance(config, TorchEngineConfig | TorchBackendConfig)
        if is_torch and config.device.startswith("cuda"):
            import torch

            args = (name, policy, torch.cuda.device_count())
            examined.collect(f"GPU memory of trainer-{name}", gpu_memory_finding, *args)


def _check_disk(examined: Examined) -> Finding:
    """Checks whether the run folder fits on the disk."""
    recipe = examined.recipe
    need = sum(_disk_bytes(recipe, recipe.trained[name]) for name in recipe.trained if name in examined.sound)
    free = psutil.disk_usage(str(existing_parent(examined.run_dir))).free
    text = f"about {need / GIB:.2f} GiB for weights and checkpoints, of {free / GIB:.1f} GiB free"
    fewer = "weights.keep, weights.full_every" if recipe.weights.delta else "weights.keep"
    remedy = f"choose another --run-dir, or keep fewer: {fewer}, train.keep_checkpoints"
    if need > free:
        return Finding("fail", "disk of the run", text, remedy)
    if 2 * need > free:
        return Finding("warn", "disk of the run", text, remedy)
    return Finding("ok", "disk of the run", text)


def _disk_bytes(recipe: Recipe, policy: PolicyConfig) -> int:
    """What a policy's versions and checkpoints take in the run folder, with those that are being written."""
    backend = torch_settings(policy.train.backend) or TorchBackendConfig()
    version = 2 if backend.publish_dtype == "bfloat16" else 4
    num_versions = recipe.weights.keep
    if backend.lora.rank and backend.lora.publish == "adapters":
        num_versions = 1  # all share the frozen weights
    elif recipe.weights.delta:
        num_versions = max(recipe.weights.keep, recipe.weights.full_every)
        if version == 2:
            # Deltas since a full version have at most its size together. Those of float32 save nothing.
            num_versions = 2 * (1 + ceil(num_versions / recipe.weights.full_every))
    num_versions += 2 + 2 * bool(recipe.eval.best.metric)
    num_checkpoints = policy.train.keep_checkpoints + 1
    checkpoint = 4 + moment_bytes(backend)
    need = num_parameters(policy.model_dir) * (version * num_versions + checkpoint * num_checkpoints)
    critic = policy.train.auxiliary.critic
    if isinstance(critic, ValueModelConfig):
        folder = model_path(critic.model) if critic.model else policy.model_dir
        need += known_parameters(folder) * 12 * num_checkpoints
    return need


def _check_data(examined: Examined) -> None:
    """Shows the first task of each source."""
    sources = examined.sources
    for name, source in {**sources.train, **sources.eval}.items():
        examined.collect(f"data of {name}", _data, name, source)


def _data(name: str, source: TaskSource) -> Finding:
    task = source.task(0)
    example = f"{_cut(task.prompt)!r} -> {_cut(task.answer)!r}"
    return Finding("ok", f"data of {name}", f"{len(source):,} tasks; {task.id}: {example}")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _check_tables(examined: Examined) -> Finding | None:
    if examined.errors:
        return None
    parts = [
        f"{name}: {p.train.steps} steps of {p.table.batch_groups} groups of {p.table.group_size}, "
        f"{TableParts(name, p.table).max_tickets} groups in flight"
        for name, p in examined.recipe.trained.items()
    ]
    return Finding("ok", "tables", f"{'; '.join(parts)}: they can be filled")


_ADVICE: Sequence[Check] = (
    Check("threads", ("trial",), _check_threads),
    Check("tokenizers", ("trial",), _check_tokenizers),
    Check("GPU memory", ("trial",), _check_gpus),
    Check("disk of the run", ("trial",), _check_disk),
    Check("first tasks", ("trial",), _check_data),
    Check("tables", ("trial",), _check_tables),
)
"""What `astraflow doctor` says besides the checks that a run makes."""


# --- a few episodes -------------------------------------------------------------------------------


async def _try_engine(examined: Examined) -> Finding:
    """Runs workflow, engine and reward, unless something is wrong or missing."""
    if examined.errors:
        return Finding("warn", _ENGINE, "not tried, because a check above failed")
    if examined.unbuilt:
        return Finding("warn", _ENGINE, "not tried, because a model is not downloaded yet")
    try:
        return await _try_episodes(examined.recipe, next(iter(examined.sources.train.values())))
    except Error as err:
        return Finding("fail", _ENGINE, str(err))


async def _try_episodes(recipe: Recipe, source: TaskSource) -> Finding:
    leases = [
        Lease(
            id=f"doctor.{number}",
            kind="train",
            group_id=0,
            episode_idx=0,
            attempt=0,
            task=source.task(number % len(source)),
            seed=number,
        )
        for number in range(_NUM_EPISODES)
    ]
    async with (
        host_models(recipe, starting_weights(recipe)) as hosted,
        open_runner(recipe, hosted, num_scorers=1) as runner,
    ):
        began_s = time.perf_counter()
        running = [asyncio.ensure_future(runner.run(lease)) for lease in leases]
        done, late = await asyncio.wait(running, timeout=_LIMIT_S)
        for task in late:
            task.cancel()
        seconds = time.perf_counter() - began_s
        tokens = sum(policy.engine.capacity().generated_tokens for policy in hosted.values())
        outcomes = [task.result().outcome for task in done]
    scores: list[float] = []
    for outcome in outcomes:
        if not isinstance(outcome, Episode):
            return Finding(
                "fail", _ENGINE, f"an episode failed with {outcome.error_class}: {outcome.message}"
            )
        scores.append(outcome.score)
    if not scores:
        return Finding("fail", _ENGINE, f"no episode ended within {_LIMIT_S:.0f} s")
    text = f"{len(scores)} episodes, {tokens / seconds:,.0f} tokens/s in one process, mean score "
    text += f"{sum(scores) / len(scores):.3f}"
    if len(scores) == _NUM_EPISODES and min(scores) == max(scores):
        remedy = "all scores are equal, so there may be nothing to learn: look at `astraflow try RECIPE`"
        return Finding("warn", _ENGINE, text, remedy)
    return Finding("ok", _ENGINE, text)
