import asyncio

from astraflow.rollout.deadlines import Deadlines


async def _sleep(deadlines: Deadlines, seconds: float) -> str:
    timeout = deadlines.begin()
    try:
        async with timeout:
            await asyncio.sleep(seconds)
    except TimeoutError:
        return "late"
    finally:
        deadlines.end(timeout)
    return "in time"


async def test_each_ends_by_its_own_deadline_whenever_it_began() -> None:
    deadlines, loop = Deadlines(0.2), asyncio.get_running_loop()
    first = asyncio.create_task(_sleep(deadlines, 60))
    quick = asyncio.create_task(_sleep(deadlines, 0.01))
    assert await quick == "in time"
    await asyncio.sleep(0.1)
    began_s = loop.time()
    second = asyncio.create_task(_sleep(deadlines, 60))
    assert await first == "late"
    assert not second.done()
    assert await second == "late"
    assert loop.time() - began_s > 0.19


async def test_deadlines_serve_again_after_all_have_ended() -> None:
    deadlines = Deadlines(0.05)
    for _ in range(2):
        assert await asyncio.gather(*(_sleep(deadlines, 60) for _ in range(3))) == ["late"] * 3
        assert await _sleep(deadlines, 0.0) == "in time"


def test_deadlines_serve_one_event_loop_after_another() -> None:
    deadlines = Deadlines(0.05)
    for _ in range(2):
        assert asyncio.run(_sleep(deadlines, 0.0)) == "in time"
        assert asyncio.run(_sleep(deadlines, 60)) == "late"


async def test_a_cancelled_one_stays_cancelled() -> None:
    task = asyncio.create_task(_sleep(Deadlines(60.0), 60))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
