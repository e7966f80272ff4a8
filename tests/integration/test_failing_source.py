"""A source of tasks that fails, calls `exit()` or gives something else: the run ends with the reason, and
goes on once the source is mended."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.addons.view.sample_episodes import load_transcripts
from astraflow.dataflow.audit import audit
from astraflow.types import Task
from drivers.dataflow_driver import ListSource, ScriptedTrainer, ScriptedWorker, play_run, running


class TroubledSource(ListSource):
    """Has 50 tasks, and trouble with each."""

    def __init__(self, trouble: Callable[[int], Task]) -> None:
        super().__init__("sums", 50)
        self._trouble = trouble

    def task(self, idx: int) -> Task:
        return self._trouble(idx)


def leaves(idx: int) -> Task:
    sys.exit(0)


def is_interrupted(idx: int) -> Task:
    raise KeyboardInterrupt


def raises(idx: int) -> Task:
    return {}[idx]


def gives_text(idx: int) -> Task:
    return "2 + 3 ="  # pyright: ignore[reportReturnType] - the mistake


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (leaves, "raised SystemExit: 0"),
        (is_interrupted, "raised KeyboardInterrupt: "),
        (raises, "raised KeyError: "),
        (gives_text, "is a str, but must be a Task"),
    ],
)
async def test_a_source_that_fails_ends_the_run_which_goes_on_when_it_is_mended(
    tmp_path: Path, trouble: Callable[[int], Task], reason: str
) -> None:
    async with running(tmp_path, train=TroubledSource(trouble)) as run:
        await ScriptedTrainer(run.client).attach()
        worker = ScriptedWorker(run.client)
        await worker.register()
        assert await worker.lease() == ()
        assert run.service.state == "failed"
        status = await run.client.status()
        assert "tasks.sources.sums: task " in status.reason
        assert reason in status.reason
        assert not run.service.fatal.is_set()
    async with running(tmp_path, resumes_failed=True) as run:
        await play_run(run)
        assert run.service.state == "finished"
    assert audit(tmp_path).ok


async def test_a_source_that_cannot_read_now_is_asked_again(tmp_path: Path) -> None:
    sums, errors = ListSource("sums", 50), [OSError("the network share does not answer")]

    def cannot_read_once(idx: int) -> Task:
        if errors:
            raise errors.pop()
        return sums.task(idx)

    async with running(tmp_path, train=TroubledSource(cannot_read_once)) as run:
        await ScriptedTrainer(run.client).attach()
        worker = ScriptedWorker(run.client)
        await worker.register()
        assert [lease.task.source for lease in await worker.lease(2)] == ["sums", "sums"]
        assert (errors, run.service.state) == ([], "running")


@pytest.mark.parametrize("error", [KeyError("gone"), OSError("the network share does not answer")])
async def test_results_are_accepted_though_their_source_has_failed_since(
    tmp_path: Path, error: Exception
) -> None:
    sums, errors = ListSource("sums", 50), list[Exception]()

    def fails_later(idx: int) -> Task:
        if errors:
            raise errors[0]
        return sums.task(idx)

    async with running(tmp_path, train=TroubledSource(fails_later)) as run:
        await ScriptedTrainer(run.client).attach()
        worker = ScriptedWorker(run.client)
        await worker.register()
        leases = await worker.lease(2)
        assert {lease.group_id for lease in leases} == {0}, "the group whose messages are stored"
        errors.append(error)
        receipts = await worker.send(*[await worker.answer(lease) for lease in leases])
        assert [receipt.status for receipt in receipts.receipts] == ["accepted", "accepted"]
    assert [row.task_id for row, _ in load_transcripts(tmp_path, "train")] == ["", ""]
