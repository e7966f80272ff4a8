"""The dataflow's process: what it gives back when its end goes wrong."""

import asyncio
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from astraflow.errors import JournalError, UnavailableError
from astraflow.processes.dataflow_process import run_dataflow
from astraflow.recipe.run_folder import RunFolder
from astraflow.service.client import ServiceClient
from astraflow.types import Item, StopRequest
from drivers.recipe_builders import make_digit_model, make_digit_recipe


@contextmanager
def full_disk() -> Iterator[None]:
    """The kernel lets no file grow: writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


async def test_a_journal_that_cannot_be_closed_leaves_no_open_port(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.save_recipe(make_digit_recipe(tmp_path, make_digit_model(tmp_path / "model")))
    stop = asyncio.Event()
    url = f"http://127.0.0.1:{unused_tcp_port}"
    serving = asyncio.create_task(run_dataflow(stop, folder.path, port=unused_tcp_port))
    await call(url, "GET", "/v1/status", patience_s=60.0)
    with full_disk():
        with pytest.raises(UnavailableError, match="cannot be written"):
            await call(url, "POST", "/v1/stop", body=StopRequest(reason="enough"))
        stop.set()
        with pytest.raises(JournalError, match="cannot be written"):
            await serving
    with pytest.raises(UnavailableError, match="Cannot connect"):
        await call(url, "GET", "/v1/status")


async def call(
    url: str, method: str, path: str, *, body: Item | None = None, patience_s: float = 0.0
) -> None:
    """Makes a request of which only the success matters."""
    client = ServiceClient(url, patience_s=patience_s)
    try:
        await client.call(method, path, None, body=body)
    finally:
        await client.close()
