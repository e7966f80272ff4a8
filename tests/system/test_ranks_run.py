"""A trainer of two ranks in a whole run: a rank is killed, and the run goes on from the last checkpoint.

Adapters are published beside the weights: rank 1 then has a part to write even of a tiny model's version.
"""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from drivers.system_driver import Runs, Started, astraflow, wait_gone

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

TWO_RANKS = (
    "policies.actor.train.ranks=2",
    "policies.actor.train.minibatches=2",
    'policies.actor.train.backend={"name": "torch", "lora": {"rank": 2, "publish": "adapters"}}',
)
NUM_STEPS = 24
END_S = 10.0
"""All ranks are gone this long after the timeout."""


def rank_1(run: Started) -> psutil.Process:
    """The second rank of the trainer."""
    children = psutil.Process(run.pid_of("trainer-actor")).children()
    return next(child for child in children if "--rank" in child.cmdline())


def log_of_trainer(run: Started) -> str:
    return (run.run_dir / "logs" / "trainer-actor.log").read_text()


@pytest.mark.long
def test_a_killed_rank_is_named_and_the_run_goes_on_to_an_exact_end(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(runs.recipe(steps=NUM_STEPS), *TWO_RANKS)
    run.read_until("actor step ")
    rank, trainer = rank_1(run), run.pid_of("trainer-actor")
    os.kill(rank.pid, signal.SIGKILL)
    assert not wait_gone([rank.pid, trainer], timeout_s=END_S)
    assert run.finish() == 0, run.report()
    (policy,) = run.summary()["policies"]
    assert policy["steps"] == NUM_STEPS
    assert run.summary()["audit_ok"]
    assert f"rank 1 of 2 (process {rank.pid}) was killed by signal 9 (SIGKILL)" in log_of_trainer(run)
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    (newest, *_) = sorted((run.run_dir / "checkpoints" / "actor").glob("step-*"), reverse=True)
    parts = sorted(path.name for path in newest.glob("optimizer-*"))
    assert parts == [f"optimizer-0000{rank}-of-00002.safetensors" for rank in (1, 2)]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("policies.actor.train.ranks=5",), "each rank needs one at least"),
        (
            (
                "policies.actor.train.ranks=2",
                'policies.actor.train.backend={"name": "own_loop", "loop": {"use": "x:y"}}',
            ),
            "needs train.backend.name: torch",
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused_before_the_run(
    runs: Runs, overrides: tuple[str, ...], said: str
) -> None:
    done = astraflow("run", str(runs.recipe()), *overrides, "--dry-run")
    assert done.returncode == 2
    assert said in done.stderr
