"""A process on another machine, as the launcher sees it: through the link to the host that holds it.

follow: takes the host's messages -> output into the log here, signs of life, exit code; ends with the
        process or the link
beat:   tells the host every few seconds that the launcher lives
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import astraflow
from astraflow.errors import ConfigError
from astraflow.launch.host_frames import (
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
from astraflow.launch.host_link import HostLink, LinkLostError
from astraflow.protocols import MACHINE_LOST, ProcessLife, ProcessSpec

__all__ = ["PipedProcess", "asked", "started"]

_log = logging.getLogger(__name__)

_ANSWER_S = 30.0
"""A host that has not answered after this time, in which it imports what it needs, is not reached."""
_BEAT_EVERY_S = 5.0
"""A host waits six times as long."""
_LATE_NEWS_S = 4.0
"""A host that has told nothing for this long, four times as long as it takes, is named."""
_LOST_AFTER_S = 30.0
"""A host that has told nothing for this long is lost, though the link has not noticed."""
_KILL_GRACE_S = 2.0
"""Time for a host to kill its process."""
_KILLED = -9


async def asked(link: HostLink) -> Hello:
    """What the machine at the other end of a new link has. Raises: LinkLostError."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await link.hello()
    except TimeoutError as err:
        raise LinkLostError(f"no answer within {_ANSWER_S:.0f} s", None) from err


async def started(link: HostLink, machine: str, spec: ProcessSpec, files: Mapping[Path, bytes]) -> int:
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


class PipedProcess:
    """Implements `ProcessHandle` and `ShowsLife`. Follows its process from the moment it is made.

    `machine` is its name in messages. `on_end` is called once when the process has ended, or is lost.
    """

    # size: what a handle is made of
    def __init__(
        self, link: HostLink, machine: str, *, pid: int, log_path: Path, on_end: Callable[[], None]
    ) -> None:
        self._link = link
        self._machine = machine
        self._pid = pid
        self._log_path = log_path
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._life = ProcessLife()
        self._heard_s = self._loop.time()
        self._code: asyncio.Future[int] = self._loop.create_future()
        self._silent: asyncio.Future[str] = self._loop.create_future()
        self._tasks = (
            asyncio.create_task(self._follow(), name=f"follow:{log_path.stem}"),
            asyncio.create_task(self._beat(), name=f"beat:{log_path.stem}"),
        )

    @property
    def pid(self) -> int:
        """Its process id on its machine."""
        return self._pid

    async def wait(self) -> int:
        """Its exit code; `MACHINE_LOST` if its machine is lost or was taken away."""
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        """Asks it to stop (SIGTERM)."""
        self._link.tell(Signal(verb="terminate"))

    def kill(self) -> None:
        """Kills it, or the link if that does not do it: its host then ends it."""
        if not self._code.done():
            self._link.tell(Signal(verb="kill"))
            self._loop.call_later(_KILL_GRACE_S, self._end, _KILLED)

    def abandon(self) -> None:
        """Ends the link at once; the host ends the process."""
        self._end(_KILLED)

    async def silence(self, longest_s: float) -> str:
        """As in the protocol. A host that cannot tell is lost, which ends `wait`."""
        self._link.tell(WatchSilence(longest_s=longest_s))
        return f"on {self._machine}, {await asyncio.shield(self._silent)}"

    def life(self) -> ProcessLife:
        """What the host has told last, or that it tells nothing."""
        late_s = self._loop.time() - self._heard_s
        if late_s > _LATE_NEWS_S:
            silent_s = (self._life.silent_s or 0.0) + late_s
            condition = f"its machine {self._machine} does not answer"
            return ProcessLife(silent_s, works=False, condition=condition)
        if self._life.condition:
            return replace(self._life, condition=f"on {self._machine}: {self._life.condition}")
        return self._life

    async def _follow(self) -> None:
        """Notes how the process ended; whatever goes wrong, `wait` returns."""
        code = MACHINE_LOST
        try:
            self._write(f"--- on machine {self._machine}\n".encode())
            code = await self._last_news()
        except LinkLostError as err:
            self._write(f"--- its machine {self._machine} is lost: {err}\n".encode())
        except TimeoutError:
            text = f"--- its machine {self._machine} is lost: no word for {_LOST_AFTER_S:.0f} s\n"
            self._write(text.encode())
        finally:
            self._end(code)

    async def _last_news(self) -> int:
        """Takes messages until the process has ended; returns the exit code."""
        while True:
            async with asyncio.timeout(_LOST_AFTER_S):
                message = await self._link.receive()
            self._heard_s = self._loop.time()
            if isinstance(message, SilentFor) and not self._silent.done():
                self._silent.set_result(message.text)
            if not isinstance(message, Told):
                continue
            self._write(message.log)
            self._life = message.life
            if message.code is not None:
                await self._link.ended()
                return MACHINE_LOST if message.is_evicted else message.code

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_EVERY_S)
            self._link.tell(StillHere())

    def _end(self, code: int) -> None:
        """Notes how it ended, and closes the link. Does nothing if it has ended."""
        if self._code.done():
            return
        self._code.set_result(code)
        self._link.close()
        for task in self._tasks:
            task.cancel()
        self._on_end()

    def _write(self, log: bytes) -> None:
        """Into its log on this machine; a full disk must not lose the process."""
        try:
            with self._log_path.open("ab") as file:
                file.write(log)
        except OSError as err:
            _log.warning("%s cannot be written: %s", self._log_path, err)
