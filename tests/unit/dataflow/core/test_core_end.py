"""How a run ends, what starves it, who waits for whom, and snapshots."""

import sys

import msgspec
import pytest

from astraflow.config import Use
from astraflow.dataflow.core.commands import AddTasks, RunEnded, StopRun
from astraflow.dataflow.core.core import Core
from astraflow.errors import ComponentError, ConfigError, DataError, RefusedError
from astraflow.types import Task, Wait, WaitReason
from astraflow.types.waits import POOL, Party
from drivers.core_driver import Driver, make_core_plan, make_table

_FILTERED = make_table(filters=[{"name": "zero_variance"}])


def started(**plan: object) -> Driver:
    """A run whose version 0 is published, with service w0."""
    driver = Driver(make_core_plan(**plan))  # type: ignore[arg-type]
    driver.start()
    return driver


# --- the end --------------------------------------------------------------------------------------


def test_the_run_ends_when_every_policy_took_its_steps():
    driver = started(policies=("a", "b"), num_steps=1)
    driver.run_step("a")
    assert driver.core.state == "running"
    driver.take(0, "b")
    driver.publish(1, "b")
    driver.commit(0, "b")
    assert (driver.core.state, driver.core.reason) == ("finished", "all steps are done")
    assert driver.events[-1] == RunEnded(reason="all steps are done", is_failure=False)
    assert {"run", "leases", "evals", "steps/a", "steps/b", "batch/a"} <= set(driver.last.wakes)
    assert driver.lease(1) == ()


def test_stopping_cancels_what_is_live_in_every_stage():
    driver = started(table=make_table(max_staleness=2), num_steps=9)
    driver.run_step()
    driver.finish_groups(3)
    driver.take(1)
    lease = driver.lease(1)[0]
    driver.apply(StopRun(reason="enough", is_failure=False))
    counts = driver.fates()
    assert (counts.drawn, counts.trained, counts.cancelled, counts.live) == (6, 2, 4, 0)
    assert driver.core.state == "finished"
    assert driver.core.revoked_leases("w0", [lease.id]) == (lease.id,)
    assert driver.finish(lease).status == "dropped"


def test_stopping_with_a_failure_says_why_and_stopping_again_changes_nothing():
    driver = started()
    driver.apply(StopRun(reason="the trainer died five times", is_failure=True))
    driver.apply(StopRun(reason="again", is_failure=False))
    assert (driver.core.state, driver.core.reason) == ("failed", "the trainer died five times")
    assert driver.last.events == ()


def test_after_the_end_a_trainer_may_release_and_repeat_its_last_commit_and_nothing_else():
    driver = started(num_steps=1)
    driver.run_step()
    driver.commit(0)
    driver.release(1)
    for action in (lambda: driver.attach(durable_step=1), lambda: driver.publish(2)):
        with pytest.raises(RefusedError) as refused:
            action()
        assert refused.value.code == "finished"
    with pytest.raises(RefusedError) as refused:
        driver.take(0)
    assert refused.value.code == "finished"


def test_pushing_tasks_after_the_end_is_refused():
    driver = started()
    driver.apply(StopRun(reason="enough", is_failure=False))
    with pytest.raises(RefusedError):
        driver.apply(AddTasks(tasks=(Task(id="x", source="", prompt="?"),)))


# --- too little data ------------------------------------------------------------------------------


def test_empty_sources_are_an_error_not_a_wait():
    driver = started(num_tasks=0)
    assert driver.lease(1) == ()
    assert driver.core.state == "failed"
    assert "sources train are empty" in driver.core.reason


def test_filters_that_drop_every_task_twice_over_end_the_run_with_the_numbers():
    driver = started(table=_FILTERED, num_tasks=5)
    for _ in range(10):
        assert driver.core.state == "running"
        driver.finish_groups(1, reward=1.0)
    assert driver.core.state == "failed"
    for part in ("'actor'", "batch of 2 groups", "10 groups in a row", "5 tasks", "10 filtered"):
        assert part in driver.core.reason
    assert driver.fates().live == 0


def test_one_usable_group_shows_that_a_batch_can_be_filled():
    driver = started(table=_FILTERED, num_tasks=5)
    for number in range(24):
        driver.finish_groups(1, **({"reward": 1.0} if number % 8 else {}))
    assert driver.core.state == "running"


def test_episodes_that_all_fail_end_the_run_with_their_last_error():
    driver = started(num_tasks=1000)
    for _ in range(64):
        assert driver.core.state == "running"
        good, bad = driver.lease(2)
        driver.finish(good)
        driver.fail(bad, is_retryable=False)
    assert driver.core.state == "failed"
    assert "64 groups in a row failed; the last error: Boom: it broke" in driver.core.reason


