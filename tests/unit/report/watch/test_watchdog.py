"""The watchdog: findings that hold become alarms, once each, causes before symptoms; and its table."""

import dataclasses

import msgspec
import pytest

from astraflow.recipe.service_state import ServiceState
from astraflow.report.watch.run_snapshot import RunSnapshot
from astraflow.report.watch.watchdog import Watchdog, alarms_now, cleared_text
from astraflow.types import WeightTransfer
from drivers.run_snapshots import NOW_S, make_snapshot, make_wait, make_worker

STOPPED = ServiceState("rollout-0", state="running", silent_s=9.0, is_silent=True, trouble="it is stopped")


def names(alarms: object) -> list[str]:
    return [alarm.rule for alarm in alarms]  # type: ignore[attr-defined]


def test_a_finding_is_said_once_while_it_holds_and_its_end_is_said_too() -> None:
    watchdog = Watchdog()
    snapshot = make_snapshot(services=(STOPPED,))
    first = watchdog.look(snapshot)
    again = watchdog.look(dataclasses.replace(snapshot, now_s=NOW_S + 1))
    assert (names(first.raised), names(again.raised)) == (["stopped_process"], [])
    assert names(again.alarms) == ["stopped_process"]
    well = make_snapshot(now_s=NOW_S + 3)
    assert names(watchdog.look(well).alarms) == ["stopped_process"]  # it may come back at once
    over = watchdog.look(dataclasses.replace(well, now_s=NOW_S + 7))
    assert over.alarms == ()
    assert [cleared_text(alarm) for alarm in over.cleared] == ["rollout-0 has recovered (stopped_process)"]
    assert watchdog.look(dataclasses.replace(well, now_s=NOW_S + 9)).cleared == ()


def test_a_condition_that_must_hold_for_a_while_is_no_alarm_before() -> None:
    watchdog = Watchdog()
    snapshot = make_snapshot(workers=())
    assert watchdog.look(snapshot).alarms == ()
    later = watchdog.look(dataclasses.replace(snapshot, now_s=NOW_S + 4.5))
    assert names(later.raised) == ["no_rollout_service"]
    assert later.raised[0].since_s == NOW_S


def test_what_is_a_symptom_is_not_named_beside_its_cause() -> None:
    starved = {"workers": (make_worker(tokens_per_s=0.0),), "waits": (make_wait(12.0),)}
    assert names(alarms_now(make_snapshot(**starved))) == ["starved_table"]
    both = make_snapshot(**starved, services=(STOPPED,))
    assert names(alarms_now(both)) == ["stopped_process"]
    assert names(Watchdog().look(both).alarms) == ["stopped_process"]


@pytest.mark.parametrize(
    ("paused", "break_s"),
    [
        (make_snapshot(), 60.0),  # the launcher was stopped, or the whole machine slept
        (make_snapshot(services=(STOPPED,)), 1.0),
        (make_snapshot(workers=(make_worker(unheard_s=40.0),)), 1.0),
        (make_snapshot(unanswered_s=9.0), 1.0),
        (make_snapshot(services=(ServiceState("rollout-1", state="running", age_s=20.0),)), 1.0),
        (make_snapshot(services=(ServiceState("trainer-actor", state="restarting"),)), 1.0),
    ],
)
def test_a_pause_is_no_starved_table_and_no_slow_link(paused: RunSnapshot, break_s: float) -> None:
    watchdog = Watchdog()
    watchdog.look(paused)
    wait_s = 60.0
    transfer = WeightTransfer(
        policy="actor", version=9, age_s=wait_s, num_bytes=10**9, arrived_bytes=10**6, quiet_s=1.0
    )
    worker = make_worker(tokens_per_s=0.0, transfers=(transfer,))
    after = make_snapshot(workers=(worker,), waits=(make_wait(wait_s),))

    def look(passed_s: float) -> list[str]:
        status = msgspec.structs.replace(
            after.status,  # type: ignore[type-var]
            workers=(msgspec.structs.replace(worker, last_seen_s=NOW_S + passed_s),),
        )
        now = dataclasses.replace(after, status=status, now_s=NOW_S + passed_s)
        return [rule for rule in names(watchdog.look(now).raised) if rule != "stopped_process"]

    assert [look(break_s + second) for second in range(9)] == 9 * [[]]
    found = [rule for second in range(9, 40) for rule in look(break_s + second)]
    assert found[:1] == ["starved_table"]  # it is still a fault if it lasts


def test_who_looks_once_repeats_what_a_watchdog_found_by_looking_for_longer() -> None:
    watchdog = Watchdog()
    snapshot = make_snapshot(workers=())
    watchdog.look(snapshot)
    known = watchdog.look(dataclasses.replace(snapshot, now_s=NOW_S + 5)).alarms
    assert alarms_now(snapshot) == ()
    assert names(alarms_now(snapshot, known)) == ["no_rollout_service"]


def test_a_clock_that_is_set_back_ends_alarms_instead_of_keeping_them_for_ever() -> None:
    watchdog = Watchdog()
    watchdog.look(make_snapshot(services=(STOPPED,)))
    assert watchdog.look(make_snapshot(now_s=NOW_S - 3600)).alarms == ()
