"""The phase `ranks` of `gpu.py`: several ranks train one model, each in its own process and with its own GPU.

python benchmarks/gpu_ranks.py JOB    is one rank; JOB is the JSON of a `_Job`
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from astraflow.processes.rank_process import join_ranks
from astraflow.processes.visible_gpus import gpu_variables
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.ranks import ALONE, Ranks
from astraflow.trainer.torch.torch_backend import TorchBackend
from batches import make_batch, make_samples
from gpu_parts import SIZES, find_device, random_model, seconds_of, skipped, timed, version_folder
from harness import OwnMemory

__all__ = ["ranks"]

_MOST = 8
_JOIN_S = 30.0
_LENGTH = 4_096
"""Tokens of a sample."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What a rank has to do. Example: `_Job(0, 2, "1.7b", 8192, "cuda:0", "/dev/shm/model", "/tmp/work")`."""

    rank: int
    world: int
    size: str
    num_tokens: int
    """Tokens of a microbatch."""
    device: str
    model: str
    work: str
    """Folder in which ranks meet, and leave their figures."""


def ranks(size: str, num_tokens: int, *, is_tiny: bool) -> dict[str, float]:
    """Measures steps, loading and resuming over all GPUs, and compares small steps with those of one process.

    It is skipped where fewer than two GPUs are visible. A CPU has two ranks.
    """
    device = find_device(is_tiny)
    num_places = 2 if device == "cpu" else min(_MOST, torch.cuda.device_count())
    if num_places < 2:
        return skipped("ranks", f"two GPUs, and {num_places} is visible")
    world = 1 << (num_places.bit_length() - 1)
    if is_tiny:
        size, num_tokens = "tiny", 256
    with version_folder(size) as model, tempfile.TemporaryDirectory(prefix="astraflow-gpu-") as work:
        random_model(size, device, torch.bfloat16).save_pretrained(model)
        if device != "cpu":
            torch.cuda.empty_cache()  # rank 0 needs the room
        job = _Job(0, world, size, num_tokens, device, str(model), work)
        _run_all([replace(job, rank=rank) for rank in range(world)])
        found = [json.loads((Path(work) / f"{rank}.json").read_text()) for rank in range(world)]
    slowest = {name: max(each[name] for each in found) for name in found[0]}
    num_computed = world * 2 * num_tokens
    return {**slowest, "num_ranks": world, "tokens_per_s": num_computed / slowest["step_s"]}


def _run_all(jobs: list[_Job]) -> None:
    """Runs a process per rank. Raises: RuntimeError if one fails; the others end then, too."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for job in jobs:
            argv = [sys.executable, __file__, json.dumps(asdict(job))]
            env = os.environ | gpu_variables(job.device, job.rank)
            started.append(subprocess.Popen(argv, env=env, stdout=sys.stderr))
        for rank, process in enumerate(started):
            if code := process.wait():
                raise RuntimeError(f"rank {rank} of {len(jobs)} ended with {code}")
    finally:
        for process in started:
            process.kill()
            process.wait()


# --- one rank -------------------------------------------------------------------------------------


def _learner(job: _Job, ranks: Ranks, model: str, settings: dict[str, Any]) -> LossLearner:
    backend = {"name": "torch", "device": job.device, **settings}
    fields = {"lr": 1e-6, "token_budget": job.num_tokens, "ranks": ranks.world, "backend": backend}
    config = TrainConfig.model_validate_json(json.dumps(fields))
    made = TorchBackend(config, model_dir=model, ranks=ranks)
    return LossLearner(config, made, ranks=made.data_ranks)


def _measure(job: _Job) -> dict[str, float]:
    if job.device == "cpu":
        torch.set_num_threads(1)
    place = {"rank": job.rank, "world": job.world}
    ranks = join_ranks(job.rank, world=job.world, meeting=f"file://{job.work}/meeting", timeout_s=_JOIN_S)
    device = "cpu" if job.device == "cpu" else "cuda:0"
    found: dict[str, float] = {"gap": _gap(job, ranks)}
    lean = {"publish_dtype": "bfloat16", "activations": "recompute", "optimizer_state": "bfloat16"}
    with OwnMemory() as loading, timed(found, "load_s", device):
        learner = _learner(job, ranks, job.model, {"dtype": "bfloat16", **lean})
    length = min(job.num_tokens, 64 if job.size == "tiny" else _LENGTH)
    num = 2 * job.num_tokens // length
    sizes = {"num_prompt": length // 8, "num_sampled": length - length // 8}
    samples = make_samples(num, **sizes, vocab_size=SIZES[job.size]["vocab_size"], part=job.rank)
    steps = iter(range(100))
    found["step_s"] = seconds_of(
        lambda: learner.train_step(make_batch(samples, next(steps), **place)), device, 2
    )
    if device != "cpu":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    checkpoint = Path(job.work) / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    with timed(found, "save_s", device):
        learner.save(checkpoint)()
    ranks.gather_values(0)  # all have written
    with OwnMemory() as resuming, timed(found, "resume_s", device):
        learner.load(checkpoint)
    return {**found, "load_host_gb": loading.growth / 1e9, "resume_host_gb": resuming.growth / 1e9}


def _gap(job: _Job, ranks: Ranks) -> float:
    """Returns by how much two small steps in float32 differ from those of one process on a CPU, relative to
    the gradient's norm."""
    folder = Path(job.work) / "small"
    vocab_size = SIZES["small"]["vocab_size"]
    if ranks.rank == 0:
        random_model("small", "cpu", torch.float32).save_pretrained(folder)
    ranks.gather_values(0)  # the model is there
    small = replace(job, num_tokens=256)
    parts = [
        make_samples(4, num_prompt=8, num_sampled=56, vocab_size=vocab_size, part=rank)
        for rank in range(ranks.world)
    ]
    together = _norms(_learner(small, ranks, str(folder), {}), parts[ranks.rank], ranks)
    if ranks.rank > 0:
        return 0.0
    alone = _learner(replace(small, device="cpu"), ALONE, str(folder), {})
    expected = _norms(alone, [sample for part in parts for sample in part], ALONE)
    return max(abs(mine / theirs - 1) for mine, theirs in zip(together, expected, strict=True))


def _norms(learner: LossLearner, samples: list[Any], ranks: Ranks) -> list[float]:
    batches = [make_batch(samples, step, rank=ranks.rank, world=ranks.world) for step in range(2)]
    results = [learner.train_step(batch) for batch in batches]
    return [item.value for result in results for item in result.metrics if item.name == "grad_norm"]


if __name__ == "__main__":
    _job = _Job(**json.loads(sys.argv[1]))
    (Path(_job.work) / f"{_job.rank}.json").write_text(json.dumps(_measure(_job)))
    os._exit(0)  # NCCL may wait for others at exit
