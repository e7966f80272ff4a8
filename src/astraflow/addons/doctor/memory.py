"""Computes the memory that the processes of a run need, before anything is loaded.

    host_needs, check_host_memory    memory of the machine, for all processes together
    rank_bytes                       what lasts on a trainer's GPU, by the sizes of the model alone
    rank_need, gpu_memory_finding    the same and what a pass needs, by the model's layers; imports torch

The figures are estimates. What weights, gradients, optimizer, and KV caches need is certain, so a run is
refused if that alone exceeds the memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from astraflow import added
from astraflow.errors import ConfigError, DataError
from astraflow.models.weight_files import check_weight_files
from astraflow.recipe.derived import slot_bytes
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.run.checks import Finding
from astraflow.service.memory import available_bytes, limit_bytes
from astraflow.trainer.backend_config import BackendVariant, TorchBackendConfig, torch_settings
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.memory_need import MemoryNeed
from astraflow.user_input.mistakes import as_written

if TYPE_CHECKING:
    from astraflow.trainer.torch.parallel.grid import RankGrid

__all__ = [
    "GIB",
    "HostNeed",
    "check_host_memory",
    "gpu_memory_finding",
    "host_needs",
    "known_parameters",
    "moment_bytes",
    "num_parameters",
    "rank_bytes",
    "rank_need",
]

GIB = 2**30
_HOST = "memory of the run"
_PROCESS_BYTES = 0.5 * GIB
"""Resident memory of a process that has loaded torch and transformers."""
_SHOWN_FRAC = 0.02
"""Processes that need less than this share of all are only counted."""


@dataclass(frozen=True, slots=True)
class HostNeed:
    """What each of `num` processes needs. Example: `HostNeed("trainer-actor", 1, 5.4e9, certain=4.3e9)`."""

    name: str
    num: int
    each: float
    certain: float = 0.0
    """The part of `each` that no setting of the machine can reduce."""
    is_service: bool = False
    """Whether these are the rollout services, which may run on other machines."""
    first: float = 0.0
    """What the first of them needs besides: the weights of a checkpoint."""

    @property
    def total(self) -> float:
        """What all need together."""
        return self.num * self.each + self.first


def host_needs(recipe: Recipe) -> tuple[HostNeed, ...]:
    """What the processes of a run need, if they all run on one machine."""
    sizes = {name: num_parameters(policy.model_dir) for name, policy in recipe.policies.items()}
    engine = recipe.rollout.engine
    # An engine on the CPU serves one set of weights while it installs another, and evaluates a third. An
    # engine on a GPU, or in a server, keeps one set in host memory: the version that it received last.
    engine_bytes = 4.0
    if _is_on_cpu(engine):
        engine_bytes = 12.0 if recipe.eval.sets else 8.0
    served = sum(size for name, size in sizes.items() if name not in added.served_with(recipe))
    engines = engine_bytes * served
    cache = _cache_bytes(recipe)
    one_copy = 2.0 * served + _cache_bytes(recipe, with_evals=False)
    each = _PROCESS_BYTES + engines + cache
    services = HostNeed("rollout service", recipe.max_services, each, certain=one_copy, is_service=True)
    needs = [services]
    for name, policy in recipe.trained.items():
        size = sizes[name] * _trainer_bytes(policy) / policy.train.ranks
        certain = sizes[name] * _certain_bytes(policy) / policy.train.ranks
        first = 0.0 if _is_on_cpu(policy.train.backend) else 4.0 * sizes[name]
        each = _PROCESS_BYTES + size
        needs.append(HostNeed(f"trainer-{name}", policy.train.ranks, each, certain=certain, first=first))
    needs.append(HostNeed("other process", len(recipe.trained) + 1, _PROCESS_BYTES))
    return tuple(need for need in needs if need.num)


def check_host_memory(recipe: Recipe) -> Finding | None:
    """Says what each process needs, and which settings would save most.

    Raises: ConfigError if the processes of this machine need more for their weights than it has.
    """
    try:
        needs = host_needs(recipe)
    except DataError:
        return None  # the model isn't there yet, or its own check says what is wrong
    here = [need for need in needs if recipe.has_services_here or not need.is_service]
    certain = sum(need.num * need.certain for need in here)
    if certain > (limit := limit_bytes()):
        largest = max(here, key=lambda need: need.num * need.certain)
        raise ConfigError(
            f"this machine has {limit / GIB:.1f} GiB of host memory, but weights, gradients, optimizers and "
            f"KV caches need at least {certain / GIB:.1f} GiB, most of it {largest.num} x {largest.name} "
            f"with {largest.certain / GIB:.1f} GiB each; to save most, set {_savings_text(recipe, here)}, or "
            "use a smaller model"
        )
    total = sum(need.total for need in needs)
    free = available_bytes()
    text = f"about {total / GIB:.1f} GiB for {_processes_text(needs)}, of {free / GIB:.1f} GiB free"
    backends = [policy.train.backend for policy in recipe.trained.values()]
    if not all(map(_is_on_cpu, (recipe.rollout.engine, *backends))):
        text += ", besides the memory of GPUs"
    if cache := _cache_bytes(recipe):
        engine = cast("TorchEngineConfig", recipe.rollout.engine)
        slots = f"{engine.slots} slots x {engine.context:,} tokens"
        text += f"; the KV caches of a service take {cache / GIB:.1f}: {slots}"
    if total > free:
        return Finding("warn", _HOST, text, f"to save most, set {_savings_text(recipe, needs)}")
    return Finding("ok", _HOST, text)


def _processes_text(needs: Sequence[HostNeed]) -> str:
    """What the largest processes need, e.g. `3 processes (trainer-actor 5.4, 2 x rollout service 1.1)`."""
    total = sum(need.total for need in needs)
    parts = [
        f"{need.name} {need.total / GIB:.1f}"
        if need.num == 1
        else f"{need.num} x {need.name} {need.total / need.num / GIB:.1f}"
        for need in sorted(needs, key=lambda need: -need.total)
        if need.total > _SHOWN_FRAC * total
    ]
    return f"{sum(need.num for need in needs)} processes ({', '.join(parts)})"


def _savings_text(recipe: Recipe, needs: Sequence[HostNeed]) -> str:
    """The two settings that save most, with what they save."""
    savings: dict[str, float] = {}
    for need in needs:
        if need.is_service and need.num > 1:
            savings[f"rollout.services: {need.num // 2}"] = (need.num - need.num // 2) * need.each
    slots = recipe.rollout.engine.slots if isinstance(recipe.rollout.engine, TorchEngineConfig) else 0
    if slots > 1:
        saved = recipe.max_services * _cache_bytes(recipe) / 2
        savings[f"rollout.engine.num_slots: {slots // 2}"] = saved
    for name, policy in recipe.trained.items():
        savings |= _trainer_savings(recipe, name, policy)
    best = sorted(((key, size) for key, size in savings.items() if size), key=lambda saving: -saving[1])[:2]
    text = " or ".join(f"{setting} (saves {size / GIB:.1f} GiB)" for setting, size in best)
    return text or "a smaller model"


def _trainer_savings(recipe: Recipe, name: str, policy: PolicyConfig) -> dict[str, float]:
    """Settings of a trainer that need less memory, with what they save."""
    savings: dict[str, float] = {}
    backend = policy.train.backend
    if isinstance(backend, TorchBackendConfig):
        size = float(num_parameters(policy.model_dir))
        where = as_written(f"policies.{name}.train.backend")
        if _is_on_cpu(backend) and not backend.lora.rank:
            savings[f"{where}.lora.rank: 16"] = 12 * size
        if _is_on_cpu(backend) and backend.optimizer_state == "float32":
            savings[f"{where}.optimizer_state: bfloat16"] = 4 * size
        if backend.offload_optimizer and not _is_on_cpu(backend):
            savings[f"{where}.offload_optimizer: false"] = moment_bytes(backend) * size
        if backend.publish_dtype == "float32":
            savings[f"{where}.publish_dtype: bfloat16"] = 2 * size * (1 + recipe.max_services)
    return savings


def _cache_bytes(recipe: Recipe, *, with_evals: bool = True) -> float:
    """What the KV caches of one rollout service take in host memory."""
    engine = recipe.rollout.engine
    if not isinstance(engine, TorchEngineConfig) or not _is_on_cpu(engine):
        return 0.0
    return engine.slots * slot_bytes(recipe, with_evals=with_evals)


def _is_on_cpu(config: object) -> bool:
    """Returns whether an engine or a trainer computes in host memory."""
    return isinstance(config, TorchEngineConfig | TorchBackendConfig) and config.device == "cpu"


def _certain_bytes(policy: PolicyConfig) -> float:
    """Bytes per parameter that a trainer on the CPU needs for weights, gradients, and optimizer."""
    backend = policy.train.backend
    return _lasting_bytes(backend) if isinstance(backend, TorchBackendConfig) and _is_on_cpu(backend) else 0.0


def _lasting_bytes(backend: TorchBackendConfig, *, has_moments: bool = True) -> float:
    """Bytes per parameter of weights, gradients, and moments. Adapters count as nothing."""
    return 4.0 if backend.lora.rank else 8.0 + has_moments * moment_bytes(backend)


def _trainer_bytes(policy: PolicyConfig) -> int:
    """Returns the bytes of host memory per parameter.

    Weights, gradients, two moments and the published copy take 4 bytes each. If the trainer computes on a
    GPU, only these are in host memory: the published copy, that of the moments for a checkpoint, and the
    moments if they are offloaded. The weights of a checkpoint are in the memory of the first rank alone. Of
    adapters, only the frozen weights count.
    """
    backend = policy.train.backend
    if isinstance(backend, TorchBackendConfig) and backend.lora.rank and backend.lora.publish == "adapters":
        return 4 if _is_on_cpu(backend) else 0
    if _is_on_cpu(backend):
        return 20
    if not isinstance(backend, TorchBackendConfig):
        return 12
    return 4 + moment_bytes(backend) * (1 + backend.offload_optimizer)


def moment_bytes(backend: TorchBackendConfig) -> int:
    """Returns the bytes of both moments per parameter. Those of an adapter hardly count."""
    if backend.lora.rank:
        return 0
    return 4 if backend.optimizer_state == "bfloat16" else 8


# --- GPUs ------------------------------------------------------------------------------------------


def rank_bytes(policy: PolicyConfig) -> float:
    """Bytes that last for the whole run on a rank's GPU; adapters count as nothing. 0 if unknown."""
    backend = policy.train.backend
    if isinstance(backend, BackendVariant):
        try:
            own = backend.lasting_bytes(policy.train, policy.model_dir)
        except (ConfigError, DataError):
            return 0.0  # the backend's own check says what is wrong
        if own is not None:
            return sum(own.values())
    settings = torch_settings(backend)
    if settings is None:
        return 0.0
    per_weight = _lasting_bytes(settings, has_moments=not settings.offload_optimizer)
    num_parts = policy.train.ranks // policy.train.shard.replicate
    return per_weight * known_parameters(policy.model_dir) / num_parts


