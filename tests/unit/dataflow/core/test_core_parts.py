"""Limiters, samplers and removers of one's own: they decide, remember, and fail without harm to the core."""

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest

from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import BatchTaken, StopRun
from astraflow.dataflow.core.core import Core
from astraflow.errors import ComponentError, ConfigError
from astraflow.protocols import CompleteGroup, TableSizes, TableView, TakenBatch
from astraflow.types import WaitReason
from drivers.core_driver import Driver, make_core_plan, make_table


def own(kind: str, name: str, **args: object) -> dict[str, Any]:
    return {kind: {"use": f"{__name__}:{name}", "name": "use", "args": args}}


def started(table: TableConfig, num_steps: int = 4) -> Driver:
    driver = Driver(make_core_plan(table=table, num_steps=num_steps))
    driver.start()
    return driver


def resumed(driver: Driver, data: bytes) -> Driver:
    other = Driver(driver.plan)
    other.core = Core.from_snapshot(driver.plan, data)
    other.sessions, other.now_s = driver.sessions, driver.now_s
    return other


ANSWERS: dict[str, Callable[[], Any]] = {}
"""What the objects below answer instead of what they should, by the name of the test's case."""


def leaves() -> None:
    sys.exit("bye")


def raises() -> None:
    raise KeyError("lost")


def is_interrupted() -> None:
    raise KeyboardInterrupt


class Limits:
    """A limiter that counts committed steps, and answers as the case says."""

    def __init__(self, *, case: str = "", num: int = 4, most: int | None = None) -> None:
        self._case, self._num, self._most = case, num, most

    def max_tickets(self, sizes: TableSizes) -> int:
        return 4 if self._most is None else self._most

    def tickets(self, table: TableView, sizes: TableSizes) -> int:
        return ANSWERS[self._case]() if self._case else self._num


class Picks:
    """A sampler that takes the newest groups, and answers as the case says."""

    def __init__(self, *, case: str = "", worst: int = 1) -> None:
        self._case, self._worst = case, worst

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, CompleteGroup], num_groups: int
    ) -> list[int] | None:
        if self._case:
            return ANSWERS[self._case]()
        return sorted(ready, reverse=True)[:num_groups] if len(ready) >= num_groups else None

    def worst_staleness(self, sizes: TableSizes, *, max_tickets: int) -> int:
        return self._worst


class Vandal(Picks):
    """Tries to change what it is shown."""

    def pick(self, waiting: Any, ready: Any, num_groups: int) -> list[int] | None:
        del ready[0]
        return super().pick(waiting, ready, num_groups)


class Ages(Picks):
    """Tries to make a group younger than it is."""

    def pick(self, waiting: Any, ready: Any, num_groups: int) -> list[int] | None:
        for group in ready.values():
            group.oldest_version += 1
        return super().pick(waiting, ready, num_groups)


class Removes:
    """A remover that keeps the newest three, and answers as the case says."""

    def __init__(self, *, case: str = "") -> None:
        self._case = case

    def remove(self, ready: Mapping[int, CompleteGroup], num_groups: int) -> list[int]:
        return ANSWERS[self._case]() if self._case else sorted(ready)[: len(ready) - 3]


