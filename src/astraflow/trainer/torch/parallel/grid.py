"""Where each rank of a trainer stands, by `train.shard`: which batch it gets, and which part of the weights.

    rank = (copy * num_parts + part) * num_places + place

    place   ranks that differ in it alone compute the same batch together, each with a part of every layer, or
            with a part of the tokens
    part    keeps this part of the rows of what its place computes with (FSDP2)
    copy    copies of all of that, each with batches of its own

The slice of a batch is that of (copy, part): `train.data_ranks` of them are cut.
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
    """One rank's place. Example: `make_grid(ALONE, ShardConfig(), device="cpu")` is a grid of one rank."""

    everyone: Ranks
    """All ranks of the trainer."""
    data: Ranks
    """One rank of each slice of a batch, this one among them: what sums over a batch are gathered from."""
    copy: int = 0
    part: int = 0
    num_parts: int = 1
    place: int = 0
    tensor: int = 1
    """Number of places, if they have parts of layers; else 1."""
    context: int = 1
    """Number of places, if they have parts of the tokens; else 1."""
    cuts_experts: bool = False
    """Whether each place has whole experts of its own; else every place has all of them."""
    mesh: DeviceMesh | None = None
    """What FSDP2 works on; None where nothing is split by rows or copied."""
    part_group: Any = None
    """Ranks that differ in `part` alone."""
    place_group: Any = None
    """Ranks that differ in `place` alone."""


def make_grid(ranks: Ranks, shard: ShardConfig, *, device: str) -> RankGrid:
    """The grid of torch's process group. All ranks call it at the same time. The numbers must fit, as
    `TrainConfig` checks."""
    if ranks.world == 1:
        return RankGrid(ranks, ranks)
    num_places = shard.num_places
    num_parts = ranks.world // (shard.replicate * num_places)
    shape = (shard.replicate, num_parts, num_places)
    whole = init_device_mesh(torch.device(device).type, shape, mesh_dim_names=("copy", "part", "place"))
    slice_idx, place = divmod(ranks.rank, num_places)
    copy, part = divmod(slice_idx, num_parts)
    mesh = whole["part"] if num_parts > 1 else None
    return RankGrid(
        everyone=ranks,
        data=ranks if num_places == 1 else ProcessRanks(_data_group(ranks, num_places)),
        copy=copy,
        part=part,
        num_parts=num_parts,
        place=place,
        tensor=shard.tensor,
        context=shard.context,
        cuts_experts=shard.expert > 1,
        mesh=whole["copy", "part"] if shard.replicate > 1 else mesh,
        part_group=whole.get_group("part"),
        place_group=whole.get_group("place"),
    )


def _data_group(ranks: Ranks, num_places: int) -> Any:
    """The ranks at the place of this one. Every rank makes all of these groups, as torch wants it."""
    groups = [dist.new_group(list(range(place, ranks.world, num_places))) for place in range(num_places)]
    return groups[ranks.rank % num_places]
