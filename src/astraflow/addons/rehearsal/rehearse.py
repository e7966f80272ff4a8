"""Rehearses a recipe: all of a run on GPUs that can be computed without them, one finding after another.

The checks of a run come first, without those that concern this machine. Then come the first prompts, a step
of each trainer on fake tensors, the servers, and time and space. Each prediction says how it was made.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from astraflow.addons.doctor.chat_templates import RENDERING_CHECK
from astraflow.addons.doctor.gpu_checks import check_shares, gpu_users
from astraflow.addons.doctor.memory import rank_need
from astraflow.addons.inference_servers.build_report import driver_version, gpu_found
from astraflow.addons.inference_servers.config import ServerEngineConfig
from astraflow.addons.inference_servers.rehearsed_server import check_arguments
from astraflow.addons.rehearsal.cards import CARDS, USABLE_FRAC, Card
from astraflow.addons.rehearsal.estimates import (
    DELTA_GB_PER_S,
    FULL_GB_PER_S,
    GB,
    TOKENS_PER_SAMPLE,
    Sizes,
    Speeds,
    cache_tokens,
    engine_option,
)
from astraflow.addons.rehearsal.fake_rank import FakeRank, fake_rank
from astraflow.addons.rehearsal.first_prompts import first_prompts
from astraflow.errors import ConfigError, DataError, Error
from astraflow.models.families import context_limit
from astraflow.models.model_folder import has_tokenizer
from astraflow.models.weight_files import weight_paths
from astraflow.recipe.model_checks import check_family
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.run.checks import Check, Examined, Finding, make_checks
from astraflow.run.preflight import all_checks
from astraflow.trainer.backend_config import torch_settings
from astraflow.trainer.memory_need import MemoryNeed
from astraflow.user_input.mistakes import as_written
from astraflow.user_input.user_files import json_object

__all__ = ["Rehearsal", "rehearse"]

_OF_THIS_MACHINE = {"gpus", "memory", "server of the engine", "sandbox", "megatron", "fan_out"}
"""Checks of a run that ask this machine, which isn't the one of the run."""
_LAUNCH_S = 5e-6
"""Time that the host takes for a launch, assumed. GPUs wait for it if launches are many and small."""
_NCCL_GB = 2.0
"""Memory of NCCL's buffers on each of several ranks, assumed."""


@dataclass(frozen=True)
class Rehearsal:
    """What a recipe is rehearsed for. Example: `rehearse(Rehearsal(recipe, 8, "H100-80GB"))`."""

    recipe: Recipe
    num_gpus: int
    """GPUs of a machine; 0 if they weren't stated."""
    card_name: str
    max_hours: float = 0.0
    """Longest time that the run may take; 0: any."""
    price: float = 0.0
    """Of one GPU and hour; 0 if unknown."""

    @property
    def card(self) -> Card:
        return CARDS[self.card_name]

    @cached_property
    def engine(self) -> Any:
        """The engine's config, whose type its fields depend on."""
        return self.recipe.rollout.engine

    @cached_property
    def sizes(self) -> dict[str, Sizes]:
        """Policy -> sizes of its model."""
        return {name: Sizes(policy) for name, policy in self.recipe.policies.items()}

    @property
    def gpus_per_server(self) -> int:
        return int(engine_option(self.recipe, "--tensor-parallel-size") or 1)

    @property
    def num_generating(self) -> int:
        """GPUs that generate."""
        own = sum(self.recipe.rollout.services * len(each.gpus) for each in self.engine.servers.values())
        return own or self.recipe.rollout.services * self.gpus_per_server

    @cached_property
    def speeds(self) -> Speeds:
        return Speeds(self.recipe, next(iter(self.sizes.values())), self.num_generating)


def rehearse(rehearsal: Rehearsal) -> Iterator[Finding]:
    """Yields the findings. A part of the recipe that is wrong doesn't keep others from being rehearsed."""
    policies = rehearsal.recipe.policies.values()
    unbuilt = {policy.model for policy in policies if not _has_weights(policy.model_dir)}
    examined = Examined(rehearsal.recipe, unbuilt=unbuilt)
    own = [check for check in all_checks() if check.name not in _OF_THIS_MACHINE]
    yield from make_checks(own, ("recipe", "trial"), examined)
    rehearsal = replace(rehearsal, recipe=examined.recipe)
    parts: list[tuple[str, Callable[[Rehearsal, Examined], object]]] = [
        ("models", _check_folders),
        ("first prompts", _check_prompts),
        ("GPUs", _check_gpus),
        ("training step", _check_steps),
        ("servers", _check_servers),
        ("KV cache", _check_caches),
        ("versions", _check_versions),
        ("evaluation", _check_evaluation),
        ("episodes", _check_episodes),
        ("hours", _check_hours),
    ]
    checks = [Check(name, ("recipe",), partial(look, rehearsal)) for name, look in parts]
    yield from make_checks(checks, ("recipe",), examined)


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_paths(folder))
    except DataError:
        return False


