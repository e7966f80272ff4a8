"""`astraflow drop-batch` on a live run takes the batch from a real trainer, which is fenced and restarted."""

import time
from pathlib import Path

import pytest

from astraflow.dataflow.audit import audit
from drivers.system_driver import Runs, Started, astraflow

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(600)]

LOSS = """
import time
from pathlib import Path

from astraflow.losses.policy import LossInputs, LossOutput


def waits_for_a_person(x: LossInputs, *, while_there: str) -> LossOutput:
    while Path(while_there).exists():
        time.sleep(0.05)
    return LossOutput(per_token=-x.logprobs * x.advantages, metrics={})
"""


def drop(run: Started) -> str:
    """Drops the batch that the trainer holds, once it holds one."""
    deadline = time.monotonic() + 120
    while True:
        done = astraflow("drop-batch", str(run.run_dir), "actor", "--reason", "it never ends")
        if done.returncode == 0:
            return done.stdout
        assert time.monotonic() < deadline, done.stderr + run.report()
        time.sleep(0.5)


def test_a_trainer_that_is_stuck_with_its_batch_is_fenced_and_goes_on_with_another(
    runs: Runs, tmp_path: Path
) -> None:
    (tmp_path / "stuck_loss.py").write_text(LOSS)
    stuck = tmp_path / "stuck"
    stuck.touch()
    loss = f"{{use: 'stuck_loss:waits_for_a_person', args: {{while_there: '{stuck}'}}}}"
    run = runs.start(runs.recipe(steps=3), f"policies.actor.train.loss={loss}")
    assert "the batch of step 1" in drop(run)
    stuck.unlink()
    run.read_until("trainer-actor ended with code 1; restart 1")
    assert run.finish() == 0, run.report()
    (policy,) = audit(run.run_dir / "journal").policies
    assert (policy.steps, policy.dropped_batches) == (3, 1)
    assert policy.fates.evicted >= 4
    assert run.summary()["audit_ok"]
