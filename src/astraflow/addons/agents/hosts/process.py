"""One run of a host: its process, its keeper, and the requests to it.

    this process --(socket pair)--> host
         |                           |
         +--(pipe)--> keeper --------+   kills the host and all that it started, once the pipe closes

| loop | consumes | produces | waits for | woken by |
|---|---|---|---|---|
| read | frames of the host | answers of requests, `lost` | a frame | the host, or its end |
| log | the host's output | log lines, its last words | output | the host, or its end |

The pipe also closes when this process is killed, so no host outlives its service.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
from collections import deque
from pathlib import Path

import msgspec

import astraflow
from astraflow.addons.agents.hosts.config import HostConfig
from astraflow.addons.agents.hosts.inside.channel import PROTOCOL, Frame, next_frame, pack
from astraflow.addons.agents.hosts.messages import HostInfo, Refusal
from astraflow.addons.sandbox.inside import keeper
from astraflow.addons.sandbox.inside.enter import boot_code
from astraflow.addons.sandbox.passed_variables import passed_variables
from astraflow.errors import ConfigError, RolloutError

__all__ = ["HostLostError", "HostProcess"]

_log = logging.getLogger(__name__)

_PACKAGE = Path(astraflow.__file__).parent
_ENDING_S = 5.0
"""Time limit for ending by itself. After it, the host is killed."""
_LAST_WORDS_S = 2.0
"""Time limit for reading the output of a host that has ended."""
_KEPT_LINES = 12
"""Number of last lines of its output that an error message shows."""
_MAX_LINE_CHARS = 1_000
_READ_BYTES = 1 << 16
_MAX_STATUS_BYTES = 65_536


class HostLostError(RolloutError):
    """The host died, hung, or sent an invalid answer. Its episodes are tried again."""


class HostProcess:
    """A running host.

    Example: `process = await HostProcess.start(config)`, `await process.ask("run", body)`, and at the end
    `await process.close()`.
    """

    def __init__(
        self,
        keeper_process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        pipes: tuple[int, int],
    ) -> None:
        """`pipes`: the one that ends the keeper when it closes, and the one for the keeper's report."""
        self._keeper = keeper_process
        self._reader, self._writer = streams
        self._control, self._status = pipes
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Frame]] = {}
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.lost = ""
        """Why the host can no longer answer; empty while it runs."""
        self.start_problem = ""
        """Why the interpreter could not be started; empty if it was. Set by `kill`."""
        self._logging = asyncio.create_task(self._log())
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, config: HostConfig, *, lists: bool = False) -> "tuple[HostProcess, HostInfo]":
        """Starts a host and opens what it serves. `lists`: whether it only lists tasks.

        Raises: ConfigError if it cannot be started, speaks another protocol, or cannot open what it serves.
        """
        process = await cls._start_process(config)
        asked = {
            "protocol": PROTOCOL,
            "serve": config.target,
            "args": config.args,
            "paths": _own_folders(),
            "lists": lists,
        }
        try:
            async with asyncio.timeout(config.open_timeout_s):
                answer = await process.ask("open", json.dumps(asked).encode())
            return process, _decode_info(config, answer)
        except TimeoutError as err:
            await process.kill()
            raise ConfigError(
                f"the host of {config.serve!r} was not ready within open_timeout_s = "
                f"{config.open_timeout_s:g}{process.last_words()}"
            ) from err
        except HostLostError as err:
            await process.kill()
            raise ConfigError(
                f"the host of {config.serve!r} did not start with python = {config.python!r}: "
                f"{process.start_problem or err}"
            ) from err
        except BaseException:
            await process.kill()
            raise

    @classmethod
    async def _start_process(cls, config: HostConfig) -> "HostProcess":
        argv = [config.interpreter(), "-c", _boot_code()]
        ours, theirs = socket.socketpair()
        control_read, control = os.pipe()
        status, status_write = os.pipe()
        try:
            process = await _start_keeper(
                [*argv, str(theirs.fileno())], config, (control_read, status_write), theirs
            )
        except BaseException:
            ours.close()
            os.close(control)
            os.close(status)
            raise
        finally:
            theirs.close()
            os.close(control_read)
            os.close(status_write)
        return cls(process, await asyncio.open_connection(sock=ours), (control, status))

    def last_words(self) -> str:
        """The end of its output, for an error message."""
        return f"; it said last:\n{chr(10).join(self._lines)}" if self._lines else ""

    def new_number(self) -> int:
        """A number for a request that may have to be cancelled."""
        return next(self._numbers)

    async def ask(self, kind: str, body: bytes, number: int = 0) -> Frame:
        """Sends a request and waits for the answer. Raises: HostLostError."""
        if self.lost:
            raise HostLostError(self.lost)
        number = number or self.new_number()
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            await self._send(Frame(kind, number, body))
            return await answer
        finally:
            del self._asked[number]

    async def cancel(self, number: int, patience_s: float) -> bool:
        """Cancels a request that is no longer awaited. Returns whether the host confirmed that in time."""
        try:
            async with asyncio.timeout(patience_s):
                await self.ask("cancel", b"{}", number)
        except TimeoutError:
            return False
        except HostLostError:
            pass
        return True

    async def close(self) -> None:
        """Lets the host end by itself. If it doesn't, kills it and everything that it started."""
        if not self.lost:
            with contextlib.suppress(HostLostError):
                await self._send(Frame("close", 0, b"{}"))
                await asyncio.wait([self._reading], timeout=_ENDING_S)
        await self.kill()

    async def kill(self) -> None:
        """Kills the host and everything that it started. Returns when all of it is gone."""
        if self._control < 0:
            return
        self.lose("it was ended")
        os.close(self._control)
        self._control = -1
        try:
            async with asyncio.timeout(2 * keeper.LIMIT_S):
                await self._keeper.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._keeper.pid, signal.SIGKILL)
            await self._keeper.wait()
        self._writer.close()
        _, late = await asyncio.wait([self._logging, self._reading], timeout=_ENDING_S)
        for loop in late:
            loop.cancel()
        self.start_problem = _read_start_problem(self._status)

    def lose(self, why: str) -> None:
        """Fails all open requests with HostLostError. The caller then has to kill the host."""
        self.lost = self.lost or why
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(HostLostError(self.lost))
                # Retrieved here, because a cancelled caller never does, and asyncio would log a warning.
                answer.exception()

    async def _send(self, frame: Frame) -> None:
        try:
            self._writer.write(pack(frame))
            await self._writer.drain()
        except (ConnectionError, RuntimeError) as err:
            raise HostLostError(self.lost or "its socket is closed") from err

    # --- loops ---

    async def _read(self) -> None:
        why = ""
        try:
            while (frame := await next_frame(self._reader)) is not None:
                answer = self._asked.get(frame.number)
                if answer is not None and not answer.done():
                    answer.set_result(frame)
        except ValueError as err:
            why = f"it sent an invalid answer: {err}"
        if not why:
            await asyncio.wait([self._logging], timeout=_LAST_WORDS_S)
        self.lose(f"the host was lost: {why or 'it ended'}{self.last_words()}")

    async def _log(self) -> None:
        assert self._keeper.stdout is not None
        rest = ""
        while data := await self._keeper.stdout.read(_READ_BYTES):
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            rest = rest[-_MAX_LINE_CHARS:]
            for line in lines:
                self._keep(line)
        if rest:
            self._keep(rest)

    def _keep(self, line: str) -> None:
        shown = "".join(char if char.isprintable() else " " for char in line[:_MAX_LINE_CHARS])
        self._lines.append(shown)
        _log.info("host %d | %s", self._keeper.pid, shown)


