"""The viewer that starts when it is needed, with the real viewer process."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
from yarl import URL

from astraflow.addons.view.lazy_viewer import LazyViewer, startup_page
from astraflow.addons.view.viewer_page import PAGE_HEADERS, page_files
from drivers.left_over import command_of
from drivers.view_runs import RunWriter

pytestmark = pytest.mark.timeout(120)


def viewers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "astraflow.addons.view.process" in command_of(child)
    ]


def session_nice(pid: int) -> int | None:
    """The priority of a process's session; None where sessions have none (autogroups, sched(7))."""
    path = Path(f"/proc/{pid}/autogroup")
    return int(path.read_text().split()[-1]) if path.exists() else None


async def runs_at(url: str) -> list[str]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/api/runs") as reply:
        return [run["name"] for run in await reply.json()]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.setblocking(False)
        yield made


async def test_the_page_is_there_before_the_viewer(listener: socket.socket) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with startup_page(listener):
        silent = socket.create_connection(listener.getsockname())  # it keeps nobody waiting
        async with aiohttp.ClientSession() as session:
            for path, (media, content) in page_files().items():
                async with session.get(url + path) as reply:
                    assert reply.status == 200
                    assert reply.headers["content-type"] == media
                    assert PAGE_HEADERS.items() <= {k.lower(): v for k, v in reply.headers.items()}.items()
                    assert await reply.read() == content
            for path in ("/assets/../lazy_viewer.py", "/assets/index.html", "//example.org/api/"):
                async with session.get(URL(url + path, encoded=True), allow_redirects=False) as reply:
                    assert reply.status == 404
        silent.close()
    assert listener.fileno() >= 0  # it is left to the viewer


@asynccontextmanager
async def opened(run_dir: Path, log_path: Path) -> AsyncGenerator[LazyViewer]:
    viewer = LazyViewer(run_dir, log_path)
    await viewer.open(print)
    try:
        yield viewer
    finally:
        await viewer.close(0.0)


async def test_a_viewer_is_started_by_its_first_visitor_and_again_after_its_end(tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "run")
    run.group(0, [1.0])
    run.close()
    async with opened(tmp_path / "run", tmp_path / "logs" / "viewer.log") as viewer:
        url = viewer.url
        await asyncio.sleep(0)
        assert viewers() == []
        assert await runs_at(viewer.url) == ["run"]
        (first,) = viewers()
        os.kill(first.pid, signal.SIGKILL)
        assert await runs_at(viewer.url) == ["run"]
        (second,) = viewers()
        assert second.pid != first.pid
        assert second.nice() == 19
        assert session_nice(second.pid) in {None, 19}
    assert viewers() == []
    with pytest.raises(aiohttp.ClientConnectionError):
        await runs_at(url)


async def test_a_taken_port_is_no_obstacle(tmp_path: Path) -> None:
    async with (
        opened(tmp_path, tmp_path / "a.log") as one,
        opened(tmp_path, tmp_path / "b.log") as two,
    ):
        assert one.url != two.url
        assert one.url.startswith("http://127.0.0.1:")
