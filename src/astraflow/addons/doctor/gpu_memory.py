"""Computes the device memory that each rank of a trainer needs, before anything is loaded."""

from typing import Any, cast

from astraflow.addons.doctor.gpu_checks import check_shares, gpu_users
from astraflow.addons.doctor.machine import GIB, Finding
from astraflow.models.loading import empty_causal_lm
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.trainer.backend_config import BackendVariant, TorchBackendConfig, torch_settings
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.memory_need import MemoryNeed
from astraflow.trainer.ranks import ALONE
from astraflow.trainer.torch.lora import Lora
from astraflow.trainer.torch.memory import free_bytes, memory_need
from astraflow.trainer.torch.parallel.grid import RankGrid

__all__ = ["gpu_memory_finding", "rank_need", "share_finding"]

_SHARES = "users of GPUs"


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
    model = empty_causal_lm(policy.model_dir, device="meta")
    if backend.lora.rank:
        Lora.add_to(model, backend.lora, base=policy.model_dir, seed=0)
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
    gpus = range(first, first + policy.train.local_ranks)
    free, gpu = min((free_bytes(f"cuda:{idx}"), idx) for idx in gpus)
    text = f"{text} (cuda:{gpu} has {free / GIB:.1f} GiB free)"
    if sum(need.lasting.values()) > free:
        return Finding("fail", check, text, "change one of these settings, or end what uses this GPU")
    if need.total > free:
        return Finding("warn", check, text, "a full microbatch may not fit: change one of these settings")
    return Finding("ok", check, text)


def share_finding(recipe: Recipe) -> Finding:
    """Tells which processes use each GPU. Raises: ConfigError if they share one without stated shares."""
    users = gpu_users(recipe)
    check_shares(users)
    listed = [f"GPU {gpu}: {', '.join(user.name for user in own)}" for gpu, own in users.items()]
    return Finding("ok", _SHARES, ", ".join(listed))


def _grid_of(train: TrainConfig) -> RankGrid | None:
    """A grid with the sizes of the recipe's, without a process group."""
    shard = train.shard
    if train.ranks == 1:
        return None
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