def next_is_outside(*, num_tasks: int, seed: int) -> "Lost":
    """A curator that points nowhere."""
    return Lost(num_tasks)


class Lost:
    """Draws a task that does not exist."""

    def __init__(self, num_tasks: int) -> None:
        self.num_tasks = num_tasks

    def next(self) -> int:
        return self.num_tasks

    def observe(self, outcome: object) -> None:
        pass

    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: object) -> None:
        pass


def test_a_curator_that_returns_an_unknown_task_ends_the_run():
    driver = started(curators=(Use(use=f"{__name__}:next_is_outside"),))
    assert driver.lease(1) == ()
    assert (driver.core.state, driver.core.reason) == (
        "failed",
        f"curator {__name__}:next_is_outside.next() gave 100; there are 100 tasks",
    )


class Leaving(Lost):
    """Calls `exit()` instead of drawing a task, or of taking note of an outcome."""

    def __init__(self, *, num_tasks: int, seed: int, draws: bool) -> None:
        super().__init__(num_tasks)
        self._draws = draws

    def next(self) -> int:
        return 0 if self._draws else sys.exit("no more tasks")

    def observe(self, outcome: object) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("draws", "reason"),
    [
        (False, "next() raised SystemExit: no more tasks"),
        (True, "observe() raised KeyboardInterrupt"),
    ],
)
def test_a_curator_that_calls_exit_ends_the_run_and_not_the_process(draws: bool, reason: str):
    driver = started(curators=(Use(use=f"{__name__}:Leaving", args={"draws": draws}),))
    for lease_id in driver.lease(4):
        driver.finish(lease_id)
    said, _, line = driver.core.reason.partition(" (")
    assert (driver.core.state, said) == ("failed", f"curator {__name__}:Leaving.{reason}")
    assert "test_core_end.py, line" in line


class Speechless(Lost):
    """Draws tasks, and cannot say what it remembers."""

    def __init__(self, *, num_tasks: int, seed: int, answer: object = None) -> None:
        super().__init__(num_tasks)
        self._answer = answer

    def next(self) -> int:
        return 0

    def state(self) -> dict[str, int]:
        return sys.exit("no state") if self._answer is None else self._answer  # type: ignore[return-value]


class SpeechlessGate(Speechless):
    """Passes over no task."""

    next = None  # type: ignore[assignment]

    def why_skip(self, task_idx: int) -> str:
        return ""


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "raised SystemExit: no state"),
        ([1, 2], "returned [1, 2]; expected a mapping"),
        ({"x": {1j}}, "cannot be stored: encoding it raised"),
    ],
)
@pytest.mark.parametrize("name", ["Speechless", "SpeechlessGate"])
def test_a_curator_whose_state_cannot_be_kept_is_named_and_a_failed_run_is_kept_without_it(
    name: str, answer: object, reason: str
):
    use = Use(use=f"{__name__}:{name}", args={"answer": answer})
    driver = started(curators=(use,))
    driver.finish_groups(2)
    with pytest.raises(ComponentError) as failed:
        driver.core.snapshot()
    assert str(failed.value).startswith(f"curator {__name__}:{name}.state() ")
    assert reason in str(failed.value)
    driver.apply(StopRun(reason=str(failed.value), is_failure=True))
    restored = Core.from_snapshot(driver.plan, driver.core.snapshot())
    assert (restored.state, restored.reason) == ("failed", str(failed.value))


def test_a_step_is_committed_before_a_curator_that_fails_at_it_ends_the_run():
    driver = started(curators=(Use(use=f"{__name__}:SpeechlessGate"),))
    driver.run_step()
    assert (driver.core.state, driver.status().step) == ("failed", 1)
    said, _, line = driver.core.reason.partition(" (")
    assert said == f"curator {__name__}:SpeechlessGate.state() raised SystemExit: no state"
    assert "test_core_end.py, line" in line
    assert driver.core.curation() == ()
    assert driver.fates().trained == 2
    again = Core(driver.plan)
    for command, at_s, events in driver.commands:
        assert again.apply(command, at_s).events == events


@pytest.mark.parametrize("given", ["task 7", 1.5, None])
def test_a_curator_that_gives_no_number_ends_the_run(given: object):
    Numberless.given = given
    driver = started(curators=(Use(use=f"{__name__}:Numberless"),))
    assert driver.lease(1) == ()
    assert driver.core.reason.startswith(
        f"the answer of curator {__name__}:Numberless.next() raised TypeError"
    )