# --- models and prompts ---------------------------------------------------------------------------


def _check_folders(rehearsal: Rehearsal, examined: Examined) -> None:
    recipe = rehearsal.recipe
    readable: list[str] = []
    for name, policy in recipe.policies.items():
        where = f"{as_written(f'policies.{name}.model')} = {policy.model!r}"
        if not (policy.model_dir / "config.json").is_file():
            remedy = (
                f"download the small files, e.g. `hf download OWNER/{policy.model_dir.name} --include "
                f"'*.json' '*.jinja' --local-dir {policy.model_dir}`: the rehearsal needs no weights"
            )
            examined.add(Finding("fail", "models", f"{where} has no config.json", remedy))
            continue
        size = rehearsal.sizes[name]
        text = f"{name}: {size.num_weights / GB:.1f}B weights, {size.num_active / GB:.1f}B per token"
        text += (
            "" if policy.model not in examined.unbuilt else "; sizes from config.json alone, no weights yet"
        )
        examined.collect("models", _check_positions, rehearsal, policy)
        if policy.model in examined.unbuilt:  # others have passed the checks of a run
            examined.collect("models", check_family, name, policy, recipe.rollout, exact=recipe.exact)
        if not has_tokenizer(policy.model_dir):
            examined.add(Finding("warn", "models", f"{text}; no tokenizer, so prompts aren't rehearsed"))
        else:
            examined.add(Finding("ok", "models", text))
            readable += [name] if policy.model in examined.unbuilt else []
    examined.sound = readable
    RENDERING_CHECK.look(examined)


def _check_positions(rehearsal: Rehearsal, policy: PolicyConfig) -> None:
    """Raises: ConfigError if the context is longer than that for which the model was made."""
    limit = context_limit(json_object(policy.model_dir / "config.json"))
    context = getattr(rehearsal.engine, "context", 0)
    if limit and context > limit:
        raise ConfigError(
            f"rollout.engine.max_context = {context}, but {policy.model} has {limit} positions, and servers "
            f"refuse more; set it to {limit} at most"
        )


def _check_prompts(rehearsal: Rehearsal, examined: Examined) -> Finding | None:
    """Raises: ConfigError if a prompt leaves no room for a whole answer."""
    recipe = rehearsal.recipe
    folders = [policy.model_dir for policy in recipe.policies.values()]
    if not all(map(has_tokenizer, folders)):
        return None
    if not examined.sources.train:
        return Finding("warn", "first prompts", "not rehearsed, since no data source could be opened")
    asked = asyncio.run(first_prompts(recipe, examined.sources))
    for each in asked:
        most = recipe.policies[each.policy].sampling.max_tokens
        if each.max_tokens < most:
            raise ConfigError(
                f"a first prompt of {each.policy} has {each.num_tokens} tokens and leaves room for "
                f"{each.max_tokens} of {as_written(f'policies.{each.policy}.sampling.max_tokens')} = {most} "
                f"in rollout.engine.max_context = {rehearsal.engine.context}; raise it to "
                f"{each.num_tokens + most}, or lower max_tokens"
            )
    if not asked:
        return Finding("warn", "first prompts", "no policy was asked anything within 60 s")
    longest = max(each.num_tokens for each in asked)
    return Finding("ok", "first prompts", f"{len(asked)} requests, of {longest} tokens at most, leave room")


# --- GPUs -----------------------------------------------------------------------------------------


def _check_gpus(rehearsal: Rehearsal, examined: Examined) -> Finding | None:
    del examined
    users = gpu_users(rehearsal.recipe)
    check_shares(users)
    num = len(users)
    if rehearsal.num_gpus and num > rehearsal.num_gpus:
        raise ConfigError(
            f"the recipe uses {num} GPUs of this machine ({', '.join(sorted(users))}), but --gpus names "
            f"{rehearsal.num_gpus}; name more, or lower train.ranks and rollout.services"
        )
    return Finding("ok", "GPUs", f"{num} of a machine are used, {rehearsal.card_name}") if num else None


