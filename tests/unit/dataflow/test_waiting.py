import asyncio

from astraflow.dataflow.waiting import Topics, WaitList, waited
from astraflow.types import Wait


async def test_a_wake_up_between_the_look_and_the_wait_is_not_missed() -> None:
    topics = Topics()
    event = topics.next("leases")
    topics.wake(["leases"])
    assert await waited(event, asyncio.get_running_loop().time() + 1)
    assert topics.next("leases") is not event


async def test_other_topics_do_not_wake() -> None:
    topics = Topics()
    event = topics.next("leases")
    topics.wake(["batch/actor", "evals"])
    assert not await waited(event, asyncio.get_running_loop().time())
    topics.wake_all()
    assert await waited(event, float("inf"))


async def test_news_for_one_wakes_nobody_else() -> None:
    topics = Topics()
    mine, other = topics.next("leases", "w1"), topics.next("leases", "w2")
    topics.wake_one("leases", "w1")
    topics.wake_one("evals", "w1")
    assert (mine.is_set(), other.is_set()) == (True, False)
    topics.wake(["leases"])
    assert other.is_set()


def test_waits_are_listed_while_they_last_longest_first() -> None:
    waits = WaitList()
    late = Wait(who="b", whom="x", what="", since_s=2.0)
    early = Wait(who="a", whom="x", what="", since_s=1.0)
    with waits.entry(late), waits.entry(early):
        assert waits.current() == (early, late)
    assert waits.current() == ()
