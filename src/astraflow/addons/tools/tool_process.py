"""Runs a tool in separate processes, so that a call that takes too long can be killed.

    tool_use -> ToolProcesses.call -> pipe -> process: `serve` -> the function

A process runs one call at a time and is then reused. A caller that stops waiting kills the process and
everything that it started in its session, and another process replaces it. All processes end with the
service, however the service ends.
"""

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from astraflow.addons.tools.tool import ToolContext, ToolFailedError, shorten, text_of
from astraflow.config import Use, load_attr
from astraflow.errors import ConfigError, RolloutError
from astraflow.service.readable import until_readable

__all__ = ["ToolProcesses"]

_PR_SET_PDEATHSIG = 1
"""`prctl` option of Linux: the signal that a process gets when its parent dies."""
_MAX_CHARS = 1 << 20
"""Maximum number of characters of a result that are sent to the service. The model sees fewer."""


@dataclass(frozen=True, slots=True)
class _Reply:
    text: str
    is_error: bool = False
    is_broken: bool = False
    """True if the tool itself doesn't work, so that the episode fails."""
    is_retryable: bool = False


class ToolProcesses:
    """Processes for the calls of one tool.

    Example: `await ToolProcesses(Use(use="my_tools:search"), num=4).call(query="maps")`.
    """

    def __init__(self, use: Use, *, num: int) -> None:
        self._use = use
        self.turns = asyncio.Semaphore(num)
        """A caller waits here for a free process. Its deadline begins only after that."""
        self._idle: list[_Process] = []

    async def call(self, **arguments: object) -> str:
        """Calls the function and returns its result as text. Cancellation kills the process.

        Raises: ToolFailedError if the function raises; RolloutError if the function raises that, can't be
        loaded, or ends its process.
        """
        process = self._idle.pop() if self._idle else _Process(self._use)
        try:
            reply = await process.call(arguments)
        except BaseException:
            process.kill()
            raise
        self._idle.append(process)
        if reply.is_broken:
            raise RolloutError(reply.text, is_retryable=reply.is_retryable)
        if reply.is_error:
            raise ToolFailedError(reply.text)
        return reply.text


class _Process:
    def __init__(self, use: Use) -> None:
        context = multiprocessing.get_context("spawn")
        self._use = use
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, use, tuple(sys.path)), name=f"tool {use.use}", daemon=True
        )
        self._process.start()
        theirs.close()

    async def call(self, arguments: Mapping[str, object]) -> _Reply:
        try:
            self._pipe.send({name: _sendable(value) for name, value in arguments.items()})
            await until_readable(self._pipe.fileno())
            return self._pipe.recv()
        except (EOFError, OSError) as err:
            self._process.join(1.0)
            raise RolloutError(
                f"the tool {self._use.use} ended its process (exit code {self._process.exitcode})",
                is_retryable=False,
            ) from err

    def kill(self) -> None:
        """Ends the process and its session. Returns once it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()  # it may not have its own session yet
        self._process.join()
        self._pipe.close()


def _sendable(value: object) -> object:
    """Removes the shared state of an episode's tools, which may contain objects that can't be pickled."""
    return replace(value, state={}) if isinstance(value, ToolContext) else value


# --- in the process -------------------------------------------------------------------------------


def _serve(pipe: Connection, use: Use, path: tuple[str, ...]) -> None:
    """Runs calls until the service closes the pipe."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which ends this process
    sys.path[:] = path
    with contextlib.suppress(EOFError, OSError):
        while True:
            arguments: dict[str, Any] = pipe.recv()
            pipe.send(_reply(use, arguments))


def _reply(use: Use, arguments: Mapping[str, Any]) -> _Reply:
    try:
        value = load_attr(use.use, where="tools")(**use.args, **arguments)
        return _Reply(shorten(text_of(value), _MAX_CHARS))
    except RolloutError as err:
        return _Reply(str(err), is_broken=True, is_retryable=err.is_retryable)
    except ConfigError as err:
        return _Reply(str(err), is_broken=True)
    except (Exception, SystemExit) as err:  # noqa: BLE001 - the model is told
        return _Reply(f"{type(err).__name__}: {err}", is_error=True)
