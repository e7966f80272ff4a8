"""What every process on another machine does, whatever brings its news."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from astraflow.addons.cluster.remote_process import KILLED, RemoteProcess, Verb
from astraflow.protocols import MACHINE_LOST, ProcessLife
from drivers.virtual_loop import run_virtual


class Far(RemoteProcess):
    """One whose news are what a test puts in: an exit code, an error, or how it is."""

    def __init__(self, folder: Path) -> None:
        super().__init__("machine far", pid=7, log_path=folder / "far.log")
        self.news: asyncio.Queue[int | Exception | ProcessLife] = asyncio.Queue()
        self.signals: list[Verb] = []
        self.num_release = 0

    async def silence(self, longest_s: float) -> str:
        raise NotImplementedError

    async def _follow_news(self) -> int:
        while isinstance(news := await self.news.get(), ProcessLife):
            self._note_life(news)
        if isinstance(news, Exception):
            raise news
        return news

    def _signal(self, verb: Verb) -> None:
        self.signals.append(verb)

    def _release(self) -> None:
        self.num_release += 1


def follow(folder: Path, test: Callable[[Far], Awaitable[None]]) -> None:
    async def main() -> None:
        await test(Far(folder))

    run_virtual(main())


def test_all_who_wait_learn_how_it_ended_and_it_is_let_go_once(tmp_path: Path) -> None:
    async def test(process: Far) -> None:
        process.news.put_nowait(MACHINE_LOST)
        assert await asyncio.gather(process.wait(), process.wait()) == [MACHINE_LOST, MACHINE_LOST]
        process.terminate()
        process.kill()
        await asyncio.sleep(10.0)
        assert (process.num_release, process.signals) == (1, [])

    follow(tmp_path, test)
    assert (tmp_path / "far.log").read_text() == "--- on machine far\n"


def test_an_error_while_it_is_followed_counts_as_a_crash(tmp_path: Path) -> None:
    async def test(process: Far) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        process.news.put_nowait(RuntimeError("a bug of the launcher"))
        assert await process.wait() == KILLED  # as a lost machine it would start again for ever
        assert process.num_release == 1

    follow(tmp_path, test)


def test_a_kill_that_nobody_answers_ends_what_holds_the_process(tmp_path: Path) -> None:
    async def test(process: Far) -> None:
        process.kill()
        assert (process.signals, process.num_release) == (["kill"], 0)
        assert await process.wait() == KILLED
        assert process.num_release == 1

    follow(tmp_path, test)


def test_a_machine_that_tells_nothing_is_named_until_it_tells_something(tmp_path: Path) -> None:
    async def test(process: Far) -> None:
        process.news.put_nowait(ProcessLife(1.0, condition="it is stopped"))
        await asyncio.sleep(1.0)
        assert process.life() == ProcessLife(1.0, condition="on machine far: it is stopped")
        await asyncio.sleep(9.0)
        silent = ProcessLife(11.0, works=False, condition="its machine far does not answer")
        assert process.life() == silent
        process.news.put_nowait(ProcessLife(0.5))
        await asyncio.sleep(1.0)
        assert process.life() == ProcessLife(0.5)

    follow(tmp_path, test)


def test_a_full_disk_does_not_lose_the_process(tmp_path: Path) -> None:
    async def test(process: Far) -> None:
        process.news.put_nowait(0)
        assert await process.wait() == 0

    follow(tmp_path / "is_no_folder", test)
