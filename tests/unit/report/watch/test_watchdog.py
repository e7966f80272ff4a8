"""The watchdog: findings that hold become alarms, once each, causes before symptoms; and its table."""

import dataclasses

from astraflow.processes.service_state import ServiceState
from astraflow.report.watch.watchdog import Watchdog, alarms_now, cleared_text
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
