"""Keeps a host alive: starts it when it is needed, and restarts it when it is lost.

The episodes of a lost host fail; they never get a reward of 0. A host that doesn't give up an episode after
its deadline counts as hung. It is killed, and its other episodes are tried again.
"""

import asyncio
import logging

import msgspec

from astraflow import wire
from astraflow.addons.agents.hosts.config import HostConfig
from astraflow.addons.agents.hosts.messages import EpisodeEnd, HostInfo, Refusal, RunRequest
from astraflow.addons.agents.hosts.process import HostLostError, HostProcess
from astraflow.errors import ConfigError, RolloutError
from astraflow.service.frames import Frame
from astraflow.service.restarts import Backoff

__all__ = ["Host", "HostedEpisodeError"]

_log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""A host that doesn't confirm within this time that it has given up an episode counts as hung."""
_LONGEST_PAUSE_S = 16.0
"""Longest pause before another start."""


class HostedEpisodeError(RolloutError):
    """An episode failed in the host. The message begins with the class of the error there."""


class Host:
    """Runs episodes in a host, many at a time.

    Example: `host = Host(config)`, `opened = await host.open()`, `await host.run(request)`, and at the end
    `await host.close()`.
    """

    def __init__(self, config: HostConfig, *, patience_s: float = _PATIENCE_S) -> None:
        """`patience_s`: time limit for giving up an episode."""
        self._config = config
        self._patience_s = patience_s
        self._process: HostProcess | None = None
        self._opened: HostInfo | None = None
        self._starting = asyncio.Lock()
        self._backoff = Backoff(limit=config.max_restarts, longest_s=_LONGEST_PAUSE_S)
        """Counts the losses since an episode last ended."""
        self.num_restarts = 0
        self._why_lost = ""
        self._giving_up: set[asyncio.Task[None]] = set()

    async def open(self) -> HostInfo:
        """Starts the host unless it runs. Raises: ConfigError if it cannot be started; HostLostError."""
        await self._get_process()
        assert self._opened is not None
        return self._opened

    async def close(self) -> None:
        """Ends the host and everything that it started."""
        await asyncio.gather(*self._giving_up)
        if self._process is not None:
            await self._process.close()
            self._process = None

    async def run(self, request: RunRequest) -> EpisodeEnd:
        """Runs an episode.

        Raises: HostedEpisodeError if it fails or takes too long; HostLostError if the host is lost meanwhile.
        """
        process = await self._get_process()
        number = process.new_number()
        timeout = asyncio.timeout(self._config.timeout_s)
        try:
            async with timeout:
                answer = await process.ask("run", msgspec.json.encode(request), number)
        except TimeoutError as err:
            self._give_up(process, number)
            raise HostedEpisodeError(
                f"task {request.task}: the host took longer than workflow.timeout_s = "
                f"{self._config.timeout_s:g}"
            ) from err
        except asyncio.CancelledError:
            self._give_up(process, number)
            raise
        self._backoff.reset()
        return _decode_end(answer, request.task)

    # --- starts and losses ---

    async def _get_process(self) -> HostProcess:
        """Returns the process. Starts one if there is none, or it was lost."""
        async with self._starting:
            process = self._process
            if process is not None and process.lost:
                self._process = None
                self._note_loss(process.lost)
                await process.kill()
                self.num_restarts += 1
            if self._process is None:
                await self._start()
            assert self._process is not None
            return self._process

    async def _start(self) -> None:
        pause_s = self._backoff.delay_s
        if pause_s is None:
            raise HostLostError(
                f"the host of {self._config.serve!r} was lost {self._backoff.num_crashes} times in a row and "
                f"is given up (workflow.max_restarts = {self._config.max_restarts}); {self._why_lost}",
                is_retryable=False,
            )
        await asyncio.sleep(pause_s)
        try:
            self._process, self._opened = await HostProcess.start(self._config)
        except ConfigError as err:
            if self._opened is None:
                raise
            # The host could be started before, so the recipe is valid, and another attempt may succeed.
            self._note_loss(str(err))
            raise HostLostError(str(err)) from err
        _log.info("the host of %r serves %s", self._config.serve, self._opened.library)

    def _note_loss(self, why: str) -> None:
        self._backoff.next_delay_s()
        self._why_lost = why
        _log.warning(
            "the host of %r was lost (%d in a row, given up after %d): %s",
            self._config.serve,
            self._backoff.num_crashes,
            self._config.max_restarts,
            why,
        )

    def _give_up(self, process: HostProcess, number: int) -> None:
        """Tells the host to give up an episode, without waiting for it."""
        task = asyncio.create_task(self._cancel_run(process, number))
        self._giving_up.add(task)
        task.add_done_callback(self._giving_up.discard)

    async def _cancel_run(self, process: HostProcess, number: int) -> None:
        if not await process.cancel(number, self._patience_s):
            process.lose(
                f"the host was lost: it did not give up an episode within {self._patience_s:g} s of its "
                f"deadline, so it hangs{process.last_words()}"
            )


def _decode_end(answer: Frame, task: str) -> EpisodeEnd:
    """Decodes the result of an episode. Raises: HostedEpisodeError if it is a failure, or invalid."""
    try:
        if answer.kind == "failed":
            refusal = msgspec.json.decode(answer.body, type=Refusal)
            raise HostedEpisodeError(
                f"{refusal.error_class}: {refusal.message}", is_retryable=refusal.is_retryable
            )
        return wire.decode_foreign_json(answer.body, EpisodeEnd)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise HostedEpisodeError(
            f"task {task}: the host's answer is not a result: {err}; it begins with {answer.body[:80]!r}",
            is_retryable=False,
        ) from err
