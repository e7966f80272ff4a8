"""Runs a tool in separate processes, so that a call that takes too long can be killed.

    tool_use -> ToolProcesses.call -> socket -> process: `serve` -> the function

Each call and its answer have a number. A frame consists of its length in eight bytes and a pickled object.

A process runs one call at a time and is then reused. A caller that stops waiting kills the process and
everything that it started in its session, and another process replaces it. All processes end with the
service, however the service ends.
"""

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from astraflow.addons.tools.tool import ToolContext, ToolFailedError, shorten, text_of
from astraflow.config import Use, load_attr
from astraflow.errors import ConfigError, RolloutError
from astraflow.service.readable import until_readable
from astraflow.user_input.own_code import ending_forks

__all__ = ["ToolProcesses"]

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
"""`prctl` option of Linux: the signal that a process gets when its parent dies."""
_MAX_CHARS = 1 << 20
"""Maximum number of characters of a result that are sent to the service. The model sees fewer."""
_LENGTH_BYTES = 8
_MAX_REPLY_BYTES = 16 << 20
"""More than the longest reply has."""
_LAST_ANSWER_S = 0.2
"""Time to read the answer of a process that has ended."""


@dataclass(frozen=True, slots=True)
class _Reply:
    number: int
    """That of the call."""
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
        self._num_calls = 0
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = context.Process(
                target=_serve, args=(theirs, use, tuple(sys.path)), name=f"tool {use.use}", daemon=True
            )
            self._process.start()

    async def call(self, arguments: Mapping[str, object]) -> _Reply:
        """Makes a call. After any exception, including cancellation, the process must be killed."""
        self._num_calls += 1
        named = {name: _sendable(value) for name, value in arguments.items()}
        exchange = asyncio.ensure_future(self._exchange((self._num_calls, named)))
        end = asyncio.ensure_future(self._until_ended())
        try:
            # A process that it has left behind may hold the socket open.
            await asyncio.wait({exchange, end}, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(_LAST_ANSWER_S):
                return await exchange
        except (EOFError, OSError, TimeoutError) as err:
            self._process.join(1.0)
            code = self._process.exitcode
            how = "closed its socket" if code is None else f"ended its process (exit code {code})"
            raise RolloutError(f"the tool {self._use.use} {how}", is_retryable=False) from err
        except ValueError as err:
            raise RolloutError(
                f"the process of the tool {self._use.use} sent an invalid answer: {err}"
            ) from err
        finally:
            for task in (exchange, end):
                task.cancel()
            await asyncio.gather(exchange, end, return_exceptions=True)

    async def _exchange(self, request: object) -> _Reply:
        """Sends a request, and receives the answer with its number. Raises: EOFError, OSError, ValueError."""
        await asyncio.get_running_loop().sock_sendall(self._socket, _frame(request))
        while True:
            size = int.from_bytes(await self._read(_LENGTH_BYTES), "big")
            if size > _MAX_REPLY_BYTES:
                raise ValueError(f"it has {size:,} bytes; at most {_MAX_REPLY_BYTES:,} are expected")
            body = await self._read(size)
            try:
                reply: object = pickle.loads(body)
            except Exception as err:  # bytes that aren't an object may raise anything
                raise ValueError(str(err)) from err
            if isinstance(reply, _Reply) and reply.number == self._num_calls:
                return reply
            _log.warning("%s: dropped an answer to another call than %d", self._use.use, self._num_calls)

    async def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self._socket, size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    async def _until_ended(self) -> None:
        if not hasattr(os, "pidfd_open"):
            await until_readable(self._process.sentinel)
            return
        ended = os.pidfd_open(self._process.pid or 0)
        try:
            await until_readable(ended)
        finally:
            os.close(ended)

    def kill(self) -> None:
        """Ends the process and its session. Returns once it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()  # it may not have its own session yet
        self._process.join()
        self._socket.close()

    def __del__(self) -> None:
        self._socket.close()  # which ends the process


def _frame(content: object) -> bytes:
    body = pickle.dumps(content)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def _sendable(value: object) -> object:
    """Removes the shared state of an episode's tools, which may contain objects that can't be pickled."""
    return replace(value, state={}) if isinstance(value, ToolContext) else value


# --- in the process -------------------------------------------------------------------------------


def _serve(service: socket.socket, use: Use, path: tuple[str, ...]) -> None:
    """Runs calls until the service closes the socket."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which ends this process
    sys.path[:] = path
    service.setblocking(True)
    with contextlib.suppress(OSError), service.makefile("rb") as requests:
        while size := int.from_bytes(requests.read(_LENGTH_BYTES), "big"):
            number, arguments = pickle.loads(requests.read(size))
            service.sendall(_frame(_reply(use, number, arguments)))


def _reply(use: Use, number: int, arguments: Mapping[str, Any]) -> _Reply:
    try:
        with ending_forks():
            value = load_attr(use.use, where="tools")(**use.args, **arguments)
            return _Reply(number, shorten(text_of(value), _MAX_CHARS))
    except RolloutError as err:
        return _Reply(number, str(err), is_broken=True, is_retryable=err.is_retryable)
    except ConfigError as err:
        return _Reply(number, str(err), is_broken=True)
    except (Exception, SystemExit) as err:  # noqa: BLE001 - the model is told
        return _Reply(number, f"{type(err).__name__}: {err}", is_error=True)
