"""The program of a host. It makes the served object, and answers a rollout service until the service is gone.

It runs in another Python, so it imports only the standard library, the served class, and modules of AstraFlow
that need no more than that:

    python -c "...; main(SOCKET)"

| task | consumes | produces | waits for | woken by |
|---|---|---|---|---|
| main | frames | a task per `run` | a frame | the service |
| run | its episode | one answer | the served object | the served object, `cancel` |

The served object is an instance of a class like this one. Its methods may be `async`; a `run` that is not
`async` runs in a thread.

    class Environment:
        roles = ("agent",)                     # optional
        version = "1.0"                        # optional
        def __init__(self, **args): ...        # the recipe's `args`
        async def open(self): ...              # optional; not called for listing tasks
        def tasks(self, split): ...            # yields {"id": ..., "prompt": ..., "data": any JSON}
        async def run(self, data, episode): ...  # returns {"parts": [...], "score": ..., "metrics": {...}}
        async def close(self): ...             # optional
"""

import asyncio
import contextlib
import importlib
import inspect
import itertools
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from astraflow.addons.agents.hosts.inside.channel import MAX_BODY_BYTES, PROTOCOL, next_frame
from astraflow.service.frames import Frame, pack
from astraflow.user_input.own_code import ending_forks

__all__ = ["HostedEpisode", "main"]

_MAX_THREADS = 512
"""Largest number of episodes that run at a time if `run` is not `async`."""
_PAGE_BYTES = MAX_BODY_BYTES // 4
"""A page of tasks ends with the task that reaches this many bytes."""
_MAX_MESSAGE = 2_000
"""Number of characters of an error message that are sent; the log has the whole message."""


@dataclass(frozen=True)
class HostedEpisode:
    """What an episode gets in addition to its task."""

    base_url: str
    """URL of an OpenAI-compatible endpoint that records what is sampled. It is valid for this episode
    only."""
    api_key: str
    models: Mapping[str, str]
    """Role -> the model to request."""
    deadline_s: float
    """Seconds after which the episode is given up."""


def main(fd: int) -> None:
    """Serves the socket `fd` until its other end is closed. Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service ends this process
    try:
        asyncio.run(_Host().serve(fd))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads of episodes that were given up may never end


class _Host:
    def __init__(self) -> None:
        self._served: Any = None
        self._runs: dict[int, asyncio.Task[None]] = {}

    async def serve(self, fd: int) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
        connection = socket.socket(fileno=fd)
        os.set_inheritable(fd, False)  # programs that the served object starts must not keep the socket open
        reader, self._writer = await asyncio.open_connection(sock=connection)
        while (frame := await next_frame(reader)) is not None:
            if frame.kind == "close":
                break
            if frame.kind == "cancel":
                await self._cancel(frame)
            elif frame.kind == "run":
                self._runs[frame.number] = asyncio.create_task(self._answer(frame, self._run))
            else:
                await self._answer(frame, self._open if frame.kind == "open" else self._list_page)
        for run in list(self._runs.values()):
            run.cancel()
        await asyncio.gather(*self._runs.values(), return_exceptions=True)
        if hasattr(self._served, "close"):
            await _call(self._served.close)

    async def _cancel(self, frame: Frame) -> None:
        """Cancels a run, which is then answered as failed. A run that has been answered is answered again."""
        run = self._runs.get(frame.number)
        if run is None:
            await self._send(_failure(frame, TimeoutError("it was over")))
        else:
            run.cancel()

    async def _send(self, frame: Frame) -> None:
        self._writer.write(pack(frame))
        with contextlib.suppress(ConnectionError):  # the service is gone, which ends the loop above
            await self._writer.drain()

    async def _answer(self, frame: Frame, handle: Any) -> None:
        """Answers a request with the result of `handle`, or with its error."""
        try:
            with ending_forks():
                kind, body = await handle(json.loads(frame.body))
            answer = Frame(kind, frame.number, _encode(body))
        except asyncio.CancelledError:
            answer = _failure(frame, TimeoutError("it was given up"))
        except (Exception, SystemExit) as err:  # noqa: BLE001 - the user's code; the service gets the error
            traceback.print_exc()
            answer = _failure(frame, err)
        finally:
            self._runs.pop(frame.number, None)
        await self._send(answer)

    async def _open(self, request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if request["protocol"] != PROTOCOL:
            raise RuntimeError(f"the service speaks protocol {request['protocol']}, this host {PROTOCOL}")
        sys.path += [path for path in request["paths"] if path not in sys.path]
        module, _, attr = request["serve"].partition(":")
        self._served = getattr(importlib.import_module(module), attr)(**request["args"])
        if not request["lists"] and hasattr(self._served, "open"):
            await _call(self._served.open)
        version = getattr(self._served, "version", "")
        return "opened", {
            "protocol": PROTOCOL,
            "library": f"{getattr(self._served, 'library', attr)} {version}".strip(),
            "roles": list(getattr(self._served, "roles", ("agent",))),
        }

    async def _list_page(self, request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The next page of tasks, with at most `limit` of them. The first page begins at `skip`."""
        if not hasattr(self, "_tasks"):
            self._tasks: Iterator[Any] = itertools.islice(
                iter(self._served.tasks(request["split"])), request["skip"], None
            )
        page: list[Any] = []
        num_bytes = 0
        while len(page) < request["limit"] and num_bytes < _PAGE_BYTES:
            task = next(self._tasks, None)
            if task is None:
                return "page", {"tasks": page, "is_last": True}
            page.append(task)
            num_bytes += len(_encode(task))
        return "page", {"tasks": page, "is_last": False}

    async def _run(self, request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        episode = HostedEpisode(
            request["base_url"], request["api_key"], request["models"], request["deadline_s"]
        )
        if self._served is None:
            raise RuntimeError("a `run` was requested before `open`")
        result = await _call(self._served.run, request["data"], episode)
        if not isinstance(result, Mapping):
            raise TypeError(
                f"`run` returned {type(result).__name__}; expected a mapping with `parts`, `score`"
            )
        return "ended", {**cast("Mapping[str, Any]", result)}


async def _call(method: Any, *arguments: Any) -> Any:
    """Calls a method, in a thread unless it is `async`."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)

    def call() -> Any:
        with ending_forks():
            return method(*arguments)

    work = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])  # a thread cannot be ended; the service kills a host that doesn't answer
        raise


def _encode(body: Any) -> bytes:
    """Encodes JSON. Raises: ValueError if that is impossible (NaN, objects), or the result is too long."""
    try:
        data = json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as err:
        raise ValueError(f"the returned value is not JSON: {err}") from err
    if len(data) > MAX_BODY_BYTES:
        raise ValueError(f"the returned value has {len(data)} bytes as JSON; at most {MAX_BODY_BYTES} fit")
    return data


def _failure(frame: Frame, err: BaseException) -> Frame:
    """Makes the answer for an error. The error may set its class (`error_class`) and whether another attempt
    may succeed (`is_retryable`). By default, that is so for errors of files, the network, and deadlines."""
    name = str(getattr(err, "error_class", type(err).__name__))
    failure = {
        "error_class": "".join(char for char in name if char.isprintable())[:200],
        "message": str(err)[:_MAX_MESSAGE],
        "is_retryable": bool(getattr(err, "is_retryable", isinstance(err, OSError))),
    }
    return Frame("failed", frame.number, _encode(failure))
