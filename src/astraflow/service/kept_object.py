"""An object in a process of its own, whose methods are called from here, one call at a time.

    KeptObject.call --(socket)--> process, under a keeper: `main` -> the object

Each call and its answer have a number, so no answer is taken for that of another call. The process imports
what the object needs, and not this process's main module.
"""

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from astraflow.service.frames import Frame, pack, receive_frame, receive_now
from astraflow.service.kept_process import KeptProcess
from astraflow.service.restarts import end_text

__all__ = ["InvalidAnswerError", "KeptObject", "ObjectLostError", "main"]

_log = logging.getLogger(__name__)

_MAX_BYTES = 1 << 30
"""More than the largest call or answer has."""
_LAST_MOMENT_S = 1.0
"""Time for a process to end after it has closed its socket."""
_BOOT = f"import sys; sys.path[:] = sys.argv[2:]; from {__name__} import main; main(int(sys.argv[1]))"


class ObjectLostError(Exception):
    """The process has ended or can no longer answer. The text continues a sentence about it."""


class InvalidAnswerError(ObjectLostError):
    """The process has sent something else than an answer."""


class KeptObject:
    """A process that holds an object.

    Example: `counter = await KeptObject.start("my_module:Counter", 5)`, `await counter.call("add", 2)`, and
    at the end `await counter.end()`. A kept object that is forgotten ends, too.
    """

    def __init__(self) -> None:
        # Created here: of garbage in a circle, the older object is finalized first, and closes the socket.
        self._channel, self._theirs = socket.socketpair()
        self._channel.setblocking(False)
        self._process: KeptProcess
        self.num_calls = 0

    @classmethod
    async def start(cls, target: str, *args: object, env: Mapping[str, str] | None = None) -> "KeptObject":
        """Starts the process, which makes the object before the first call.

        `target`: the object's class, as `module:attr`. `args`: what the class gets.
        Raises: DeadlineError, OSError.
        """
        instance = cls()
        with instance._theirs as theirs:
            argv = [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), *sys.path]
            instance._process = await KeptProcess.start(argv, env=env, fds=[theirs.fileno()])
        instance._process.call_at_end(partial(_end_stream, instance._channel))
        await instance._send(Frame(target, 0, pickle.dumps(args)))
        return instance

    async def call(self, method: str, *args: object) -> Any:
        """Calls a method of the object. After any exception, including cancellation, `end` must be called.

        Raises: ObjectLostError.
        """
        self.num_calls += 1
        try:
            return await self._exchange(Frame(method, self.num_calls, pickle.dumps(args)))
        except (EOFError, OSError) as err:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_MOMENT_S):
                    await self._process.ended.wait()
            code = self._process.code
            how = "closed its socket" if code is None else end_text(code)
            raise ObjectLostError(how) from err
        except ValueError as err:
            raise InvalidAnswerError(f"sent an invalid answer: {err}") from err

    async def end(self) -> None:
        """Ends the process and all that it has started. Returns once they are gone."""
        self._channel.close()
        await self._process.end()

    def __del__(self) -> None:
        self._channel.close()
        if hasattr(self, "_process"):  # it could be started
            self._process.let_go()

    async def _exchange(self, call: Frame) -> Any:
        """Makes a call. Raises: EOFError, OSError, ValueError."""
        await self._send(call)
        while True:
            answer = await receive_frame(self._read, _MAX_BYTES)
            if answer.number == call.number:
                break
            _log.warning("dropped an answer to call %d instead of %d", answer.number, call.number)
        try:
            return pickle.loads(answer.body)
        except Exception as err:  # bytes that aren't an object may raise anything
            raise ValueError(str(err)) from err

    async def _send(self, frame: Frame) -> None:
        await asyncio.get_running_loop().sock_sendall(self._channel, pack(frame))

    async def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self._channel, size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def _end_stream(channel: socket.socket) -> None:
    """Lets a call read the answers that have come, and then the end: a process that was left behind may hold
    the other end open."""
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)


def main(fd: int) -> None:
    """Answers calls until the other end is gone. Never returns."""
    os.set_inheritable(fd, False)
    channel = socket.socket(fileno=fd)
    try:
        with contextlib.suppress(OSError):
            _serve(channel)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the log has it, and the process must end here
        traceback.print_exc()
        os._exit(1)


def _serve(channel: socket.socket) -> None:
    served: Any = None
    while (received := receive_now(channel, sys.maxsize)) is not None:
        head, (body,) = received
        args = pickle.loads(body)
        if served is None:
            module, _, name = head["kind"].partition(":")
            served = getattr(import_module(module), name)(*args)
            continue
        answer = getattr(served, head["kind"])(*args)
        channel.sendall(pack(Frame("answer", head["number"], pickle.dumps(answer))))
