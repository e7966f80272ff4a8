"""Keeps one server alive: starts it, watches it, and restarts it.

    loop   consumes               produces                 waits for                    woken by
    run    starts and ends of     `ready`, `gauges`, a     readiness, the server's end  the kernel,
           the server, distrust   failure, `changed`       (a look every second)        the clock, `distrust`

Each start serves what the owner's `ServingState` specifies at that time. A server that dies, stops answering,
or is distrusted is restarted. A server that somebody else runs can't be restarted from here, so it gets the
owner's weights again instead. If the server ends `_MAX_CRASHES` times in a row without finishing a request
in between, `run` gives up.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from astraflow.addons.inference_servers.config import ServerEngineConfig
from astraflow.addons.inference_servers.server_api import Address, Gauges, ServerApi, ServerHttp
from astraflow.addons.inference_servers.server_process import (
    EngineServerProcess,
    server_environment,
    server_program,
)
from astraflow.addons.inference_servers.start_turns import start_turn
from astraflow.errors import (
    DeadlineError,
    Error,
    RefusedError,
    RolloutError,
    ServiceError,
    UnavailableError,
)
from astraflow.service.restarts import Backoff

__all__ = ["ServerLife", "ServingState"]

_log = logging.getLogger(__name__)

_POLL_S = 1.0
"""Time between two reads of the server's gauges, and between two tries while it starts."""
_SILENCE_S = 120.0
"""A server that has not answered for this long is restarted. It is long because a loaded machine is slow."""
_MAX_CRASHES = 3
"""Number of ends in a row after which the server isn't restarted, because the cause is likely permanent."""
_LAST_WORDS_S = 10.0
"""A failed request waits up to this long for the server to end. A broken connection is often the first sign
of an end, and its cause is known a moment later."""
_RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses for which a retry may help. Any other refusal is the request's own fault."""


class ServingState:
    """What a server should serve. Its owner changes it under the lock."""

    def __init__(self) -> None:
        self.model = Path()
        self.label = ""
        self.is_paused = False
        self.lock = asyncio.Lock()
        """Held while any of these attributes changes."""


