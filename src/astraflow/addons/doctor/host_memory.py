"""Computes the host memory that each process of a run needs, apart from the memory of GPUs.

The figures are estimates by the sizes of the models and of the KV caches. What weights, gradients, optimizer,
and caches need is certain, so a run is refused if that alone exceeds the machine's memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from astraflow.addons.doctor.machine import GIB, Finding
from astraflow.addons.doctor.model_size import num_parameters
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.engine_memory import slot_bytes
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.service.memory import available_bytes, limit_bytes
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.user_input.written_keys import as_written

__all__ = ["HostNeed", "check_host_memory", "host_memory_finding", "host_needs"]

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
    engines = engine_bytes * sum(sizes.values())
    cache = _cache_bytes(recipe)
    one_copy = 2.0 * sum(sizes.values()) + _cache_bytes(recipe, with_evals=False)
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


def host_memory_finding(recipe: Recipe) -> Finding:
    """Tells what each process needs, and which settings would save most."""
    needs = host_needs(recipe)
    total = sum(need.total for need in needs)
    free = available_bytes()
    num = sum(need.num for need in needs)
    shown = sorted(needs, key=lambda need: -need.total)
    parts = [
        f"{need.name} {need.total / GIB:.1f}"
        if need.num == 1
        else f"{need.num} x {need.name} {need.total / need.num / GIB:.1f}"
        for need in shown
        if need.total > _SHOWN_FRAC * total
    ]
    text = (
        f"about {total / GIB:.1f} GiB for {num} processes ({', '.join(parts)}), of {free / GIB:.1f} GiB free"
    )
    backends = [policy.train.backend for policy in recipe.trained.values()]
    if not all(map(_is_on_cpu, (recipe.rollout.engine, *backends))):
        text += ", besides the memory of GPUs"
    if cache := _cache_bytes(recipe):
        engine = cast("TorchEngineConfig", recipe.rollout.engine)
        text += f"; the KV caches of a service take {cache / GIB:.1f}: {_slots_text(engine)}"
    if total > free:
        return Finding("warn", "memory of the run", text, f"to save most, set {_savings_text(recipe, needs)}")
    return Finding("ok", "memory of the run", text)


def check_host_memory(recipe: Recipe) -> None:
    """Raises: ConfigError if the processes of this machine need more for their weights than it has."""
    try:
        needs = [n for n in host_needs(recipe) if recipe.has_services_here or not n.is_service]
    except DataError:
        return  # the model isn't there yet, or its own check says what is wrong
    certain = sum(need.num * need.certain for need in needs)
    if certain <= (total := limit_bytes()):
        return
    largest = max(needs, key=lambda need: need.num * need.certain)
    raise ConfigError(
        f"this machine has {total / GIB:.1f} GiB of host memory, but weights, gradients, optimizers and KV "
        f"caches need at least {certain / GIB:.1f} GiB, most of it {largest.num} x {largest.name} with "
        f"{largest.certain / GIB:.1f} GiB each; to save most, set {_savings_text(recipe, needs)}, or use a "
        "smaller model"
    )


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
    listed = " or ".join(f"{setting} (saves {size / GIB:.1f} GiB)" for setting, size in best)
    return listed or "a smaller model"


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
            savings[f"{where}.offload_optimizer: false"] = _moment_bytes(backend) * size
        if backend.publish_dtype == "float32":
            savings[f"{where}.publish_dtype: bfloat16"] = 2 * size * (1 + recipe.max_services)
    return savings


def _cache_bytes(recipe: Recipe, *, with_evals: bool = True) -> float:
    """What the KV caches of one rollout service take in host memory."""
    engine = recipe.rollout.engine
    if not isinstance(engine, TorchEngineConfig) or not _is_on_cpu(engine):
        return 0.0
    return engine.slots * slot_bytes(recipe, with_evals=with_evals)


def _slots_text(engine: TorchEngineConfig) -> str:
    return f"{engine.slots} slots x {engine.context:,} tokens"


def _is_on_cpu(config: object) -> bool:
    """Returns whether an engine or a trainer computes in host memory."""
    return isinstance(config, TorchEngineConfig | TorchBackendConfig) and config.device == "cpu"


def _certain_bytes(policy: PolicyConfig) -> float:
    """Bytes per parameter that a trainer on the CPU needs for weights, gradients, and optimizer."""
    backend = policy.train.backend
    if not isinstance(backend, TorchBackendConfig) or not _is_on_cpu(backend):
        return 0.0
    averages = 4.0 if backend.optimizer_state == "bfloat16" else 8.0
    return 4.0 if backend.lora.rank else 8.0 + averages


def _trainer_bytes(policy: PolicyConfig) -> int:
    """Returns the bytes of host memory per parameter.

    Weights, gradients, two moments and the published copy take 4 bytes each. If the trainer computes on a
    GPU, only these are in host memory: the published copy, that of the moments for a checkpoint, and the
    moments if they are offloaded. The weights of a checkpoint are in the memory of the first rank alone.
    """
    backend = policy.train.backend
    if _is_on_cpu(backend):
        return 20
    if not isinstance(backend, TorchBackendConfig):
        return 12
    return 4 + _moment_bytes(backend) * (1 + backend.offload_optimizer)


def _moment_bytes(backend: TorchBackendConfig) -> int:
    """Returns the bytes of both moments per parameter. Those of an adapter hardly count."""
    if backend.lora.rank:
        return 0
    return 4 if backend.optimizer_state == "bfloat16" else 8
