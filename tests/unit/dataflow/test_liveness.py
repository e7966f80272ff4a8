from astraflow.dataflow.liveness import Liveness, WorkerLife
from astraflow.types import Load


def make(timeout_s: float = 10.0) -> Liveness:
    liveness = Liveness(timeout_s)
    liveness.add(WorkerLife("w.1", "w", "torch", ("actor",), last_seen_s=0.0))
    liveness.grant(("1.0.0", "1.1.0"), 0.0)
    return liveness


def test_a_lease_is_overdue_once_its_heartbeats_stop() -> None:
    liveness = make()
    liveness.beat("w.1", ("1.0.0",), Load(num_running=1), 6.0)
    assert liveness.overdue_leases(9.9) == ()
    assert liveness.overdue_leases(10.0) == ("1.1.0",)
    assert liveness.next_deadline_s() == 10.0
    liveness.end(("1.1.0",))
    assert liveness.next_deadline_s() == 16.0


def test_a_heartbeat_does_not_revive_a_lease_that_ended() -> None:
    liveness = make()
    liveness.end(("1.0.0",))
    liveness.beat("w.1", ("1.0.0",), Load(), 1.0)
    assert liveness.overdue_leases(100.0) == ("1.1.0",)


def test_a_silent_service_is_overdue_after_its_leases() -> None:
    liveness = make()
    assert liveness.overdue_workers(14.9) == ()
    assert liveness.overdue_workers(15.0) == ("w.1",)
    liveness.seen("w.1", 12.0)
    assert liveness.overdue_workers(15.0) == ()


def test_only_a_drained_service_is_remembered_as_left() -> None:
    liveness = make()
    liveness.drop("w.1")
    assert not liveness.has_left("w.1")
    liveness = make()
    worker = liveness.worker("w.1")
    assert worker is not None
    worker.is_draining = True
    liveness.drop("w.1")
    assert liveness.has_left("w.1")
    assert liveness.worker("w.1") is None


def test_nothing_to_watch_has_no_deadline() -> None:
    assert Liveness(1.0).next_deadline_s() == float("inf")