class ServerLife:
    """Keeps a server for `served` alive: the one at `url` or, if that is empty, one that this class starts.

    A server that is started here runs in `folder`. The owner runs `run` as a task. `changed` is called
    whenever `ready` or `failure` changes.
    """

    def __init__(
        self,
        api: ServerApi,
        config: ServerEngineConfig,
        served: ServingState,
        *,
        name: str,
        url: str,
        folder: Path,
        changed: Callable[[], None],
    ) -> None:
        self.ready = asyncio.Event()
        """Set while the server serves, and permanently after a failure."""
        self.failure: Error | None = None
        self.name = name
        self._api = api
        self._config = config
        self._served = served
        self._url = url
        self._folder = folder
        self._changed = changed
        self._is_checked = False
        """Whether this machine can run the server's build, which doesn't change between starts."""
        self._http: ServerHttp | None = None
        self._process: EngineServerProcess | None = None
        self._distrusted = asyncio.Event()
        self._backoff = Backoff(limit=_MAX_CRASHES - 1)
        """Counts how often the server ended since a completion was last finished. A start takes so long that
        no further delay is needed."""
        self._earlier = Gauges()
        """What earlier starts of the server counted."""
        self._gauges = Gauges()

    @property
    def http(self) -> ServerHttp:
        """The connection to the server.

        Raises: the failure, if there was one.
        """
        if self.failure is not None:
            raise self.failure
        assert self._http is not None
        return self._http

    @property
    def gauges(self) -> Gauges:
        """The server's own metrics. Counters include all its starts."""
        now = self._gauges
        return replace(
            now,
            generated_tokens=self._earlier.generated_tokens + now.generated_tokens,
            num_preemptions=self._earlier.num_preemptions + now.num_preemptions,
        )

    async def serving(self) -> ServerHttp:
        """Waits until the server serves, and returns the connection to it.

        Raises: DeadlineError if that takes too long; the failure, if the server has failed for good.
        """
        await self.within_start(self.ready, "serve")
        return self.http

    async def within_start(self, event: asyncio.Event, what: str) -> None:
        """Waits for an event for as long as a start may take. `what` completes the error's sentence.

        Raises: DeadlineError.
        """
        limit_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await event.wait()
        except TimeoutError as err:
            raise DeadlineError(f"{self.name} did not {what} within {limit_s:g} s") from err

    def note_work(self) -> None:
        """Notes that a completion was finished, which resets the count of crashes."""
        self._backoff.reset()

    def distrust(self) -> None:
        """Notes that the server's weights are unknown, so that it is restarted or gets its weights again."""
        self._distrusted.set()
        self._close()

    async def explained(self, err: UnavailableError | RefusedError) -> RolloutError:
        """Turns the error of a call into that of an episode, with the last output of a server that died."""
        if isinstance(err, RefusedError) and err.status not in _RETRYABLE:
            return RolloutError(f"{self.name} refuses the request: {err}", is_retryable=False)
        if (process := self._process) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await process.ended.wait()
            if process.ended.is_set():
                if process is self._process:
                    self._close()
                return RolloutError(f"{self.name} {process.end} while a request ran; {process.tail()}")
        return RolloutError(f"{self.name} failed a request: {err}")

    async def run(self) -> None:
        """Keeps the server alive. Returns when it has given up; `failure` then says why."""
        try:
            while True:
                problem = await self._one_life()
                if self._backoff.next_delay_s() is None:
                    raise ServiceError(f"{problem}\n{self.name} ended {_MAX_CRASHES} times in a row")
                _log.warning("%s\n%s starts again", problem, self.name)
        except Error as err:
            self.fail(err)
        except Exception as err:  # noqa: BLE001 - whatever ends this loop must reach the waiting requests
            self.fail(ServiceError(f"{self.name} failed: {type(err).__name__}: {err}"))
        await self.end()

    def fail(self, failure: Error) -> None:
        """Ends all waiting: the server is gone for good, and `failure` says why."""
        if self.failure is None:
            self.failure = failure
            if not isinstance(failure, RolloutError):
                _log.error("%s", failure)
        self.ready.set()
        self._changed()

    async def end(self, *, is_final: bool = True) -> None:
        """Ends a server that was started here. A server at `url` is resumed and left alone.

        `is_final` says that the server won't be restarted, so its folder may be deleted too.
        """
        process = self._process
        self._process = None
        http = self._http
        self._http = None
        if http is not None:
            if self._url:
                with contextlib.suppress(UnavailableError, RefusedError):
                    await self._api.resume(http)
            await http.close()
        if process is not None:
            await process.stop(keeps_folder=not is_final)

    async def _one_life(self) -> str:
        """Runs the server from its start to its end, and returns a description of how it ended."""
        try:
            self._distrusted.clear()
            http = await (self._attach() if self._url else self._start())
            await (self._api.pause(http) if self._served.is_paused else self._api.resume(http))
            self.ready.set()
            self._changed()
            problem = await self._watch(http)
        except (UnavailableError, RefusedError) as err:
            problem = str(err)
        self._close()
        self._earlier = self.gauges
        self._gauges = Gauges()
        process = self._process
        await self.end(is_final=False)
        return f"{self.name} {problem}" + (f"; {process.tail()}" if process is not None else "")

    async def _attach(self) -> ServerHttp:
        """Gives the owner's weights to the server at `url`, whatever weights it has."""
        http = ServerHttp(self._url, timeout_s=self._config.request_timeout_s)
        self._http = http
        await self._until_ready(http)
        await self._api.pause(http)
        await self._api.update(http, self._served.model, self._served.label)
        return http

    async def _start(self) -> ServerHttp:
        """Starts a server with the owner's weights, once it is its turn, and waits until it is ready."""
        address = self._address()
        label = self._served.label
        http = ServerHttp(
            address.url, socket=address.socket, token=address.key, timeout_s=self._config.request_timeout_s
        )
        self._http = http
        config = self._config
        if not self._is_checked:
            build = await asyncio.to_thread(config.check_machine)
            _log.info("%s: %s", self.name, build)
            self._is_checked = True
        python = server_program(config.python)
        command = self._api.command(
            config, python=python, model=self._served.model, address=address, label=label
        )
        async with start_turn(self.name, server_environment(command.env)):
            self._process = await EngineServerProcess.start(
                self.name, command.argv, env=command.env, folder=self._folder
            )
            await self._until_ready(http)
        await self._api.set_label(http, label)
        return http

    async def _until_ready(self, http: ServerHttp) -> None:
        """Polls the server until it is ready.

        Raises: UnavailableError if it ends or isn't ready in time; ConfigError, immediately, if it lacks an
        interface.
        """
        problem = ""
        limit_s = self._config.start_timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await self._api.check(http)
                    except (UnavailableError, RefusedError) as err:
                        problem = str(err)
                    if await self._has_ended(_POLL_S):
                        break
        if self._process is not None and self._process.ended.is_set():
            raise UnavailableError(f"{self._process.end} before it served")
        raise UnavailableError(f"does not serve after {limit_s:g} s (start_timeout_s): {problem}")

    async def _watch(self, http: ServerHttp) -> str:
        """Watches a server while it serves, and returns why it can't be used any longer."""
        heard_s = time.monotonic()
        while not await self._has_ended(_POLL_S):
            try:
                self._gauges = await self._api.gauges(http)
                heard_s = time.monotonic()
                if self._url and await self._is_foreign(http):
                    return f"at {self._url} has other weights than it was given; it gets them again"
            except (UnavailableError, RefusedError) as err:
                silence_s = time.monotonic() - heard_s
                if silence_s > _SILENCE_S:
                    return f"has not answered for {silence_s:.0f} s: {err}"
        if self._distrusted.is_set():
            return "failed to take new weights"
        assert self._process is not None
        return self._process.end

    async def _is_foreign(self, http: ServerHttp) -> bool:
        """Checks whether the server at `url` has lost the owner's weights, e.g. because it was restarted.

        The lock keeps an update from changing only one of the two labels while they are compared.
        """
        async with self._served.lock:
            return await self._api.label(http) != self._served.label

    async def _has_ended(self, wait_s: float) -> bool:
        """Waits up to `wait_s`; returns True as soon as the process has ended or is distrusted."""
        ends = [self._distrusted] + ([self._process.ended] if self._process is not None else [])
        tasks = [asyncio.ensure_future(event.wait()) for event in ends]
        try:
            await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        return any(event.is_set() for event in ends)

    def _close(self) -> None:
        """Holds requests until the server serves again. After a failure, they are let through to fail."""
        if self.failure is None:
            self.ready.clear()
        self._changed()

    def _address(self) -> Address:
        """Makes a new address for each start: a socket in the private folder, or a port that is free now."""
        name = secrets.token_hex(4)
        if self._api.has_socket:
            return Address(url="http://server", socket=str(self._folder / f"{name}.sock"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        return Address(url=f"http://127.0.0.1:{port}", port=port, key=secrets.token_hex(16))