class Alternates(Picks):
    """A sampler with a memory: the newest groups and the oldest ones in turn."""

    def __init__(self, *, case: str = "") -> None:
        super().__init__()
        self._fails, self.taken = case, list[tuple[int, ...]]()

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, CompleteGroup], num_groups: int
    ) -> list[int] | None:
        is_newest = len(self.taken) % 2 == 0
        return sorted(ready, reverse=is_newest)[:num_groups] if len(ready) >= num_groups else None

    def observe(self, batch: TakenBatch) -> None:
        if self._fails == "observe":
            sys.exit("bye")
        self.taken.append(batch.group_ids)

    def state(self) -> dict[str, Any]:
        if self._fails == "state":
            sys.exit("bye")
        return {"taken": self.taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        if self._fails == "restore":
            raise KeyError("lost")
        self.taken = [tuple(ids) for ids in state["taken"]]


class Forgets(Picks):
    """Would lose its memory in a restart."""

    def observe(self, batch: TakenBatch) -> None:
        self.last = batch.step


def taken(driver: Driver) -> list[tuple[int, ...]]:
    return [event.group_ids for event in driver.events if isinstance(event, BatchTaken)]


# --- they decide ----------------------------------------------------------------------------------


def test_a_custom_limiter_bounds_the_groups_in_flight():
    driver = started(make_table(max_staleness=3, **own("limiter", "Limits", num=3)))
    assert len(driver.lease(99)) == 3 * 2
    assert driver.status().max_tickets == 4
    assert [reason.kind for reason in driver.core.waits()[-1].reasons] == ["groups"]
    assert driver.core.why_no_lease(driver.served()) == (WaitReason(kind="tickets", policy="actor", num=3),)


def test_a_custom_sampler_picks_the_groups():
    driver = started(make_table(**own("sampler", "Picks")))
    driver.finish_groups(4)
    driver.take(0)
    assert taken(driver) == [(3, 2)]


def test_a_custom_remover_evicts_groups_and_is_not_called_before_a_batch_is_ready():
    driver = started(make_table(max_staleness=3, **own("remover", "Removes")))
    driver.finish_groups(4)
    assert driver.fate_of(0) == ["evicted"]
    assert driver.fates().evicted == 1


def test_component_state_survives_a_restart_and_changes_only_with_taken_batches():
    driver = started(make_table(max_staleness=3, **own("sampler", "Alternates")), num_steps=3)
    driver.finish_groups(4)
    before = driver.core.snapshot()
    driver.take(0)
    assert b"taken" in before
    assert driver.core.snapshot() != before
    other = resumed(driver, driver.core.snapshot())
    for each in (driver, other):
        each.publish(1)
        each.commit(0)
        each.finish_groups(2)
        each.take(1)
    assert taken(driver) == [(3, 2), (0, 1)]
    assert taken(other) == [(0, 1)]


# --- they do not fit ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (own("limiter", "Limits", most=1), r"Limits.max_tickets\(\) gave 1; a batch needs at least 2 groups"),
        (own("limiter", "Limits", most=-1), r"gave -1"),
        (own("sampler", "Picks", worst=2), r"Picks.worst_staleness\(\) gave 2; .* to max_staleness \(1\)"),
        (own("sampler", "Picks", worst=-1), r"gave -1"),
        (own("sampler", "Removes"), "table.sampler.use = .* needs the method 'pick'"),
        (own("limiter", "Picks"), "table.limiter.use = .* needs the method 'max_tickets'"),
        (own("remover", "Picks"), "table.remover.use = .* needs the method 'remove'"),
        (own("sampler", "Forgets"), "table.sampler.use = .* needs the method 'state'"),
        (own("remover", "Removes", cass=""), 'cass is not an argument; did you mean "case"'),
        (own("remover", "Remove"), "no 'Remove' in"),
        (own("sampler", "leaves"), "its constructor raised SystemExit: bye"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_by_name(parts: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Core(make_core_plan(table=make_table(**parts)))


# --- they fail ------------------------------------------------------------------------------------

FAILURES: list[tuple[str, Callable[[], Any], str]] = [
    ("Limits.tickets()", leaves, "raised SystemExit: bye"),
    ("Limits.tickets()", raises, "raised KeyError: 'lost'"),
    ("Limits.tickets()", lambda: -1, "gave -1; it is a number from 0 to max_tickets() (4)"),
    ("Limits.tickets()", lambda: 5, "gave 5; it is"),
    ("Limits.tickets()", lambda: 2.5, "gave 2.5; it is"),
    ("Limits.tickets()", lambda: None, "gave None; it is"),
    ("Picks.pick()", is_interrupted, "raised KeyboardInterrupt ("),
    ("Picks.pick()", lambda: [0, 99], "gave group 99, which is not ready"),
    ("Picks.pick()", lambda: [-1, 0], "gave group -1, which is not ready"),
    ("Picks.pick()", lambda: [0, 0], "gave group 0 twice"),
    ("Picks.pick()", lambda: [0], "gave 1 groups; a batch holds 2"),
    (
        "Picks.pick()",
        lambda: ["0", "1"],
        "raised TypeError: 'str' object cannot be interpreted as an integer",
    ),
    ("Picks.pick()", lambda: 7, "raised TypeError: 'int' object is not iterable"),
    ("Removes.remove()", leaves, "raised SystemExit: bye"),
    ("Removes.remove()", lambda: [99], "gave group 99, which is not ready"),
    ("Removes.remove()", lambda: [0, 1], "gave 2 of 3 groups; a batch of 2 must stay"),
    ("Removes.remove()", lambda: None, "raised TypeError: 'NoneType' object is not iterable"),
]


@pytest.mark.parametrize(("method", "answer", "message"), FAILURES)
def test_a_part_that_fails_ends_the_run_with_its_name_and_leaves_the_core_whole(
    method: str, answer: Callable[[], Any], message: str
):
    name = method.partition(".")[0]
    kind = {"Limits": "limiter", "Picks": "sampler", "Removes": "remover"}[name]
    ANSWERS["now"] = answer
    driver = started(make_table(max_staleness=1, **own(kind, name, case="now")))
    for lease in driver.lease(6):
        driver.finish(lease)
    for lease in driver.lease(6):
        driver.finish(lease)
    if driver.core.state == "running":
        assert driver.take(0) is None
    assert driver.core.state == "failed"
    assert f"policy 'actor': {kind} {__name__}:{name}" in driver.core.reason
    assert method in driver.core.reason
    assert message in driver.core.reason
    counts = driver.fates()
    assert (counts.live, counts.cancelled) == (0, counts.drawn)
    replayed_alike(driver)


@pytest.mark.parametrize("name", ["Vandal", "Ages"])
def test_a_sampler_cannot_change_what_it_is_shown(name: str):
    driver = started(make_table(**own("sampler", name)))
    driver.finish_groups(2)
    assert driver.take(0) is None
    assert driver.core.state == "failed"
    assert f"sampler {__name__}:{name}.pick() raised" in driver.core.reason
    assert driver.fates().drawn == driver.fates().cancelled == 2


def test_a_component_that_fails_to_observe_a_batch_ends_the_run():
    driver = started(make_table(**own("sampler", "Alternates", case="observe")))
    driver.finish_groups(2)
    assert driver.take(0) is None
    assert "Alternates.observe() raised SystemExit: bye (" in driver.core.reason
    assert driver.core.reason.endswith('in observe: sys.exit("bye"))')
    assert driver.fates().cancelled == 2
    replayed_alike(driver)


def test_a_component_that_cannot_return_its_state_is_named_and_a_failed_run_is_kept_without_it():

    driver = started(make_table(**own("sampler", "Alternates", case="state")))
    with pytest.raises(ComponentError, match=r"Alternates.state\(\) raised SystemExit: bye"):
        driver.core.snapshot()
    driver.apply(StopRun(reason="it cannot be kept", is_failure=True))
    assert resumed(driver, driver.core.snapshot()).core.reason == "it cannot be kept"


def test_a_component_that_cannot_restore_its_state_is_named():

    driver = started(make_table(**own("sampler", "Alternates", case="restore")))
    with pytest.raises(ComponentError, match=r"Alternates.restore\(\) raised KeyError: 'lost'"):
        Core.from_snapshot(driver.plan, driver.core.snapshot())


def replayed_alike(driver: Driver) -> None:
    """The journal's commands lead to the same events again."""
    other = Core(driver.plan)
    for command, at_s, events in driver.commands:
        assert other.apply(command, at_s).events == events


# --- nothing can go on ----------------------------------------------------------------------------


def test_a_limiter_that_lets_too_few_groups_for_a_batch_be_drawn_is_an_error_not_a_wait():
    driver = started(make_table(**own("limiter", "Limits", num=1)))
    assert driver.take(0) is None
    driver.finish_groups(1)
    assert driver.core.state == "running"
    assert driver.take(0) is None
    assert driver.core.state == "failed"
    for part in ("will never get its batch of step 1", "1 groups are ready", "all 1 tickets", "sampler fifo"):
        assert part in driver.core.reason


def test_a_sampler_that_takes_nothing_is_an_error_not_a_wait():
    ANSWERS["never"] = lambda: None
    driver = started(make_table(max_staleness=0, **own("sampler", "Picks", case="never", worst=0)))
    driver.lease(2)
    assert driver.take(0) is None
    assert driver.core.state == "running"
    for lease in (*driver.out.values(), *driver.lease(2)):
        driver.finish(lease)
    assert driver.take(0) is None
    assert driver.core.state == "failed"
    assert f"the sampler {__name__}:Picks takes none" in driver.core.reason
