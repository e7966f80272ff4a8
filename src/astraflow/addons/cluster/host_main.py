"""The program of a host, which ssh or a scheduler starts on another machine to hold one process of a run.

    listen: carries out the launcher's messages, and returns when the launcher is gone or silent
    report: sends the state and the output of the process, until the process has ended

When one of the two returns, the other one is canceled, the process is ended, and this program ends. A
scheduler or the system sends SIGTERM when it takes the machine away. The signal is passed to the process,
which drains; its end then doesn't count as a crash. The program's stdin and stdout belong to the launcher, so
everything that is printed here goes to stderr.
"""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import msgspec

import astraflow
from astraflow.addons.cluster.host_frames import (
    MARK,
    FromHost,
    Hello,
    ProcessReport,
    Signal,
    SilenceReport,
    SilenceWatch,
    Start,
    StartConfirmation,
    StartRefusal,
    ToHost,
    encode_frame,
    read_frame,
)
from astraflow.addons.cluster.process_host import ProcessHost
from astraflow.addons.experiments.cores import num_cores
from astraflow.errors import ConfigError, Error
from astraflow.service.memory import limit_bytes

__all__ = ["hello", "serve"]

_log = logging.getLogger(__name__)

_LAUNCHER_SILENT_S = 30.0
"""Time without a message after which the launcher counts as gone. It sends one every few seconds."""
_END_GRACE_S = 5.0
"""Time for the process to drain after the launcher is gone."""
_MAX_TEXT = 2_000
"""Largest number of characters of an error that is sent to the launcher."""
_DECODER = msgspec.msgpack.Decoder(ToHost)


class _Link:
    """The host's end of the link to its launcher."""

    def __init__(self, incoming: asyncio.StreamReader, outgoing: asyncio.StreamWriter) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    async def receive(self) -> ToHost:
        async with asyncio.timeout(_LAUNCHER_SILENT_S):
            return await read_frame(self._incoming, _DECODER)

    async def send(self, message: FromHost) -> None:
        self._outgoing.write(encode_frame(message))
        await self._outgoing.drain()


def hello() -> Hello:
    """Describes this machine."""
    return Hello(
        # In Slurm, the name of a node may differ from its host name.
        hostname=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        version=astraflow.__version__,
        cpus=num_cores(),
        gpus=len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]),
        memory_bytes=float(limit_bytes()),
        free_disk_bytes=float(shutil.disk_usage(tempfile.gettempdir()).free),
        now_s=time.time(),
        caller=(os.environ.get("SSH_CONNECTION", "").split() or [""])[0],
    )


async def serve(incoming: asyncio.StreamReader, outgoing: asyncio.StreamWriter) -> None:
    """Holds one process, from the launcher's `Start` until the process or the launcher ends."""
    link = _Link(incoming, outgoing)
    outgoing.write(MARK)
    host = ProcessHost()
    # If the launcher is gone, nobody would read an answer.
    with contextlib.suppress(EOFError, ConnectionError, TimeoutError):
        try:
            await link.send(hello())
            message = await link.receive()
            if isinstance(message, Start):
                await _hold(host, link, message)
        finally:
            await host.clean()


async def _hold(host: ProcessHost, link: _Link, start: Start) -> None:
    files = {Path(path): content for path, content in start.files.items()}
    try:
        pid = await host.start(start.spec, files, start.version)
    except (Error, OSError) as err:
        await link.send(StartRefusal(text=str(err)[:_MAX_TEXT], is_final=isinstance(err, ConfigError)))
        return
    evicted = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, _evict, host, evicted)
    try:
        await link.send(StartConfirmation(pid=pid))
        tasks = [
            asyncio.create_task(_report(host, link, evicted)),
            asyncio.create_task(_listen(host, link)),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                _log.warning("the launcher is gone: %r", result)
    finally:
        await host.end(_END_GRACE_S)
        loop.remove_signal_handler(signal.SIGTERM)


def _evict(host: ProcessHost, evicted: asyncio.Event) -> None:
    evicted.set()
    host.terminate_now()


async def _report(host: ProcessHost, link: _Link, evicted: asyncio.Event) -> None:
    """Sends reports until the process has ended and all of its output was sent."""
    offset = 0
    code = None
    while code is None:
        news = await host.news(offset)
        offset += len(news.log)
        code = news.code
        report = ProcessReport(
            log=news.log,
            silent_s=news.life.silent_s,
            works=news.life.works,
            condition=news.life.condition,
            code=code,
            is_evicted=evicted.is_set(),
        )
        await link.send(report)


async def _listen(host: ProcessHost, link: _Link) -> None:
    """Carries out messages; ends by an exception when the launcher is gone or silent."""
    async with asyncio.TaskGroup() as group:
        while True:
            message = await link.receive()
            match message:
                case Signal(verb="terminate"):
                    host.terminate_now()
                case Signal():
                    await host.kill()
                case SilenceWatch(longest_s=longest_s):
                    group.create_task(_report_silence(host, link, longest_s))
                case _:
                    pass


async def _report_silence(host: ProcessHost, link: _Link, longest_s: float) -> None:
    await link.send(SilenceReport(text=await host.silence(longest_s)))


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing when a signal arrives."""


async def _main() -> None:
    loop = asyncio.get_running_loop()
    # Text that libraries print must not get between two frames.
    out_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    incoming = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(incoming), sys.stdin.buffer)
    pipe = os.fdopen(out_fd, "wb", buffering=0)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
    await serve(incoming, asyncio.StreamWriter(transport, protocol, None, loop))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP):
        # Only the launcher, or its absence, ends the process. Unlike SIG_IGN, child processes don't inherit a
        # handler.
        signal.signal(number, _ignore)
    asyncio.run(_main())