def _check_steps(rehearsal: Rehearsal, examined: Examined) -> None:
    for name, policy in rehearsal.recipe.trained.items():
        backend = torch_settings(policy.train.backend)
        if backend is not None and backend.device.startswith("cuda"):
            examined.collect(f"trainer-{name}", _check_step, rehearsal, name, policy)


def _check_step(rehearsal: Rehearsal, name: str, policy: PolicyConfig) -> Finding:
    length = min(policy.train.token_budget, getattr(rehearsal.engine, "context", policy.train.token_budget))
    need = rank_need(policy)
    formula = need.total if need else 0.0
    try:
        traced = fake_rank(policy, length=length)
        total = traced.peak["Total"]
        method = traced.method
        text = ", ".join(
            f"{kind.lower()} {size / GB:.1f}" for kind, size in traced.peak.items() if size > GB / 10
        )
        text = text.replace("total", "in all")
    except Error as err:
        traced = None
        total = formula
        method = f"formula, since {err}"
        text = need.text() if need else "unknown"
    if policy.train.ranks > 1:
        total += _NCCL_GB * GB
    shared = _servers_gb(rehearsal, policy) * GB
    usable = USABLE_FRAC * rehearsal.card.gb * GB - shared
    each = f"each of {policy.train.ranks} ranks" if policy.train.ranks > 1 else "its process"
    nccl = f" with {_NCCL_GB:.0f} for NCCL" if policy.train.ranks > 1 else ""
    said = f"{each} needs {total / GB:.1f} GB{nccl} of {usable / GB:.1f} usable: {text} [{method}]"
    if traced:
        said += f"; {_work_text(rehearsal, traced, name)}"
    if total > usable:
        remedy = _cheapest(policy, need, total - usable)
        kinds = (rehearsal.sizes[name].config.get("layer_types") or ()) if traced else ()
        if "linear_attention" in kinds:
            remedy += (
                "; its linear attention was rehearsed as torch computes it; the kernels of "
                "flash-linear-attention, which transformers uses if they are installed, need less"
            )
        if traced and not traced.is_packed:
            remedy += (
                "; attention of this family may keep a weight for each pair of tokens, so lowering "
                "rollout.engine.max_context and train.token_budget saves most"
            )
        return Finding("fail", f"trainer-{name}", said, remedy)
    return Finding("warn" if traced is None else "ok", f"trainer-{name}", said)


def _work_text(rehearsal: Rehearsal, traced: FakeRank, name: str) -> str:
    """What a microbatch computes, with a lower bound of its time."""
    card = rehearsal.card
    figures = traced.figures
    seconds = figures["flops"] / card.flop_per_s + figures["bytes_moved"] / card.bytes_per_s
    seconds = max(seconds, figures["launches"] * _LAUNCH_S)
    used = 6 * rehearsal.sizes[name].num_active * traced.num_tokens / seconds / card.flop_per_s
    return (
        f"a microbatch of {traced.num_tokens:,} tokens has {figures['launches']:,.0f} launches, "
        f"{figures['reads']:.0f} reads of numbers, {figures['collectives']:.0f} collectives of "
        f"{figures['collective_bytes'] / GB:.0f} GB, and takes at least {seconds:.2f} s, an MFU of at most "
        f"{used:.2f} [roofline, without communication]"
    )


def _cheapest(policy: PolicyConfig, need: MemoryNeed | None, excess: float) -> str:
    """The setting that saves enough and costs least, or those that save most."""
    savings: Mapping[str, float] = {} if need is None else need.savings
    enough = [setting for setting, size in savings.items() if size >= excess]
    over = f"it is {excess / GB:.1f} GB too much"
    if enough:
        return f"{over}; the cheapest change is {enough[0]}"
    return f"{over}; use larger cards, train.ranks: {2 * policy.train.ranks}, or {' and '.join(savings)}"


# --- servers --------------------------------------------------------------------------------------


def _share(rehearsal: Rehearsal) -> float:
    option = getattr(rehearsal.engine, "share_option", "")
    return float(engine_option(rehearsal.recipe, option) or 0) if option else 0.0