async def _start_keeper(
    argv: list[str], config: HostConfig, pipes: tuple[int, int], theirs: socket.socket
) -> asyncio.subprocess.Process:
    """Starts the keeper, which starts the host."""
    specification = {"argv": argv, "is_boxed": False, "hidden": [], "own": [], "read_only": []}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        "-c",
        boot_code(str(_PACKAGE.parent), keeper.__name__, ""),
        json.dumps(specification),
        *map(str, pipes),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**passed_variables(config.keeps_env, is_own_python=False), "PYTHONUNBUFFERED": "1"},
        pass_fds=(*pipes, theirs.fileno()),
        start_new_session=True,  # an interrupt at the terminal must not end the keeper
    )


def _boot_code() -> str:
    """The code of the host's program. It can import this package's modules, but none of the packages
    installed next to it, because these are for this process's Python."""
    return (
        "import sys, types; package = types.ModuleType('astraflow'); "
        f"package.__path__ = [{str(_PACKAGE)!r}]; sys.modules['astraflow'] = package; "
        "from astraflow.addons.agents.hosts.inside.main import main; main(int(sys.argv[1]))"
    )


def _own_folders() -> list[str]:
    """The folders with the user's own modules, which the host may import too: those on this process's path
    that are not part of an installation."""
    here = str(Path.cwd())
    installed = (sys.prefix, sys.base_prefix, str(_PACKAGE.parent))
    found = [path for path in sys.path if path and Path(path).is_dir() and not path.startswith(installed)]
    return list(dict.fromkeys([here, *found]))


def _decode_info(config: HostConfig, answer: Frame) -> HostInfo:
    """Decodes the answer to `open`. Raises: ConfigError if it is a failure, or invalid."""
    try:
        if answer.kind == "failed":
            refusal = msgspec.json.decode(answer.body, type=Refusal)
            raise ConfigError(
                f"the host of {config.serve!r} (python = {config.python!r}) could not be opened: "
                f"{refusal.error_class}: {refusal.message}"
            )
        info = msgspec.json.decode(answer.body, type=HostInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ConfigError(f"the host of {config.serve!r} sent an invalid handshake: {err}") from err
    if info.protocol != PROTOCOL:
        raise ConfigError(
            f"the host of {config.serve!r} speaks protocol {info.protocol}, but this AstraFlow speaks "
            f"{PROTOCOL}; use the host program of this version"
        )
    return info


def _read_start_problem(status: int) -> str:
    """Reads why the keeper could not start the program; empty if it could. Closes `status`."""
    try:
        reported = os.read(status, _MAX_STATUS_BYTES)
    finally:
        os.close(status)
    try:
        return str(msgspec.json.decode(reported, type=dict[str, int | str]).get("start", ""))
    except msgspec.DecodeError:
        return ""
