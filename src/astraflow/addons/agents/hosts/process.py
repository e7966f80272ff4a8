"""One run of a host: its process, and the requests to it.

    this process --(socket pair)--> host, under a keeper (`service.kept_process`)

| loop | consumes | produces | waits for | woken by |
|---|---|---|---|---|
| read | frames of the host | answers of requests, `lost` | a frame | the host, or its end |
"""

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import sys
from functools import partial
from pathlib import Path

import msgspec

import astraflow
from astraflow.addons.agents.hosts.config import HostConfig
from astraflow.addons.agents.hosts.inside.channel import PROTOCOL, next_frame
from astraflow.addons.agents.hosts.messages import HostInfo, Refusal
from astraflow.addons.sandbox.inside import light_box
from astraflow.addons.sandbox.passed_variables import passed_variables
from astraflow.errors import ConfigError, RolloutError
from astraflow.service.frames import Frame, pack
from astraflow.service.kept_process import Care, KeptProcess, OutputLines
from astraflow.service.restarts import end_text

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


class HostLostError(RolloutError):
    """The host died, hung, or sent an invalid answer. Its episodes are tried again."""


class HostProcess:
    """A running host.

    Example: `process = await HostProcess.start(config)`, `await process.ask("run", body)`, and at the end
    `await process.close()`.
    """

    def __init__(
        self,
        process: KeptProcess,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        output: OutputLines,
    ) -> None:
        self._process = process
        self._reader, self._writer = streams
        self._output = output
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Frame]] = {}
        self.lost = ""
        """Why the host can no longer answer; empty while it runs."""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, config: HostConfig, *, lists: bool = False) -> "tuple[HostProcess, HostInfo]":
        """Starts a host and opens what it serves. `lists`: whether it only lists tasks.

        Raises: ConfigError if it cannot be started, speaks another protocol, or cannot open what it serves.
        """
        process = await cls._start_process(config)
        question = {
            "protocol": PROTOCOL,
            "serve": config.target,
            "args": config.args,
            "paths": _own_folders(),
            "lists": lists,
        }
        try:
            async with asyncio.timeout(config.open_timeout_s):
                answer = await process.ask("open", json.dumps(question).encode())
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
                f"{process._process.problems.get('start') or err}"
            ) from err
        except BaseException:
            await process.kill()
            raise

    @classmethod
    async def _start_process(cls, config: HostConfig) -> "HostProcess":
        log = partial(_log.info, "host of %s | %s", config.serve)
        output = OutputLines(log, num_kept=_KEPT_LINES, max_chars=_MAX_LINE_CHARS)
        ours, theirs = socket.socketpair()
        try:
            with theirs, output.writer() as fd:
                process = await KeptProcess.start(
                    [config.interpreter(), "-c", _boot_code(), str(theirs.fileno())],
                    env={**passed_variables(config.keeps_env, is_own_python=False), "PYTHONUNBUFFERED": "1"},
                    stdout=fd,
                    stderr=fd,
                    fds=[theirs.fileno()],
                    care=Care(walls=light_box.__name__),
                )
        except BaseException:
            ours.close()
            raise
        return cls(process, await asyncio.open_connection(sock=ours), output)

    def last_words(self) -> str:
        """The end of its output, for an error message."""
        return f"; it said last:\n{chr(10).join(self._output.last)}" if self._output.last else ""

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
        self.lose("it was ended")
        await self._process.end()
        self._writer.close()
        await self._output.until_end(_ENDING_S)
        await asyncio.wait([self._reading], timeout=_ENDING_S)
        self._reading.cancel()

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
            await self._output.until_end(_LAST_WORDS_S)
            why = "it ended" if (code := self._process.code) is None else f"it {end_text(code)}"
        self.lose(f"the host was lost: {why}{self.last_words()}")


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
    installed = [Path(path).resolve() for path in (sys.prefix, sys.base_prefix, _PACKAGE.parent)]
    folders = [path for path in sys.path if path and Path(path).is_dir()]
    own = [path for path in folders if not any(map(Path(path).resolve().is_relative_to, installed))]
    return list(dict.fromkeys([str(Path.cwd()), *own]))


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
