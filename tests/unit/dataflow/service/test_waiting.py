import asyncio
import random
from collections import deque
from collections.abc import Callable

import pytest

from astraflow.dataflow.service.waiting import LeaseQueue, Topics, WaitList, wait_until
from astraflow.errors import RefusedError
from astraflow.types import Party, Wait


def service(name: str) -> Party:
    return Party(kind="service", name=name)


async def test_a_wake_up_between_the_look_and_the_wait_is_not_missed() -> None:
    topics = Topics()
    event = topics.next("batch/actor")
    topics.wake(["batch/actor"])
    assert await wait_until(event, asyncio.get_running_loop().time() + 1)
    assert topics.next("batch/actor") is not event


async def test_other_topics_do_not_wake() -> None:
    topics = Topics()
    event = topics.next("versions/actor")
    topics.wake(["batch/actor", "evals"])
    assert not await wait_until(event, asyncio.get_running_loop().time())
    topics.wake_all()
    assert await wait_until(event, float("inf"))


def test_waits_are_listed_while_they_last_longest_first() -> None:
    waits, whom = WaitList(), ["x"]
    late = Wait(who=service("b"), whom=service("x"), since_s=2.0)
    with (
        waits.entry(lambda: late),
        waits.entry(lambda: Wait(who=service("a"), whom=service(whom[0]), since_s=1.0)),
    ):
        whom[0] = "y"
        assert [(wait.who.name, wait.whom.name) for wait in waits.current()] == [("a", "y"), ("b", "x")]
    assert waits.current() == ()


# --- the queue ------------------------------------------------------------------------------------


class Work:
    """Pieces of work that only services of some kinds can do; counts who looked."""

    def __init__(self) -> None:
        self.queue = LeaseQueue()
        self.pieces: deque[tuple[int, frozenset[str]]] = deque()
        self.num_looks = 0
        self.got: dict[str, list[int]] = {}
        self.num_pieces = 0

    def add(self, *kinds: str, num: int = 1) -> None:
        for _ in range(num):
            self.pieces.append((self.num_pieces, frozenset(kinds)))
            self.num_pieces += 1
        self.queue.wake()

    def look(self, kind: str) -> int | None:
        self.num_looks += 1
        for idx, (piece, kinds) in enumerate(self.pieces):
            if kind in kinds:
                del self.pieces[idx]
                return piece
        return None

    def wait(self, name: str, kind: str = "a") -> "asyncio.Task[None]":
        """A waiter that takes one piece; it looks itself before it waits, as the dispatcher does."""

        async def waiting() -> None:
            look: Callable[[], int | None] = lambda: self.look(kind)  # noqa: E731
            self.queue.serve_if_due()
            found = look()
            if found is None:
                with self.queue.waiter(name, kind, look) as waiter:
                    try:
                        await waiter.event.wait()
                    finally:
                        found = waiter.result()
                        if found is not None:  # also by who is gone by then: its lease will expire
                            self.got.setdefault(name, []).append(found)
                return
            self.got.setdefault(name, []).append(found)

        return asyncio.get_running_loop().create_task(waiting())


async def turns() -> None:
    """Lets everything that is due happen."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_piece_of_work_wakes_one_of_500() -> None:
    work = Work()
    tasks = [work.wait(f"w{idx}") for idx in range(500)]
    await turns()
    work.num_looks = 0
    work.add("a")
    await turns()
    assert work.got == {"w0": [0]}
    assert work.num_looks == 2  # its own, and one that found nothing more
    assert [task.done() for task in tasks] == [True] + [False] * 499
    work.add("a", num=3)
    await turns()
    assert work.got == {"w0": [0], "w1": [1], "w2": [2], "w3": [3]}
    for task in tasks:
        task.cancel()


async def test_a_wake_up_without_work_costs_one_look_a_kind() -> None:
    work = Work()
    tasks = [work.wait(f"w{idx}", "ab"[idx % 2]) for idx in range(100)]
    await turns()
    work.num_looks = 0
    work.queue.wake()
    work.queue.wake()
    await turns()
    assert work.num_looks == 2
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()


async def test_work_that_the_first_in_line_cannot_do_goes_to_the_next_that_can() -> None:
    work = Work()
    tasks = [work.wait("w0", "a"), work.wait("w1", "a"), work.wait("w2", "b"), work.wait("w3", "a")]
    await turns()
    work.add("b")
    work.add("a", "b")
    await turns()
    assert work.got == {"w2": [0], "w0": [1]}
    for task in tasks:
        task.cancel()


async def test_a_waiter_that_leaves_or_is_stirred_takes_no_work_with_it() -> None:
    work = Work()
    tasks = [work.wait(f"w{idx}") for idx in range(4)]
    await turns()
    tasks[0].cancel()
    work.queue.recheck("w1")
    work.add("a")
    await turns()
    assert work.got == {"w2": [0]}
    assert tasks[1].done()
    work.queue.recheck()
    await turns()
    assert tasks[3].done()


async def test_who_asks_again_keeps_its_turn_and_newcomers_come_after_what_is_due() -> None:
    queue, work = LeaseQueue(), deque([1])
    first, second = queue.new_number(), queue.new_number()
    look: Callable[[], int | None] = lambda: work.popleft() if work else None  # noqa: E731
    with (
        queue.waiter("w1", "a", look, number=second) as late,
        queue.waiter("w0", "a", look, number=first) as early,
    ):
        queue.wake()
        queue.serve_if_due()
        assert (early.result(), late.result()) == (1, None)
        queue.serve_if_due()  # nothing is due: nobody is asked
        assert not late.event.is_set()


async def test_a_refusal_reaches_its_waiter_and_the_next_is_served() -> None:
    queue = LeaseQueue()

    def refuse() -> int:
        raise RefusedError("register again", code="unknown_worker")

    with queue.waiter("w0", "a", refuse) as gone, queue.waiter("w1", "a", lambda: 7) as there:
        queue.wake()
        await turns()
        assert there.result() == 7
        with pytest.raises(RefusedError, match="register again"):
            gone.result()


@pytest.mark.parametrize("seed", range(20))
async def test_no_work_is_left_while_somebody_waits_who_could_do_it(seed: int) -> None:
    rng, work = random.Random(seed), Work()
    waiting: dict[str, tuple[str, asyncio.Task[None]]] = {}
    for number in range(300):
        match rng.choice(["wait", "wait", "add", "leave", "stir", "turn"]):
            case "wait":
                kind = rng.choice("abc")
                waiting[f"w{number}"] = (kind, work.wait(f"w{number}", kind))
            case "add":
                work.add(*rng.sample("abc", rng.randint(1, 3)), num=rng.randint(1, 3))
            case "leave" if waiting:
                waiting.pop(rng.choice(sorted(waiting)))[1].cancel()
            case "stir" if waiting:
                work.queue.recheck(rng.choice(sorted(waiting)))
            case _:
                await turns()
        if rng.random() < 0.3:
            await turns()
            waiting = {name: entry for name, entry in waiting.items() if not entry[1].done()}
            able = {kind for kind, _ in waiting.values()}
            assert not [kinds for _, kinds in work.pieces if kinds & able]
    got = sorted(piece for pieces in work.got.values() for piece in pieces)
    assert sorted([*got, *(piece for piece, _ in work.pieces)]) == list(range(work.num_pieces))
    for _, task in waiting.values():
        task.cancel()
