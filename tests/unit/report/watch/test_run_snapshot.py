"""What rules read from a snapshot of a run."""

import pytest
from msgspec.structs import replace

from astraflow.recipe.service_state import ServiceState
from astraflow.report.watch.run_snapshot import StepMemory, newest_values
from drivers.run_snapshots import NOW_S, make_policy_status, make_snapshot, make_steps, make_wait, make_worker


def test_the_usual_value_is_the_median_of_the_newest_steps_that_report_it() -> None:
    steps = [*make_steps(6, entropy=90.0), *make_steps(8, entropy=2.0)[:5], *make_steps(3, entropy=4.0)]
    snapshot = make_snapshot(steps={"actor": steps, "judge": make_steps(2)})
    assert snapshot.usual("actor", "entropy") == 2.0
    assert snapshot.usual("actor", "unknown") is None
    assert snapshot.usual("judge", "entropy") is None  # two steps are too few
    assert make_snapshot(steps={"judge": make_steps(3)}).usual("judge", "entropy") == 0.5
    assert snapshot.usual("nobody", "entropy") is None
    assert newest_values(steps, "entropy", 4) == [2.0, 4.0, 4.0, 4.0]


def test_the_time_of_a_step_is_known_from_the_fourth_step_on() -> None:
    assert make_snapshot(steps={"actor": make_steps(3)}).step_s("actor") is None
    assert make_snapshot(steps={"actor": make_steps(4, every_s=2.5)}).step_s("actor") == 2.5
    late = [*make_steps(4, every_s=1.0), *make_steps(1)]
    assert make_snapshot(steps={"actor": late}).step_s("actor") == 1.0


def test_the_first_and_the_newest_steps_are_remembered_for_each_policy() -> None:
    memory = StepMemory()
    for record in make_steps(60):
        memory.add(record)
    numbers = [record.step for record in memory.steps["actor"]]
    assert numbers == [*range(5), *range(28, 60)]
    assert list(memory.steps) == ["actor"]


def test_a_service_is_silent_since_its_last_sign_of_life_and_never_for_a_negative_time() -> None:
    snapshot = make_snapshot()
    assert snapshot.silence_s(make_worker(unheard_s=7.0)) == pytest.approx(7.0)
    assert snapshot.silence_s(make_worker(unheard_s=-1.0)) == 0.0


@pytest.mark.parametrize(
    ("changes", "is_in_trouble"),
    [
        ({}, False),
        ({"silent_s": 1.9}, False),
        ({"silent_s": 2.0}, True),
        ({"trouble": "it is stopped"}, True),
        ({"state": "restarting"}, True),
        ({"restarts": 1, "age_s": 29.0}, True),
        ({"restarts": 1, "age_s": 30.0}, False),
        ({"restarts": 0, "age_s": 1.0}, False),
    ],
)
def test_a_process_is_in_trouble_if_it_is_silent_or_has_just_restarted(
    changes: dict[str, object], is_in_trouble: bool
) -> None:
    usual = ServiceState("rollout-0", state="running", age_s=100.0)
    snapshot = make_snapshot(services=(replace(usual, **changes),))
    assert snapshot.is_in_trouble("rollout-0", "trainer-actor") is is_in_trouble
    assert not snapshot.is_in_trouble("trainer-actor")


def test_only_a_policy_with_steps_to_do_waits_for_a_batch() -> None:
    wait = make_wait(3.0)
    assert list(make_snapshot(waits=(wait,)).waits_for_batch()) == [(make_policy_status(), wait)]
    done = make_policy_status(step=100)
    assert list(make_snapshot(waits=(wait,), policy=done).waits_for_batch()) == []
    assert list(make_snapshot(waits=(make_wait(3.0, whom=make_wait(1.0).who),)).waits_for_batch()) == []
    assert make_snapshot(now_s=NOW_S, status=None).waits == ()
