"""What tests of posing GPUs run on the ranks of a trainer."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from astraflow.processes.visible_gpus import gpu_variables
from astraflow.trainer.ranks import Ranks
from astraflow.trainer.torch.torch_backend import TorchBackend
from drivers.rank_runs import make_learner, slice_of
from posing import gpus


def begin(rank: int) -> None:
    """Leaves a process the GPU of its rank, as a trainer does."""
    os.environ.update(gpu_variables("cuda:0", rank))
    gpus.install()


def step_on_gpu(ranks: Ranks, model_dir: Path, settings: dict[str, Any]) -> Mapping[str, Any]:
    """Trains one step. Returns: where this rank's parts of the weights are, and how many values it holds."""
    learner = make_learner(ranks, model_dir, settings)
    backend = learner.backend
    assert isinstance(backend, TorchBackend)
    learner.train_step(slice_of(0, backend.data_ranks))
    own = [p.to_local() if isinstance(p, DTensor) else p for p in backend._model.parameters()]
    return {
        "gpu": torch.cuda.get_device_name(),
        "devices": sorted({str(part.device) for part in own}),
        "num_held": sum(part.numel() for part in own),
        "num_whole": sum(parameter.numel() for parameter in backend._model.parameters()),
    }


def join_on_first_gpu(ranks: Ranks) -> str:
    """A collective of ranks that all see all GPUs and use the first. Returns: the error."""
    kept = os.environ.pop("CUDA_VISIBLE_DEVICES")
    gpus.install()
    try:
        dist.new_group(list(range(ranks.world)))
    except dist.DistBackendError as err:
        return str(err)
    finally:
        os.environ["CUDA_VISIBLE_DEVICES"] = kept
        gpus.install()
    return ""