class Numberless(Speechless):
    """Draws what is no task."""

    given: object = None

    def next(self) -> int:
        return self.given  # type: ignore[return-value]


def test_two_curators_that_propose_tasks_are_refused():
    use = Use(use=f"{__name__}:next_is_outside")
    with pytest.raises(ConfigError, match="2 curators propose tasks"):
        Core(make_core_plan(curators=(use, use)))


# --- who waits for whom ---------------------------------------------------------------------------


def waits(driver: Driver) -> list[tuple[str, str]]:
    return [(wait.who.kind, wait.whom.kind) for wait in driver.core.waits()]


def kinds(wait: Wait) -> list[str]:
    return [reason.kind for reason in wait.reasons]


def test_every_wait_names_who_and_whom():
    driver = Driver(make_core_plan())
    assert waits(driver) == [("run", "trainer")]
    driver.join()
    driver.attach()
    assert waits(driver) == [("pool", "trainer")]
    driver.publish(0)
    assert waits(driver) == [("trainer", "pool")]
    driver.finish_groups(4)
    driver.take(0)
    assert waits(driver) == [("pool", "trainer")]
    assert kinds(driver.core.waits()[0]) == ["tickets"]
    assert driver.core.waits()[0].since_s > 0
    driver.apply(StopRun(reason="enough", is_failure=False))
    assert waits(driver) == []


def lose(driver: Driver, num: int, *, every_s: float) -> None:
    """Groups of which all episodes get the same reward, so that the filter drops them."""
    for _ in range(num):
        driver.now_s += every_s
        driver.finish_groups(1, reward=1.0)


def test_a_trainer_waits_since_its_last_step_however_many_groups_are_drawn_meanwhile():
    driver = started(table=_FILTERED, num_tasks=20_000)
    (before,) = driver.core.waits()
    lose(driver, 5, every_s=10.0)
    (after,) = driver.core.waits()
    assert after.since_s == before.since_s


def test_a_trainer_that_waits_is_told_how_many_groups_which_filter_dropped():
    driver = started(table=_FILTERED, num_tasks=20_000)
    lose(driver, 7, every_s=10.0)
    (wait,) = driver.core.waits(driver.now_s)
    waited_s = driver.now_s - wait.since_s
    assert wait.reasons == (
        WaitReason(
            kind="lost_groups",
            policy="actor",
            num=7,
            total=7,
            seconds=waited_s,
            fate="filtered",
            name="zero_variance",
        ),
    )
    (early,) = driver.core.waits(wait.since_s + 5.0)
    assert early.reasons == (WaitReason(kind="groups", policy="actor", num=0, total=2),)


def test_a_trainer_that_waits_while_most_groups_are_good_is_told_how_many_are_ready():
    driver = started(table=make_table(groups_per_batch=8, filters=[{"name": "zero_variance"}]))
    driver.finish_groups(3)
    lose(driver, 2, every_s=10.0)
    (wait,) = driver.core.waits(driver.now_s)
    assert wait.reasons == (WaitReason(kind="groups", policy="actor", num=3, total=8),)


def test_a_trainer_that_is_silent_for_much_longer_than_its_steps_took_is_overdue():
    driver = started(table=make_table(max_staleness=0), num_steps=20)
    for _ in range(3):
        driver.now_s += 2.0
        driver.run_step()
    driver.finish_groups(2)
    driver.take(3)
    (wait,) = driver.core.waits(driver.now_s + 5.0)
    assert kinds(wait) == ["tickets"]
    (wait,) = driver.core.waits(driver.now_s + 200.0)
    assert (wait.who, wait.whom) == (POOL, Party(kind="trainer", name="actor"))
    assert kinds(wait) == ["overdue", "tickets"]
    first, *_, last = (record.at_s for record in driver.core.steps("actor"))
    assert wait.reasons[0].usual_s == pytest.approx((last - first) / 2)
    assert wait.reasons[0].seconds == pytest.approx(200.0)


def test_the_pause_before_a_run_was_continued_does_not_count_as_a_wait():
    driver = started(table=make_table(max_staleness=0), num_steps=20)
    for _ in range(3):
        driver.now_s += 2.0
        driver.run_step()
    driver.finish_groups(2)
    driver.take(3)
    started_s = driver.now_s + 1500.0
    (wait,) = driver.core.waits(started_s + 5.0, started_s)
    assert kinds(wait) == ["tickets"]
    assert wait.since_s == started_s
    (wait,) = driver.core.waits(started_s + 200.0, started_s)
    assert wait.reasons[0].kind == "overdue"
    assert wait.reasons[0].seconds == pytest.approx(200.0)