def _servers_gb(rehearsal: Rehearsal, policy: PolicyConfig) -> float:
    """What servers take of the GPUs of a trainer with which they share them."""
    backend = torch_settings(policy.train.backend)
    first = int(backend.device.partition(":")[2] or 0) if backend else 0
    mine = {str(gpu) for gpu in range(first, first + policy.train.local_ranks)}
    users = gpu_users(rehearsal.recipe)
    if rehearsal.recipe.cluster.lend:
        return 0.0  # they take turns
    shares = [sum(sum(user.shares) for user in own) for gpu, own in users.items() if gpu in mine]
    return max(shares, default=0.0) * rehearsal.card.gb


def _check_servers(rehearsal: Rehearsal, examined: Examined) -> Finding | None:
    """Raises: ConfigError if the server's parser, the model, or the driver refuses the arguments."""
    engine = rehearsal.engine
    if not isinstance(engine, ServerEngineConfig) or engine.attach.url:
        return None
    num = rehearsal.gpus_per_server
    for name, sizes in rehearsal.sizes.items():
        if heads := sizes.config["num_attention_heads"] % num:
            raise ConfigError(
                f"rollout.engine.args: --tensor-parallel-size {num} doesn't divide the "
                f"{sizes.config['num_attention_heads']} heads of {name} ({heads} are left); use 1, 2, 4, or 8"
            )
    for gpus in rehearsal.recipe.rollout.gpus:
        if len(gpus.split(",")) < num:
            raise ConfigError(
                f"rollout.engine.args: --tensor-parallel-size {num} needs {num} GPUs, but rollout.gpus gives "
                f"a service {gpus!r}"
            )
    if gpu_found() or driver_version():
        examined.collect("servers", engine.check_machine)
    model = next(iter(rehearsal.recipe.policies.values())).model_dir
    return check_arguments(engine, model)


