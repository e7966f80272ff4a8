"""The position of a trainer's rank in Megatron's process groups.

    rank = ((slice * pipeline + stage) * context + token_part) * tensor + tensor_rank

Ranks that differ only in `stage`, `token_part` and `tensor_rank` compute the same slice of a batch, so they
follow each other. megatron-core's own default puts the stages outermost; this order gives each slice the
ranks that the rest of the trainer expects (`TrainConfig.num_model_ranks`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from astraflow.addons.megatron.config import MegatronBackendConfig
from astraflow.addons.megatron.library import megatron
from astraflow.errors import ConfigError
from astraflow.trainer.ranks import ALONE, ProcessRanks, Ranks

__all__ = ["ModelGroups", "make_groups"]

_TIMEOUT_MINUTES = 5
"""After which a collective fails: the default of `supervision.rank_timeout_s`."""


@dataclass(frozen=True, slots=True)
class ModelGroups:
    """One rank's position, and the ranks with which it communicates."""

    everyone: Ranks
    data: Ranks
    """One rank for each slice of a batch, including this one."""
    tensor: int
    tensor_rank: int
    tensor_group: Any
    pipeline: int
    stage: int
    pipeline_group: Any
    context: int
    token_part: int
    context_group: Any
    copies: Ranks
    """The ranks with the same weights, including this one; they share the optimizer's state."""
    copies_group: Any
    device: torch.device

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output head."""
        return self.stage == self.pipeline - 1


def make_groups(ranks: Ranks, config: MegatronBackendConfig) -> ModelGroups:
    """Creates Megatron's process groups. All ranks call it at the same time.

    Raises: ConfigError if there is no GPU.
    """
    state = megatron().parallel_state
    device = _own_device(config.device)
    if not dist.is_initialized():  # a trainer of one rank, for which Megatron wants groups as well
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - torch has no other place for it
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        context_parallel_size=config.context,
        # There are no experts. megatron-core asserts that their slices would be those of the other layers.
        expert_tensor_parallel_size=config.tensor * config.context,
        distributed_timeout_minutes=_TIMEOUT_MINUTES,
        order="tp-cp-ep-pp-dp",
        create_gloo_process_groups=False,
    )
    copies_group = state.get_data_parallel_group(with_context_parallel=True)
    return ModelGroups(
        everyone=ranks,
        data=_ranks_of(state.get_data_parallel_group()),
        tensor=config.tensor,
        tensor_rank=state.get_tensor_model_parallel_rank(),
        tensor_group=state.get_tensor_model_parallel_group(),
        pipeline=config.pipeline,
        stage=state.get_pipeline_model_parallel_rank(),
        pipeline_group=state.get_pipeline_model_parallel_group(),
        context=config.context,
        token_part=state.get_context_parallel_rank(),
        context_group=state.get_context_parallel_group(),
        copies=_ranks_of(copies_group),
        copies_group=copies_group,
        device=device,
    )


def _ranks_of(group: Any) -> Ranks:
    return ProcessRanks(group) if dist.get_world_size(group) > 1 else ALONE


def _own_device(configured: str) -> torch.device:
    """The device of this process, which sees only the GPU of its rank.

    Raises: ConfigError if it is not of the configured kind: megatron-core allocates on GPUs by itself.
    """
    try:
        device = torch.device(torch.cuda.current_device())
    except (RuntimeError, AssertionError) as err:
        raise ConfigError(
            f'train.backend.device = "{configured}": megatron-core computes on NVIDIA GPUs only, and torch '
            f"finds none here ({str(err).splitlines()[0]}); use train.backend.name: torch"
        ) from err
    if device.type != torch.device(configured).type:
        raise ConfigError(
            f'train.backend.device = "{configured}": megatron-core computes on NVIDIA GPUs only; set it to '
            '"cuda:0"'
        )
    return device