def known_parameters(model_dir: Path) -> int:
    """The number of a model's parameters; 0 if it isn't there yet, or can't be read."""
    try:
        return num_parameters(model_dir)
    except DataError:
        return 0


def rank_need(policy: PolicyConfig) -> MemoryNeed | None:
    """The device memory of one rank of a policy's trainer; None if its backend doesn't tell.

    Raises: DataError if the folder has no model; ConfigError if the backend can't train it.
    """
    train = policy.train
    backend = train.backend
    if isinstance(backend, BackendVariant):
        return backend.memory_need(train, policy.model_dir)
    if not isinstance(backend, TorchBackendConfig):
        return None
    from astraflow.models.loading import empty_causal_lm
    from astraflow.trainer.torch.memory import memory_need

    model = empty_causal_lm(policy.model_dir, device="meta")
    if backend.lora.rank:
        added.Lora.add_to(model, backend.lora, base=policy.model_dir, seed=0)
    return memory_need(model, train, grid=_grid_of(train))


def gpu_memory_finding(name: str, policy: PolicyConfig, num_gpus: int) -> Finding:
    """Compares the need of each rank with the free memory of its GPU, if this machine has it."""
    backend = cast("TorchBackendConfig", torch_settings(policy.train.backend))
    check = f"GPU memory of trainer-{name}"
    need = rank_need(policy)
    if need is None:
        return Finding("ok", check, "unknown before the model is loaded")
    each = f"each of {policy.train.ranks} ranks" if policy.train.ranks > 1 else "its process"
    text = f"{each} needs about {need.total / GIB:.1f} GiB: {need.text()}"
    first = int(backend.device.partition(":")[2] or 0)
    if first + policy.train.local_ranks > num_gpus:
        return Finding("ok", check, text)
    from astraflow.trainer.torch.memory import free_bytes

    gpus = range(first, first + policy.train.local_ranks)
    free, gpu = min((free_bytes(f"cuda:{idx}"), idx) for idx in gpus)
    text = f"{text} (cuda:{gpu} has {free / GIB:.1f} GiB free)"
    if sum(need.lasting.values()) > free:
        return Finding("fail", check, text, "change one of these settings, or end what uses this GPU")
    if need.total > free:
        return Finding("warn", check, text, "a full microbatch may not fit: change one of these settings")
    return Finding("ok", check, text)


def _grid_of(train: TrainConfig) -> "RankGrid | None":
    """A grid with the sizes of the recipe's, without a process group."""
    shard = train.shard
    if train.ranks == 1:
        return None
    from astraflow.trainer.ranks import ALONE
    from astraflow.trainer.torch.parallel.grid import RankGrid

    num_shards = train.ranks // (shard.replicate * shard.num_model_ranks)
    return RankGrid(
        everyone=ALONE,
        data=ALONE,
        num_shards=num_shards,
        tensor=shard.tensor,
        context=shard.context,
        cuts_experts=shard.expert > 1,
        mesh=cast("Any", object()) if num_shards * shard.replicate > 1 else None,
    )


# --- models ----------------------------------------------------------------------------------------


def num_parameters(model_dir: Path) -> int:
    """The number of parameters in a model folder. Raises: DataError if it has none, or can't be read."""
    try:
        return sum(prod(header.shape) for _, header in check_weight_files(model_dir).values())
    except DataError as err:
        raise DataError(f"{model_dir}: {err}") from err
