"""The position of a trainer's rank in `train.shard`: which slice of a batch it gets, and which part of the
weights.

    rank = (replica * num_shards + shard) * num_model_ranks + model_rank

    model_rank   ranks that differ only in it compute the same batch together, each with a part of every
                 layer, or with a part of the tokens
    shard        holds this part of the rows of the weights that its model rank computes with (FSDP2)
    replica      a complete copy of the weights, with its own batches

A batch is cut into one slice per (replica, shard), `train.data_ranks` in total.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from astraflow.trainer.config import ShardConfig
from astraflow.trainer.ranks import ProcessRanks, Ranks

__all__ = ["RankGrid", "make_grid"]


@dataclass(frozen=True, slots=True)
class RankGrid:
    """One rank's position. Example: `make_grid(ALONE, ShardConfig(), device="cpu")` is a grid of one rank."""

    everyone: Ranks
    """All ranks of the trainer."""
    data: Ranks
    """One rank for each slice of a batch, including this one. Sums over a batch are gathered from them."""
    replica: int = 0
    shard: int = 0
    num_shards: int = 1
    model_rank: int = 0
    tensor: int = 1
    """Number of model ranks if they have parts of the layers, else 1."""
    context: int = 1
    """Number of model ranks if they have parts of the tokens, else 1."""
    cuts_experts: bool = False
    """Whether each model rank has a subset of the experts, or all of them."""
    mesh: DeviceMesh | None = None
    """The mesh for FSDP2; None if weights are neither sharded nor replicated."""
    shard_group: Any = None
    """Ranks that differ only in `shard`."""
    model_group: Any = None
    """Ranks that differ only in `model_rank`."""
    device: str = "cpu"
    """This rank's device."""


def make_grid(ranks: Ranks, shard: ShardConfig, *, device: str) -> RankGrid:
    """The grid of torch's process group. All ranks call it at the same time. `TrainConfig` has checked that
    the numbers fit."""
    if ranks.world == 1:
        return RankGrid(ranks, ranks, device=device)
    num_model_ranks = shard.num_model_ranks
    num_shards = ranks.world // (shard.replicate * num_model_ranks)
    shape = (shard.replicate, num_shards, num_model_ranks)
    mesh = init_device_mesh(torch.device(device).type, shape, mesh_dim_names=("replicate", "shard", "model"))
    slice_idx, model_rank = divmod(ranks.rank, num_model_ranks)
    replica, shard_idx = divmod(slice_idx, num_shards)
    fsdp_mesh = mesh["shard"] if num_shards > 1 else None
    return RankGrid(
        everyone=ranks,
        data=ranks if num_model_ranks == 1 else ProcessRanks(_data_group(ranks, num_model_ranks)),
        replica=replica,
        shard=shard_idx,
        num_shards=num_shards,
        model_rank=model_rank,
        tensor=shard.tensor,
        context=shard.context,
        cuts_experts=shard.expert > 1,
        mesh=mesh["replicate", "shard"] if shard.replicate > 1 else fsdp_mesh,
        shard_group=mesh.get_group("shard"),
        model_group=mesh.get_group("model"),
        device=device,
    )


def _data_group(ranks: Ranks, num_model_ranks: int) -> Any:
    """The ranks with the same model rank as this one. Torch requires every rank to create all groups."""
    groups = [
        dist.new_group(list(range(first, ranks.world, num_model_ranks))) for first in range(num_model_ranks)
    ]
    return groups[ranks.rank % num_model_ranks]