def _check_caches(rehearsal: Rehearsal, examined: Examined) -> None:
    engine = rehearsal.engine
    if not isinstance(engine, ServerEngineConfig) or not (share := _share(rehearsal)):
        return
    rollout = rehearsal.recipe.rollout
    num_servers = max(1, rehearsal.num_generating // (rollout.services or 1) // rehearsal.gpus_per_server)
    kinds = {"training": (share, rollout.max_episodes / num_servers)}
    if rehearsal.recipe.eval.sets:
        most = rehearsal.recipe.eval.max_per_service or rollout.max_episodes
        kinds["evaluation"] = (engine.eval_share or share, most / num_servers)
    for kind, (part, num) in kinds.items():
        for name, sizes in rehearsal.sizes.items():
            tokens = cache_tokens(sizes, part * rehearsal.card.gb, gpus_per_server=rehearsal.gpus_per_server)
            text = (
                f"{name}, {kind}: a server's share of {part:g} holds {max(0, tokens):,} tokens, "
                f"{max(0, tokens) / num:,.0f} for each of {num:.0f} episodes [formula]"
            )
            examined.add(_cache_finding(text, tokens, engine.context, num))


def _cache_finding(text: str, tokens: int, context: int, num_episodes: float) -> Finding:
    """Judges a cache of so many tokens, which must hold a whole context."""
    if tokens <= 0:
        remedy = "the weights alone don't fit: raise the share, or --tensor-parallel-size"
        return Finding("fail", "KV cache", text, remedy)
    if tokens < context:
        remedy = f"raise the share, or lower rollout.engine.max_context = {context}"
        return Finding("fail", "KV cache", text, remedy)
    if tokens < 1000 * num_episodes:
        remedy = "lower rollout.max_episodes (eval.max_per_service), or raise the share"
        return Finding("warn", "KV cache", text, remedy)
    return Finding("ok", "KV cache", text)


# --- time and space -------------------------------------------------------------------------------


def _check_versions(rehearsal: Rehearsal, examined: Examined) -> Finding | None:
    """Raises: ConfigError if a version takes longer than the servers' time limit."""
    del examined
    recipe = rehearsal.recipe
    kinds = {name: torch_settings(p.train.backend) for name, p in recipe.trained.items()}
    num_bytes = sum(
        rehearsal.sizes[name].num_weights * (2 if kind and kind.publish_dtype == "bfloat16" else 4)
        for name, kind in kinds.items()
    )
    if not num_bytes:
        return None
    rate = DELTA_GB_PER_S if recipe.weights.delta else FULL_GB_PER_S
    seconds = num_bytes / GB / rate
    limit = getattr(rehearsal.engine, "request_timeout_s", float("inf"))
    checkpoint = sum(
        12 * rehearsal.sizes[name].num_weights * (p.train.keep_checkpoints + 1)
        for name, p in recipe.trained.items()
    )
    disk = num_bytes * (recipe.weights.keep + 2) + checkpoint
    shared = 2 * num_bytes * (2 if recipe.eval.sets else 1)
    text = (
        f"{num_bytes / GB:.1f} GB as {'a delta' if recipe.weights.delta else 'a whole'}, about {seconds:.0f} "
        f"s from trainer to server [{rate:g} GB/s, measured on two cores]; disk {disk / GB:.0f} GB; /dev/shm "
        f"{shared / GB:.0f} GB per service"
    )
    if seconds > limit:
        raise ConfigError(
            f"versions: {text}, longer than rollout.engine.request_timeout_s = {limit:g}; raise it, or set "
            "weights.delta: true"
        )
    return Finding("ok", "versions", text)


def _check_evaluation(rehearsal: Rehearsal, examined: Examined) -> Finding | None:
    """Raises: ConfigError if a round can't end before its deadline."""
    del examined
    recipe = rehearsal.recipe
    if not recipe.eval.sets or not hasattr(rehearsal.engine, "servers"):
        return None
    seconds = rehearsal.speeds.eval_s
    between = recipe.eval.every * max(rehearsal.speeds.parts.values())
    text = (
        f"a round takes about {seconds / 60:.0f} min, with {between / 60:.0f} min of training between two "
        f"[{TOKENS_PER_SAMPLE:,} tokens per answer, {rehearsal.speeds.sequence_tokens_per_s:.0f} tokens/s "
        "each, assumed]"
    )
    if seconds > recipe.eval.deadline_s:
        raise ConfigError(
            f"evaluation: {text}, longer than eval.deadline_s = {recipe.eval.deadline_s:g}; raise it or "
            "eval.max_per_service, or lower samples"
        )
    if seconds > between:
        return Finding("warn", "evaluation", text, "raise eval.every: evaluations would never end")
    return Finding("ok", "evaluation", text)


def _check_episodes(rehearsal: Rehearsal, examined: Examined) -> Finding | None:
    """Raises: ConfigError if the longest answer can't end before its episode's time is over."""
    del examined
    recipe = rehearsal.recipe
    if not hasattr(rehearsal.engine, "servers"):
        return None
    most = max(policy.sampling.max_tokens for policy in recipe.policies.values())
    rate = rehearsal.speeds.sequence_tokens_per_s
    seconds = most / rate
    limit = recipe.rollout.episode_timeout_s
    text = (
        f"the longest answer, of {most} tokens, takes {seconds / 60:.0f} min [{rate:.0f} tokens/s, assumed]"
    )
    if seconds > limit:
        raise ConfigError(
            f"episodes: {text}, longer than rollout.episode_timeout_s = {limit:g}; raise it, or lower "
            "sampling.max_tokens"
        )
    return Finding("ok", "episodes", text)


def _check_hours(rehearsal: Rehearsal, examined: Examined) -> Finding | None:
    """Raises: ConfigError if the run takes longer than it may."""
    del examined
    recipe = rehearsal.recipe
    if not hasattr(rehearsal.engine, "servers"):
        return None
    speeds = rehearsal.speeds
    steps = next(iter(recipe.trained.values())).train.steps
    rounds = steps // recipe.eval.every + 1 if recipe.eval.sets else 0
    parts = {name: steps * seconds / 3600 for name, seconds in speeds.parts.items() if seconds}
    slowest = max(parts, key=lambda name: parts[name])
    hours = speeds.hours
    num = rehearsal.num_generating + sum(policy.train.ranks for policy in recipe.trained.values())
    cost = (
        f", {hours * num * rehearsal.price:,.0f} at {rehearsal.price:g} per GPU-hour"
        if rehearsal.price
        else ""
    )
    shown = ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
    text = (
        f"{hours:.1f} hours for {steps} steps, {hours * num:,.0f} GPU-hours{cost}; {slowest} dominates "
        f"({shown}, {rounds} evaluations {rounds * speeds.eval_s / 3600:.1f}, at the same time) [assumed "
        "speeds, docs/full_recipes.md]"
    )
    if rehearsal.max_hours and hours > rehearsal.max_hours:
        raise ConfigError(
            f"hours: {text}, longer than --max-hours {rehearsal.max_hours:g}; lower train.steps or the "
            f"batch, or give {'generation' if slowest != 'training' else 'training'} more GPUs"
        )
    return Finding("ok", "hours", text)
