import pytest

import astraflow.dataflow.service.liveness as liveness_module
from astraflow.dataflow.service.liveness import Liveness, WorkerLife
from astraflow.types import Load


def make(timeout_s: float = 10.0) -> Liveness:
    liveness = Liveness(timeout_s)
    liveness.add(WorkerLife("w.1", "w", "torch", ("actor",), last_seen_s=0.0))
    liveness.grant(("1.0.0", "1.1.0"), 0.0)
    return liveness


def test_a_lease_is_overdue_once_its_heartbeats_stop() -> None:
    liveness = make()
    liveness.note_beat("w.1", ("1.0.0",), Load(num_running=1), 6.0)
    assert liveness.overdue_leases(9.9) == ()
    assert liveness.overdue_leases(10.0) == ("1.1.0",)
    assert liveness.next_deadline_s() == 10.0
    liveness.end(("1.1.0",))
    assert liveness.next_deadline_s() == 16.0


def test_a_heartbeat_does_not_revive_a_lease_that_ended() -> None:
    liveness = make()
    liveness.end(("1.0.0",))
    liveness.note_beat("w.1", ("1.0.0",), Load(), 1.0)
    assert liveness.overdue_leases(100.0) == ("1.1.0",)


def test_a_silent_service_is_overdue_after_its_leases() -> None:
    liveness = make()
    assert liveness.overdue_workers(14.9) == ()
    assert liveness.overdue_workers(15.0) == ("w.1",)
    liveness.note_seen("w.1", 12.0)
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


def test_the_service_that_drained_first_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_module, "_MAX_LEFT", 2)
    liveness = Liveness(10.0)
    for number in range(4):
        worker = WorkerLife(f"w.{number}", "w", "torch", ("actor",), last_seen_s=0.0, is_draining=True)
        liveness.add(worker)
        liveness.drop(worker.id)
    assert [liveness.has_left(f"w.{number}") for number in range(4)] == [False, False, True, True]


def test_nothing_to_watch_has_no_deadline() -> None:
    assert Liveness(1.0).next_deadline_s() == float("inf")


def make_worker(id_: str, *, last_seen_s: float, address: str = "10.0.0.1") -> WorkerLife:
    return WorkerLife(id_, "gpu", "torch", ("actor",), last_seen_s=last_seen_s, address=address)


def test_a_service_that_joined_again_takes_the_place_of_its_silent_former_self() -> None:
    liveness = Liveness(20.0, heartbeat_s=2.0)
    liveness.add(make_worker("gpu.1", last_seen_s=0.0))
    assert (liveness.overdue_workers(6.0), liveness.next_deadline_s()) == ((), 32.0)
    liveness.add(make_worker("gpu.2", last_seen_s=4.0))
    assert liveness.overdue_workers(4.9) == ()
    assert (liveness.overdue_workers(5.0), liveness.next_deadline_s()) == (("gpu.1",), 7.0)
    liveness.drop("gpu.1")
    assert liveness.overdue_workers(20.0) == ()


def test_a_service_from_before_a_restart_of_the_dataflow_is_replaced_as_well() -> None:
    liveness = Liveness(20.0, heartbeat_s=2.0)
    liveness.add(make_worker("gpu.1", last_seen_s=0.0, address=""))
    liveness.add(make_worker("gpu.2", last_seen_s=5.0))
    assert liveness.overdue_workers(5.0) == ("gpu.1",)


def test_a_service_of_the_same_name_elsewhere_replaces_nobody() -> None:
    liveness = Liveness(20.0, heartbeat_s=2.0)
    liveness.add(make_worker("gpu.1", last_seen_s=0.0))
    liveness.add(make_worker("gpu.2", last_seen_s=8.0, address="10.0.0.2"))
    assert liveness.overdue_workers(8.0) == ()
    assert [worker.id for worker in liveness.silent(8.0)] == ["gpu.1"]


def test_each_silence_is_reported_once() -> None:
    liveness = Liveness(20.0, heartbeat_s=2.0)
    liveness.add(make_worker("gpu.1", last_seen_s=0.0))
    assert (liveness.next_silence_s(), liveness.newly_silent(4.9)) == (7.0, ())
    assert [worker.id for worker in liveness.newly_silent(5.0)] == ["gpu.1"]
    assert (liveness.next_silence_s(), liveness.newly_silent(6.0)) == (float("inf"), ())
    liveness.note_beat("gpu.1", (), Load(), 7.0)
    assert (liveness.next_silence_s(), liveness.newly_silent(11.9)) == (14.0, ())
    assert [worker.id for worker in liveness.newly_silent(12.0)] == ["gpu.1"]


def test_services_that_stop_together_are_found_together() -> None:
    liveness = Liveness(20.0, heartbeat_s=2.0)
    for number in range(500):  # their last heartbeats are spread over the time between two
        liveness.add(make_worker(f"gpu.{number}", last_seen_s=number / 250, address=f"10.0.1.{number}"))
    assert len(liveness.newly_silent(liveness.next_silence_s())) == 500
    assert len(liveness.overdue_workers(liveness.next_deadline_s())) == 500


def test_the_more_services_there_are_the_longer_the_interval_of_those_that_join() -> None:
    liveness = Liveness(20.0, heartbeat_s=2.0)
    told: list[float] = []
    for number in range(10_000):
        worker = make_worker(f"gpu.{number}", last_seen_s=0.0, address=f"10.0.1.{number}")
        liveness.add(worker)
        told.append(worker.heartbeat_s)
    assert (told[0], told[999], told[1999], told[9999]) == (2.0, 2.0, 4.0, 5.0)
    assert sum(1 / interval_s for interval_s in told) < 2500
    silent = {worker.id for worker in liveness.silent(5.0)}
    assert "gpu.0" in silent
    assert "gpu.9999" not in silent  # its next two heartbeats may be missing until 11 s
    assert "gpu.9999" in {worker.id for worker in liveness.silent(11.0)}


def test_a_longer_lease_allows_longer_intervals() -> None:
    liveness = Liveness(600.0, heartbeat_s=2.0)
    for number in range(10_000):
        liveness.add(make_worker(f"gpu.{number}", last_seen_s=0.0, address=f"10.0.1.{number}"))
    assert liveness.interval_s == 20.0


def test_a_lease_survives_until_its_heartbeat_however_rare_heartbeats_are_wanted() -> None:
    liveness = Liveness(20.0, heartbeat_s=30.0)
    worker = make_worker("gpu.0", last_seen_s=0.0)
    liveness.add(worker)
    liveness.grant(("1.0.0",), 0.0)
    assert worker.heartbeat_s == 5.0
    assert liveness.next_deadline_s() == 20.0
