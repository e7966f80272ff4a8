from pathlib import Path

from astraflow.dataflow.core.commands import AttachTrainer, PublishVersion
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.service.clock import SteadyClock
from astraflow.dataflow.service.dispatcher import Dispatcher
from astraflow.dataflow.service.liveness import Liveness
from drivers.core_driver import make_chunk_manifest
from drivers.dataflow_driver import make_plan


class Clocks:
    """A wall clock that somebody sets, and one that only counts."""

    def __init__(self) -> None:
        self.wall_s, self.counted_s = 1_000_000.0, 50.0

    def clock(self, at_least_s: float = 0.0) -> SteadyClock:
        return SteadyClock(at_least_s=at_least_s, wall=lambda: self.wall_s, monotonic=lambda: self.counted_s)


def test_time_goes_on_with_the_monotonic_clock_alone() -> None:
    clocks = Clocks()
    clock = clocks.clock()
    assert clock() == 1_000_000.0
    clocks.wall_s += 86_400.0
    clocks.counted_s += 2.5
    assert clock() == 1_000_002.5
    clocks.wall_s = 0.0
    assert clock() == 1_000_002.5


def test_time_is_never_before_the_journal() -> None:
    assert Clocks().clock(at_least_s=2_000_000.0)() == 2_000_000.0


async def test_a_wall_clock_that_jumps_moves_no_evaluation_past_its_deadline(tmp_path: Path) -> None:
    clocks = Clocks()
    journal, core = Journal(tmp_path), Core(make_plan(eval_tasks=2))
    dispatcher = Dispatcher(core, journal, Liveness(30.0), clock=clocks.clock())
    dispatcher.apply(AttachTrainer(policy="actor", trainer_id="t", durable_step=0))
    dispatcher.apply(
        PublishVersion(policy="actor", epoch=1, step=0, manifest=make_chunk_manifest("actor", 0))
    )
    ((_, deadline_s),) = core.eval_deadlines()
    left_s = deadline_s - dispatcher.clock()
    before_s = dispatcher.round_deadline_s()
    clocks.wall_s += 3600.0
    assert deadline_s - dispatcher.clock() == left_s == 60.0
    assert abs(dispatcher.round_deadline_s() - before_s) < 1.0
    await dispatcher.wait_durable()
    await journal.wait_flushed()
    assert journal.newest_s == 1_000_000.0
    await journal.close()