def test_a_first_step_is_never_overdue():
    driver = started(table=make_table(max_staleness=0), num_steps=20)
    driver.finish_groups(2)
    driver.take(0)
    (wait,) = driver.core.waits(driver.now_s + 5000.0)
    assert kinds(wait) == ["tickets"]


def test_the_run_ends_when_no_group_was_usable_for_ten_minutes_not_after_passes_over_all_tasks():
    driver = started(table=_FILTERED, num_tasks=20_000)
    lose(driver, 64, every_s=5.0)
    assert driver.core.state == "running"
    lose(driver, 60, every_s=5.0)
    assert driver.core.state == "failed"
    assert "filtered by zero_variance since the last batch" in driver.core.reason
    assert driver.core.waits(driver.now_s) == ()


def test_few_groups_prove_nothing_however_long_they_took():
    driver = started(table=_FILTERED, num_tasks=20_000)
    lose(driver, 60, every_s=20.0)
    assert driver.core.state == "running"


def test_the_time_for_which_a_run_was_interrupted_is_not_a_time_without_groups():
    driver = started(table=_FILTERED, num_tasks=20_000)
    lose(driver, 64, every_s=1.0)
    driver.now_s += 10_000.0
    lose(driver, 2, every_s=1.0)
    assert driver.core.state == "running"


def test_a_restored_core_gives_up_at_the_same_group():
    driver = started(table=_FILTERED, num_tasks=20_000)
    lose(driver, 64, every_s=5.0)
    other = Driver(driver.plan)
    other.core, other.sessions, other.now_s = (
        Core.from_snapshot(driver.plan, driver.core.snapshot()),
        driver.sessions,
        driver.now_s,
    )
    for each in (driver, other):
        while each.core.state == "running":
            lose(each, 1, every_s=5.0)
    assert driver.core.reason == other.core.reason
    assert driver.core.snapshot() == other.core.snapshot()


# --- snapshots ------------------------------------------------------------------------------------


def test_a_restored_core_goes_on_as_the_original_would():
    driver = started(table=make_table(max_staleness=2), num_steps=6)
    driver.run_step()
    driver.finish_groups(1)
    driver.lease(3)
    data = driver.core.snapshot()
    other = Driver(driver.plan)
    other.core, other.sessions, other.now_s = (
        Core.from_snapshot(driver.plan, data),
        driver.sessions,
        driver.now_s,
    )
    assert other.core.snapshot() == data
    for each in (driver, other):
        for lease_id in each.core.worker_leases("w0"):
            each.finish(lease_id)
        each.finish_groups(1)
        each.take(1)
        each.publish(2)
        each.commit(1)
    assert other.events == driver.events[-len(other.events) :]
    assert other.core.snapshot() == driver.core.snapshot()


def test_the_parts_of_a_snapshot_are_of_the_moment_when_it_began():
    driver = started(table=make_table(max_staleness=2), num_steps=6)
    driver.finish_groups(3)
    driver.take(0)
    data, parts = driver.core.snapshot(), driver.core.snapshot_parts()
    driver.finish_groups(1)
    driver.publish(1)
    driver.commit(0)
    driver.release(1)
    assert b"".join(parts) == data


@pytest.mark.parametrize("num_bytes", [1, 3, 20])
def test_a_snapshot_that_is_cut_off_is_refused(num_bytes: int):
    driver = started()
    driver.finish_groups(1)
    with pytest.raises(DataError):
        Core.from_snapshot(driver.plan, driver.core.snapshot()[:-num_bytes])


def test_a_snapshot_of_another_runs_policies_is_refused():
    data = started().core.snapshot()
    with pytest.raises(DataError, match="trains actor"):
        Core.from_snapshot(make_core_plan(policies=("solver",)), data)


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x81\xa6format\x63"])
def test_a_broken_or_foreign_snapshot_is_refused(data: bytes):
    with pytest.raises(DataError):
        Core.from_snapshot(make_core_plan(), data)


def test_the_state_does_not_grow_with_the_length_of_the_run():
    driver = started(num_steps=200)
    sizes = []
    for step in range(200):
        driver.run_step()
        driver.release(step + 1)
        sizes.append(len(driver.core.snapshot()))
    per_step = (sizes[-1] - sizes[100]) / (len(sizes) - 101)
    # one record per step
    assert per_step < 1.1 * len(msgspec.msgpack.encode(driver.core.steps("actor")[-1]))
