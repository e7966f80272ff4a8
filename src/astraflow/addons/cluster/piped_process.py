"""A process on another machine, as the launcher sees it: through the link to the host that holds it.

follow: see `RemoteProcess`; the news are the host's messages
beat:   tells the host every few seconds that the launcher lives
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import astraflow
from astraflow.addons.cluster.host_frames import (
    Hello,
    Refused,
    Signal,
    SilentFor,
    Start,
    Started,
    StillHere,
    Told,
    WatchSilence,
)
from astraflow.addons.cluster.host_link import HostLink, LinkLostError
from astraflow.addons.cluster.remote_process import KILLED, RemoteProcess, Verb
from astraflow.errors import ConfigError
from astraflow.protocols import MACHINE_LOST, ProcessSpec

__all__ = ["PipedProcess", "PipedProcesses", "asked"]

_log = logging.getLogger(__name__)

_ANSWER_S = 30.0
"""A host that has not answered after this time, in which it imports what it needs, is not reached."""
_BEAT_EVERY_S = 5.0
"""A host waits six times as long."""
_LOST_AFTER_S = 30.0
"""A host that has told nothing for this long is lost, though the link has not noticed."""


async def asked(link: HostLink, *, patience_s: float = _ANSWER_S) -> Hello:
    """What the machine at the other end of a new link has. `patience_s` is infinite if the link may wait for
    its machine. Raises: LinkLostError."""
    try:
        async with asyncio.timeout(None if math.isinf(patience_s) else patience_s):
            return await link.hello()
    except TimeoutError as err:
        raise LinkLostError(f"no answer within {patience_s:.0f} s", None) from err


async def _started(link: HostLink, machine: str, spec: ProcessSpec, files: Mapping[Path, bytes]) -> int:
    """The id of a process that is started over a link whose host has said hello.

    Raises: LinkLostError, also if the machine cannot start it now: another one may; ConfigError if it refuses
    the process for good.
    """
    link.tell(Start.of(spec, files, version=astraflow.__version__))
    try:
        async with asyncio.timeout(_ANSWER_S):
            answer = await link.receive()
    except TimeoutError as err:
        raise LinkLostError(f"no answer within {_ANSWER_S:.0f} s", None) from err
    if isinstance(answer, Started):
        _log.info("%s runs on %s (process %d there)", spec.name, machine, answer.pid)
        return answer.pid
    text = answer.text if isinstance(answer, Refused) else f"it answered with {type(answer).__name__}"
    if isinstance(answer, Refused) and answer.is_final:
        raise ConfigError(f"{spec.name} on {machine}: {text}")
    raise LinkLostError(text, None)


class PipedProcess(RemoteProcess):
    """Implements `ProcessHandle` and `LifeReporter`.

    `machine` is its name in messages. `on_end` is called once when the process has ended, or is lost.
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
        """Ends the link at once; the host ends the process."""
        self._end(KILLED)

    async def silence(self, longest_s: float) -> str:
        """As in the protocol. A host that cannot tell is lost, which ends `wait`."""
        self._link.tell(WatchSilence(longest_s=longest_s))
        return f"on {self._place}, {await asyncio.shield(self._silent)}"

    async def _last_news(self) -> int:
        try:
            return await self._take_messages()
        except LinkLostError as err:
            why = str(err)
        except TimeoutError:
            why = f"no word for {_LOST_AFTER_S:.0f} s"
        self._write(f"--- its {self._place} is lost: {why}\n".encode())
        return MACHINE_LOST

    async def _take_messages(self) -> int:
        """Takes messages until the process has ended; returns the exit code. Raises: LinkLostError,
        TimeoutError."""
        while True:
            async with asyncio.timeout(_LOST_AFTER_S):
                message = await self._link.receive()
            if isinstance(message, SilentFor) and not self._silent.done():
                self._silent.set_result(message.text)
            if not isinstance(message, Told):
                continue
            self._write(message.log)
            self._heard(message.life)
            if message.code is not None:
                await self._link.ended()
                return MACHINE_LOST if message.is_evicted else message.code

    def _signal(self, verb: Verb) -> None:
        self._link.tell(Signal(verb=verb))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_EVERY_S)
            self._link.tell(StillHere())

    def _let_go(self) -> None:
        self._link.close()
        self._beats.cancel()
        self._on_end()


class PipedProcesses:
    """The processes that one launcher has started over links.

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
        """Starts a process over a new link, which is closed if that fails.

        `machine` is its name in messages; empty: as it calls itself. Raises: LinkLostError, ConfigError.
        """
        try:
            hello = await asked(link, patience_s=patience_s)
            name = machine or hello.hostname
            pid = await _started(link, name, spec, files)
        except BaseException:
            link.close()
            raise

        def ended() -> None:
            self._running.discard(process)
            on_end()

        process = PipedProcess(link, name, pid=pid, log_path=spec.log_path, on_end=ended)
        self._running.add(process)
        return process

    def close(self) -> None:
        """Ends those that still run."""
        for process in tuple(self._running):
            process.abandon()
