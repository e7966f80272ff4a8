"""A curator that cannot say what it remembers: the run ends with the reason, its journal is whole, and it
goes on once the curator is mended."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from astraflow.config import Use
from astraflow.dataflow.audit import audit
from astraflow.dataflow.config import DataflowConfig
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, make_plan, play_run, running


class Counting:
    """Proposes one task after the other; `exit()`s in the named method."""

    broken: ClassVar[str] = ""

    def __init__(self, *, num_tasks: int, seed: int) -> None:
        self._num_tasks, self._num_drawn = num_tasks, 0

    def next(self) -> int:
        self._num_drawn += 1
        return self._num_drawn % self._num_tasks

    def observe(self, outcome: object) -> None:
        pass

    def state(self) -> dict[str, int]:
        return sys.exit("out") if self.broken == "state" else {"num_drawn": self._num_drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._num_drawn = state["num_drawn"]


PLAN = make_plan(curators=(Use(use=f"{__name__}:Counting"),))


@pytest.fixture(autouse=True)
def _mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "broken", "")


async def test_a_snapshot_that_is_due_and_fails_ends_the_run_which_goes_on_when_the_curator_is_mended(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, PLAN, snapshot_every=4) as run:
        await ScriptedTrainer(run.client).attach()
        Counting.broken = "state"
        worker = ScriptedWorker(run.client)
        await worker.register()
        for _ in range(4):
            await worker.lease()
        status = await run.client.status()
        assert (status.state, run.service.fatal.is_set()) == ("failed", False)
        told, _, where = status.reason.partition(" (")
        assert told == f"curator {__name__}:Counting.state() raised SystemExit: out"
        assert "test_failing_curator.py, line " in where
    assert audit(tmp_path).ok
    Counting.broken = ""
    async with running(tmp_path, PLAN, resumes_failed=True) as run:
        await play_run(run)
        assert run.service.state == "finished"
    assert audit(tmp_path).ok


async def test_a_service_that_stops_while_a_curator_cannot_be_kept_starts_again_from_its_journal(
    tmp_path: Path,
) -> None:
    config = DataflowConfig(lease_timeout_s=3600.0)
    async with running(tmp_path, PLAN, config=config) as run:
        await ScriptedTrainer(run.client).attach()
        worker = ScriptedWorker(run.client)
        await worker.register()
        leases = await worker.lease(4)
        Counting.broken = "state"
    Counting.broken = ""
    async with running(tmp_path, PLAN, config=config) as run:
        assert [run.service._dispatcher.core.lease(lease.id) is not None for lease in leases] == [True] * 4
    assert audit(tmp_path).ok
