"""A rank of a trainer fails while the other waits for it in a collective that never ends, as under NCCL."""

import signal
from pathlib import Path

import psutil
import pytest

from drivers.pace import slowness
from drivers.system_driver import Place, Runs, Started, environment, num_steps, wait_gone, wait_until
from posing.gpus import BLOCKING_VARIABLE

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]
END_S = 15.0
VARIABLES = {BLOCKING_VARIABLE: "1", "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_SHM_DISABLE": "1"}
LOSS = """
import os
from pathlib import Path

import torch
import torch.distributed as dist

from astraflow.losses.policy import grpo


def loss(inputs, *, order):
    if dist.get_rank() == 1 and Path(order).exists():
        pid, number = map(int, Path(order).read_text().split())
        Path(order).unlink()
        if number:
            os.kill(pid, number)
        else:
            torch.empty(1 << 40, device=inputs.logprobs.device)
    return grpo(inputs, clip_low=0.2, clip_high=0.2)
"""
FAULTS = {
    "rank 1 of 2 (process {1}) was killed by signal 9 (SIGKILL)": (1, signal.SIGKILL),
    "rank 1 of 2: cuda:0 is out of memory": (1, 0),
    "rank 0 (process {0}) was stopped": (0, signal.SIGSTOP),
}
"""What is said -> the rank that gets a signal in the middle of a step; 0: rank 1 runs out of memory there."""


def ranks_of(run: Started) -> list[int]:
    """The processes of the trainer, rank 0 first; empty while it is being restarted."""
    try:
        trainer = psutil.Process(run.pid_of("trainer-actor"))
        others = [child.pid for child in trainer.children() if "--rank" in child.cmdline()]
    except (psutil.Error, ValueError):
        return []
    return [trainer.pid, *others] if len(others) == 1 else []


def test_a_rank_that_fails_within_a_step_ends_the_trainer_in_time_and_is_named(
    models: Path, tmp_path: Path
) -> None:
    order = tmp_path / "order"
    (tmp_path / "faulty_loss.py").write_text(LOSS)
    runs = Runs(models, tmp_path)
    run = runs.start(
        runs.recipe(steps=100_000),
        "policies.actor.train.ranks=2",
        'policies.actor.train.backend={"name": "torch", "device": "cuda:0"}',
        f'policies.actor.train.loss={{"use": "faulty_loss:loss", "args": {{"order": "{order}"}}}}',
        place=Place(env=environment() | VARIABLES),
    )
    log = run.run_dir / "logs" / "trainer-actor.log"
    num_done = 0

    def has_progress() -> bool:
        return num_steps(run) > num_done and bool(ranks_of(run))

    try:
        for said, (rank, number) in FAULTS.items():
            wait_until(run, has_progress, timeout_s=120)
            ranks = ranks_of(run)
            inherited = psutil.Process(ranks[1]).environ()  # from rank 0, which may be a fork
            assert inherited["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
            num_done = num_steps(run)
            order.with_suffix(".new").write_text(f"{ranks[rank]} {int(number)}")
            order.with_suffix(".new").rename(order)
            wait_until(run, lambda: not order.exists(), timeout_s=60)
            assert not wait_gone(ranks, timeout_s=END_S * slowness()), (said, run.report())
            stops = [line for line in log.read_text().splitlines() if "trainer-actor stopped: " in line]
            assert said.format(*ranks) in stops[-1]  # it may have been started again by now
    finally:
        runs.close()
