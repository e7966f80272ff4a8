"""Handles of processes on other machines, each behind a link to the host that holds the process.

follow: as in `RemoteProcess`; the news are the host's messages
beat:   tells the host every few seconds that the launcher is alive
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import astraflow
from astraflow.addons.cluster.host_frames import (
    Hello,
    KeepAlive,
    ProcessReport,
    Signal,
    SilenceReport,
    SilenceWatch,
    Start,
    StartConfirmation,
    StartRefusal,
)
from astraflow.addons.cluster.host_link import HostLink, LinkLostError
from astraflow.addons.cluster.remote_process import KILLED, RemoteProcess, Verb
from astraflow.errors import ConfigError
from astraflow.protocols import MACHINE_LOST, ProcessSpec

__all__ = ["PipedProcess", "PipedProcesses", "receive_hello"]

_log = logging.getLogger(__name__)

_ANSWER_S = 30.0
"""Time for a host to answer. Before its first answer, it imports what it needs."""
_BEAT_EVERY_S = 5.0
"""Time between two signs of life of the launcher. A host waits six times as long."""
_LOST_AFTER_S = 30.0
"""Time without a message after which a host counts as lost, even if its link is still open."""


async def receive_hello(link: HostLink, *, patience_s: float = _ANSWER_S) -> Hello:
    """Receives the description of the machine at the other end of a new link. Raises: LinkLostError.

    `patience_s`: infinite for a link that may wait for a machine, such as that of a queued job.
    """
    try:
        async with asyncio.timeout(None if math.isinf(patience_s) else patience_s):
            return await link.hello()
    except TimeoutError as err:
        raise LinkLostError(f"no answer within {patience_s:.0f} s", None) from err


async def _start_process(link: HostLink, machine: str, spec: ProcessSpec, files: Mapping[Path, bytes]) -> int:
    """Starts a process over a link whose `Hello` was received. Returns: its process id.

    Raises: LinkLostError if the link ends, or if this machine can't start the process now, though another one
    may; ConfigError if no attempt can succeed.
    """
    link.send(Start.of(spec, files, version=astraflow.__version__))
    try:
        async with asyncio.timeout(_ANSWER_S):
            answer = await link.receive()
    except TimeoutError as err:
        raise LinkLostError(f"no answer within {_ANSWER_S:.0f} s", None) from err
    if isinstance(answer, StartConfirmation):
        _log.info("%s runs on %s (process %d there)", spec.name, machine, answer.pid)
        return answer.pid
    text = answer.text if isinstance(answer, StartRefusal) else f"it answered with {type(answer).__name__}"
    if isinstance(answer, StartRefusal) and answer.is_final:
        raise ConfigError(f"{spec.name} on {machine}: {text}")
    raise LinkLostError(text, None)


class PipedProcess(RemoteProcess):
    """Implements `ProcessHandle` and `LifeReporter`.

    `machine`: its name in messages. `on_end` is called once, when the process has ended or is lost.
    """

    # size: what a handle is made of
    def __init__(
        self, link: HostLink, machine: str, *, pid: int, log_path: Path, on_end: Callable[[], None]
    ) -> None:
        super().__init__(f"machine {machine}", pid=pid, log_path=log_path)
        self._link = link
        self._on_end = on_end
        self._silent: asyncio.Future[str] = self._loop.create_future()
        self._beats = asyncio.create_task(self._beat(), name=f"beat:{log_path.stem}")

    def abandon(self) -> None:
        """Closes the link immediately. The host then ends the process."""
        self._end(KILLED)

    async def silence(self, longest_s: float) -> str:
        """See the protocol. If the host can't report the silence, it is lost, which ends `wait`."""
        self._link.send(SilenceWatch(longest_s=longest_s))
        return f"on {self._place}, {await asyncio.shield(self._silent)}"

    async def _follow_news(self) -> int:
        try:
            return await self._take_messages()
        except LinkLostError as err:
            why = str(err)
        except TimeoutError:
            why = f"no message for {_LOST_AFTER_S:.0f} s"
        self._write(f"--- its {self._place} is lost: {why}\n".encode())
        return MACHINE_LOST

    async def _take_messages(self) -> int:
        """Processes messages until the process has ended. Returns: the exit code. Raises: LinkLostError,
        TimeoutError."""
        while True:
            async with asyncio.timeout(_LOST_AFTER_S):
                message = await self._link.receive()
            if isinstance(message, SilenceReport) and not self._silent.done():
                self._silent.set_result(message.text)
            if not isinstance(message, ProcessReport):
                continue
            self._write(message.log)
            self._note_life(message.life)
            if message.code is not None:
                await self._link.finish()
                return MACHINE_LOST if message.is_evicted else message.code

    def _signal(self, verb: Verb) -> None:
        self._link.send(Signal(verb=verb))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_EVERY_S)
            self._link.send(KeepAlive())

    def _release(self) -> None:
        self._link.close()
        self._beats.cancel()
        self._on_end()


class PipedProcesses:
    """Starts processes over links, and owns those that run.

    Example: `process = await processes.start(link, spec, files, machine="gpu-1")`; `processes.close()` at the
    end.
    """

    def __init__(self) -> None:
        self._running: set[PipedProcess] = set()

    # size: a process, its files, and how its machine is reached
    async def start(
        self,
        link: HostLink,
        spec: ProcessSpec,
        files: Mapping[Path, bytes],
        *,
        machine: str = "",
        patience_s: float = _ANSWER_S,
        on_end: Callable[[], None] = lambda: None,
    ) -> PipedProcess:
        """Starts a process over a new link. If that fails, closes the link.

        `machine`: its name in messages; empty: the host name that the host reports. Raises: LinkLostError,
        ConfigError.
        """
        try:
            hello = await receive_hello(link, patience_s=patience_s)
            name = machine or hello.hostname
            pid = await _start_process(link, name, spec, files)
        except BaseException:
            link.close()
            raise

        def forget() -> None:
            self._running.discard(process)
            on_end()

        process = PipedProcess(link, name, pid=pid, log_path=spec.log_path, on_end=forget)
        self._running.add(process)
        return process

    def close(self) -> None:
        """Ends the processes that still run."""
        for process in tuple(self._running):
            process.abandon()
