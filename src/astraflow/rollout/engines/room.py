"""How many slots an engine's KV cache can have in the memory of its device.

A cache is allocated as a whole. On a CPU, the kernel kills a process that takes more than there is, so what
doesn't fit is refused before that.
"""

import logging
from typing import Literal

import torch

from astraflow.rollout.engine_config import SLOT_STEPS, TorchEngineConfig
from astraflow.rollout.engines.cache import CacheShape
from astraflow.service.memory import available_bytes

__all__ = ["fitting_slots"]

_log = logging.getLogger(__name__)

_SHARE = 0.25
"""Largest share of the free memory for a cache whose size is left open. The rest is for an evaluation's model
and cache, and for the engines of other policies."""


def fitting_slots(config: TorchEngineConfig, shape: CacheShape, num_slots: Literal["auto"] | int) -> int:
    """Returns `num_slots`, or the largest usual number that fits if it is `auto`.

    Raises: MemoryError if a given number doesn't fit.
    """
    each = shape.slot_bytes(config.context) * (1 + config.prefix_pool)
    free = _free_bytes(config, shape.device)
    if num_slots == "auto":
        num_slots = next((num for num in SLOT_STEPS if num * each <= _SHARE * free), SLOT_STEPS[-1])
        text = "the KV cache has %d slots of %d tokens (%.0f MB with its pool), because %.0f MB are free"
        _log.info(text, num_slots, config.context, num_slots * each / 1e6, free / 1e6)
    if (lacking := num_slots * each - free) > 0:
        most = int(free // each)
        remedy = f"lower rollout.engine.num_slots to {most} or less, or " if most else "lower "
        raise MemoryError(
            f"the KV cache of {num_slots} slots x {config.context:,} tokens needs "
            f"{num_slots * each / 1e6:,.0f} MB, but only {free / 1e6:,.0f} MB are free on {config.device}, "
            f"{lacking / 1e6:,.0f} MB too few; {remedy}rollout.engine.max_context or "
            "rollout.engine.prefix_pool, or run fewer services"
        )
    return num_slots


def _free_bytes(config: TorchEngineConfig, device: torch.device) -> float:
    if device.type != "cuda":
        return available_bytes()
    free, total = torch.cuda.mem_get_info(device)
    # Memory that torch has freed but not returned can be allocated again.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if not config.gpu_share:
        return free
    return min(free, config.gpu_share * total - torch.cuda.memory_allocated(device))
