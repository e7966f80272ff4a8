"""The way out of a box, over real sockets."""

import asyncio
import contextlib
import gc
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from astraflow.addons.sandbox.passage import passage


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    """What nobody closes stays open."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.parametrize("num_steps", range(8))
async def test_a_connection_that_comes_as_the_passage_ends_is_closed(num_steps: int) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as gateway,
    ):
        async with passage(listener, gateway.getsockname()[1]):
            await asyncio.sleep(0)  # it listens
            caller = socket.create_connection(listener.getsockname())
            for _ in range(num_steps):
                await asyncio.sleep(0)
        listener.close()  # resets a connection that was not accepted
        with caller:
            caller.settimeout(5.0)
            with contextlib.suppress(ConnectionResetError):
                assert caller.recv(1) == b""


async def test_a_passage_goes_on_after_too_many_files_were_open() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as gateway,
        socket.socket() as caller,
    ):
        async with passage(listener, gateway.getsockname()[1]):
            await asyncio.sleep(0.05)  # it listens
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
            try:
                await asyncio.to_thread(caller.connect, listener.getsockname())
                await asyncio.sleep(0.5)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            caller.sendall(b"through")
            passed, _ = await asyncio.to_thread(gateway.accept)
            with passed:
                passed.settimeout(5.0)
                assert await asyncio.to_thread(passed.recv, 20) == b"through"
