"""What cannot be written to the journal is refused before it is applied; a record that fails is fatal."""

from pathlib import Path

import pytest

from astraflow.dataflow.core.commands import (
    AddWorker,
    AttachTrainer,
    Command,
    Decision,
    FateDecided,
    IssueLeases,
    PublishVersion,
)
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.service.dispatcher import Dispatcher
from astraflow.dataflow.service.liveness import Liveness
from astraflow.errors import JournalError, RefusedError
from astraflow.types import BusySpan, Manifest, ServedVersions
from drivers.dataflow_driver import make_plan


def publish(num_bytes: int) -> PublishVersion:
    manifest = Manifest(
        policy="actor", version=0, kind="full", tensors=(), chunks=(), digest="d", num_bytes=num_bytes
    )
    return PublishVersion(policy="actor", epoch=1, step=0, manifest=manifest)


def ask(num_free: int) -> IssueLeases:
    served = (ServedVersions(policy="actor", versions=(0,)),)
    return IssueLeases(worker_id="w", num_free=num_free, served=served)


@pytest.mark.parametrize("absurd", [ask(10**20), ask(-(2**70)), publish(2**70)])
async def test_a_value_that_cannot_be_recorded_is_refused_and_changes_nothing(
    tmp_path: Path, absurd: Command
) -> None:
    journal, core = Journal(tmp_path), Core(make_plan())
    dispatcher = Dispatcher(core, journal, Liveness(30.0))
    dispatcher.apply(AddWorker(worker_id="w", name="w", hosts=("actor",)))
    dispatcher.apply(AttachTrainer(policy="actor", trainer_id="t", durable_step=0))
    if isinstance(absurd, IssueLeases):
        dispatcher.apply(publish(1))
    before, seq = core.snapshot(), journal.seq
    with pytest.raises(RefusedError, match="cannot be written to the journal"):
        dispatcher.apply(absurd)
    assert (core.snapshot(), journal.seq) == (before, seq)
    assert not dispatcher.fatal.is_set()
    dispatcher.apply(AddWorker(worker_id="v", name="v", hosts=("actor",)))
    await dispatcher.wait_durable()
    await journal.close()
    again = Journal(tmp_path)
    assert again.seq == seq + 1
    recovered = again.recover(new=lambda: Core(make_plan()), restore=lambda _: Core(make_plan()))
    assert recovered.snapshot() == core.snapshot()
    await again.close()


class Absurd(Core):
    """A core with a fault: its first event cannot be stored."""

    def apply(self, command: Command, now_s: float) -> Decision:
        decision = super().apply(command, now_s)
        return Decision(
            answer=decision.answer, events=(FateDecided(policy="p", group_id=2**70, fate="stale"),)
        )


async def test_an_event_that_cannot_be_recorded_is_fatal_and_leaves_no_gap(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    dispatcher = Dispatcher(Absurd(make_plan()), journal, Liveness(30.0))
    with pytest.raises(JournalError, match="record 1 cannot be encoded"):
        dispatcher.apply(AddWorker(worker_id="w", name="w", hosts=("actor",)))
    assert dispatcher.fatal.is_set()
    with pytest.raises(JournalError, match="restarts from its journal"):
        dispatcher.check()
    assert journal.seq == 0
    await journal.close()
    again = Journal(tmp_path)
    assert again.seq == 0
    await again.close()


async def test_a_fault_in_the_writer_of_the_tables_is_fatal_at_once(tmp_path: Path) -> None:
    """Nobody need ask: the process ends, and its supervisor restarts it."""

    def faulty(*_: object) -> None:
        raise ZeroDivisionError

    journal = Journal(tmp_path, insert=faulty)
    dispatcher = Dispatcher(Core(make_plan()), journal, Liveness(30.0))
    dispatcher.apply(AddWorker(worker_id="w", name="w", hosts=("actor",)))
    journal.note_spans("w", (BusySpan("generate", 1.0, 2.0),))
    await dispatcher.wait_durable()
    with pytest.raises(JournalError):
        await journal.wait_flushed()
    assert dispatcher.fatal.is_set()
    with pytest.raises(JournalError):
        await journal.close()
