"""`exit()` in what a workflow starts as a task: on both event loops, and where tasks start eagerly."""

import asyncio
import gc
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import EpisodeResult, Failure
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask, Workflow
from astraflow.workflows.single_turn import single_turn
from drivers.rollout_fakes import ScriptedEngine, exact, make_hosted, make_lease

_LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


async def leaves() -> None:
    await asyncio.sleep(0)
    sys.exit(3)


async def leaves_at_once() -> None:
    raise SystemExit


async def is_interrupted() -> None:
    raise KeyboardInterrupt


async def waits() -> None:
    await asyncio.Event().wait()


async def leaves_when_cancelled() -> None:
    try:
        await waits()
    finally:
        sys.exit("no time to lose")


async def in_a_group(task: ScoredTask, policies: Policies) -> Rewards:
    async with asyncio.TaskGroup() as group:
        group.create_task(waits())
        group.create_task(leaves())
    return Rewards()


async def in_a_task(task: ScoredTask, policies: Policies) -> Rewards:
    await asyncio.create_task(leaves_at_once(), name="mine")
    return Rewards()


async def in_a_task_of_a_task(task: ScoredTask, policies: Policies) -> Rewards:
    async def outer() -> None:
        await asyncio.gather(leaves())

    await asyncio.ensure_future(outer())
    return Rewards()


async def by_interrupt(task: ScoredTask, policies: Policies) -> Rewards:
    await asyncio.gather(is_interrupted())
    return Rewards()


async def when_cancelled(task: ScoredTask, policies: Policies) -> Rewards:
    work = asyncio.create_task(leaves_when_cancelled())
    await asyncio.sleep(0)
    work.cancel()
    await work
    return Rewards()


def in_loop(make_loop: Callable[[], asyncio.AbstractEventLoop], *workflows: Workflow) -> list[EpisodeResult]:
    """The results of one episode after the other, all in the same event loop."""

    async def run() -> list[EpisodeResult]:
        hosted = make_hosted("actor", ScriptedEngine("5"))
        return [
            await EpisodeRunner({"actor": hosted}, workflow, exact).run(make_lease(str(n)))
            for n, workflow in enumerate(workflows)
        ]

    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(run())


@pytest.mark.parametrize("make_loop", _LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        (in_a_group, "leaves, a task of the episode, raised SystemExit: 3"),
        (in_a_task, "leaves_at_once, a task of the episode, raised SystemExit: "),
        (in_a_task_of_a_task, "leaves, a task of the episode, raised SystemExit: 3"),
        (by_interrupt, "is_interrupted, a task of the episode, raised KeyboardInterrupt: "),
        (when_cancelled, "leaves_when_cancelled, a task of the episode, raised SystemExit: no time to lose"),
    ],
)
def test_an_exit_in_a_task_fails_its_episode_alone(make_loop: Any, workflow: Workflow, message: str) -> None:
    failed, good = in_loop(make_loop, workflow, single_turn)
    assert isinstance(failed.outcome, Failure)
    assert failed.outcome.error_class == "EpisodeExitError"
    assert message in failed.outcome.message
    assert not failed.outcome.is_retryable
    assert not isinstance(good.outcome, Failure)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks start eagerly from Python 3.12")
@pytest.mark.parametrize("make_loop", _LOOPS, ids=["asyncio", "uvloop"])
def test_an_exit_in_an_eager_task_fails_its_episode_alone(make_loop: Any) -> None:
    def eager_loop() -> asyncio.AbstractEventLoop:
        loop = make_loop()
        loop.set_task_factory(asyncio.eager_task_factory)
        return loop

    failed, good = in_loop(eager_loop, in_a_task, single_turn)
    assert isinstance(failed.outcome, Failure)
    assert failed.outcome.error_class == "EpisodeExitError"
    assert not isinstance(good.outcome, Failure)


def test_tasks_outside_of_episodes_are_left_to_the_former_factory() -> None:
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(work.__qualname__)
        return asyncio.Task(work, loop=loop, **options)

    def own_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_task_factory(factory)
        return loop

    async def run() -> None:
        hosted = make_hosted("actor", ScriptedEngine("5"))
        await EpisodeRunner({"actor": hosted}, in_a_task, exact).run(make_lease("1"))
        task = asyncio.create_task(asyncio.sleep(0))
        assert inspect.iscoroutine(task.get_coro())
        await task
        assert made[-2:] == ["leaves_at_once", "sleep"]

    with asyncio.Runner(loop_factory=own_loop) as runner:
        runner.run(run())


async def test_a_task_that_is_cancelled_before_it_starts_leaves_no_warning() -> None:
    async def cancels(task: ScoredTask, policies: Policies) -> Rewards:
        asyncio.create_task(waits()).cancel()
        await asyncio.sleep(0)
        return await single_turn(task, policies)

    runner = EpisodeRunner({"actor": make_hosted("actor", ScriptedEngine("5"))}, cancels, exact)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        await runner.episode(make_lease("1").task, seed=1)
        gc.collect()
    assert [str(warning.message) for warning in found] == []
