"""The environments of a rollout service. Each is opened once, used by many episodes at a time, and closed.

Nothing that an environment does can stop the event loop or the process. A method that is not `async` runs in
a thread. All such calls of one episode run in the same thread, because game and browser libraries often
require that. A call that takes too long fails its episode and leaves its thread behind. A thread cannot be
killed, but it is a daemon thread, so the process can still end.
"""

import asyncio
import contextlib
import inspect
import logging
import math
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeAlias, cast

from astraflow.errors import ConfigError, Error, RolloutError
from astraflow.protocols import Environment, InteractiveEnvironment, Observation
from astraflow.tasks.config import EnvironmentConfig
from astraflow.tasks.environment import make_environment, without_environment
from astraflow.types import Task
from astraflow.types.bounds import as_number
from astraflow.user_input.own_code import describe_error, ending_forks

__all__ = ["EnvironmentEpisode", "Environments"]

_log = logging.getLogger(__name__)

_CLOSE_S = 2.0
"""Time limit for the `end` calls that still run, and then again for `close`. A supervisor kills a service 5 s
after it has asked the service to stop."""

_Outcome: TypeAlias = tuple[Any, BaseException | None]
"""What a call returned and what it raised. One of the two is None."""


class Environments:
    """The environments of a recipe.

    Example::

        environments = Environments(recipe.tasks.environments)
        await environments.open()
        async with environments.episode(task, seed=7) as episode:
            observation = await episode.step("go north")
        await environments.close()
    """

    def __init__(self, configs: Mapping[str, EnvironmentConfig]) -> None:
        self._configs = configs
        self._open: dict[str, Environment] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """The `end` calls of episodes that failed or were cancelled."""

    @property
    def names(self) -> Collection[str]:
        """The names of the environments."""
        return self._configs.keys()

    async def open(self) -> None:
        """Makes and opens all environments. Raises: ConfigError that names one that cannot be opened."""
        for name, config in self._configs.items():
            environment = make_environment(name, config)
            caller = _Caller(f"environment {name}", config.open_timeout_s)
            self._open[name] = environment
            try:
                await caller.call(environment.open)
            except Exception as err:
                reason = str(err) if isinstance(err, Error) else describe_error(err)
                raise ConfigError(f"tasks.environments.{name} cannot be opened: {reason}") from err
            finally:
                caller.release()

    async def close(self) -> None:
        """Closes all open environments, after the `end` calls that still run. Never raises."""
        if self._ending:
            _, late = await asyncio.wait(self._ending, timeout=_CLOSE_S)
            for ending in late:
                ending.cancel()
        closing = [self._close(name, environment) for name, environment in self._open.items()]
        self._open.clear()
        await asyncio.gather(*closing)

    async def _close(self, name: str, environment: Environment) -> None:
        caller = _Caller(f"environment {name}", _CLOSE_S)
        try:
            await caller.call(environment.close)
        except Exception as err:  # noqa: BLE001 - the user's code; the service ends anyway
            _log.warning("environment %s did not close: %s", name, describe_error(err))
        finally:
            caller.release()

    @asynccontextmanager
    async def episode(self, task: Task, *, seed: int) -> "AsyncGenerator[EnvironmentEpisode]":
        """An episode of the task's environment, which `reset` begins and which ends with the block.

        Raises: RolloutError if the task has no interactive environment here; whatever `reset` raises.
        """
        name, own = without_environment(task)
        environment = self._find_interactive(name, task)
        caller = _Caller(f"task {task.id}: environment {name}", self._configs[name].call_timeout_s)
        try:
            episode = await self._begin(environment, caller, own, seed)
        except BaseException:
            caller.release()
            raise
        try:
            yield episode
        except BaseException:
            # The error is raised at once. `end` runs in the background, and `close` waits for it.
            self._end_in_background(episode)
            raise
        await episode.end()

    async def _begin(
        self, environment: InteractiveEnvironment, caller: "_Caller", task: Task, seed: int
    ) -> "EnvironmentEpisode":
        def end_late(returned: object) -> None:
            """Ends the episode of a `reset` that returned after its deadline."""
            with contextlib.suppress(RolloutError):
                self._end_in_background(_new_episode(environment, caller, returned))

        returned = await caller.call(environment.reset, task, seed, unwanted=end_late)
        return _new_episode(environment, caller, returned)

    def _end_in_background(self, episode: "EnvironmentEpisode") -> None:
        ending = asyncio.create_task(_end_quietly(episode))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _find_interactive(self, name: str, task: Task) -> InteractiveEnvironment:
        environment = self._open.get(name)
        if environment is None:
            raise RolloutError(
                f"task {task.id} belongs to {f'environment {name!r}' if name else 'no environment'}, so it "
                f"cannot be played (open here: {', '.join(self._open) or 'none'})",
                is_retryable=False,
            )
        if not isinstance(environment, InteractiveEnvironment):
            raise RolloutError(
                f"task {task.id}: environment {name!r} lacks `reset`, `step`, or `end`", is_retryable=False
            )
        return environment


class EnvironmentEpisode:
    """One episode of an environment. Implements `EnvironmentSession`, the interface for workflows."""

    def __init__(
        self, environment: InteractiveEnvironment, caller: "_Caller", state: Any, observation: Observation
    ) -> None:
        self.observation = observation
        """The newest observation."""
        self._environment = environment
        self._caller = caller
        self._state = state

    async def step(self, reply: str) -> Observation:
        """Passes on a reply. Raises: RolloutError after the last observation; what the environment raises."""
        if self.observation.is_done:
            raise RolloutError(
                f"{self._caller.name}: `step` was called after the end of the episode", is_retryable=False
            )
        returned = await self._caller.call(self._environment.step, self._state, reply)
        self.observation = _check_observation(returned, f"{self._caller.name}: `step`")
        return self.observation

    async def end(self) -> None:
        """Lets the environment release the resources of the episode."""
        try:
            await self._caller.call(self._environment.end, self._state)
        finally:
            self._caller.release()


async def _end_quietly(episode: EnvironmentEpisode) -> None:
    try:
        await episode.end()
    except Exception as err:  # noqa: BLE001 - the user's code; the episode has failed already
        _log.warning("the `end` of an environment's episode failed: %s", describe_error(err))


def _new_episode(
    environment: InteractiveEnvironment, caller: "_Caller", returned: object
) -> EnvironmentEpisode:
    """The episode that `reset` returned. Raises: RolloutError if it isn't a state and an observation."""
    parts = cast("tuple[object, ...]", returned) if isinstance(returned, tuple) else ()
    if len(parts) != 2:
        raise RolloutError(
            f"{caller.name}: `reset` returned {returned!r}; expected a state and an Observation",
            is_retryable=False,
        )
    state, observation = parts
    checked = _check_observation(observation, f"{caller.name}: `reset`")
    return EnvironmentEpisode(environment, caller, state, checked)


def _check_observation(returned: object, where: str) -> Observation:
    """Returns the observation, with its reward as a float.

    Raises: RolloutError if it isn't an observation with a finite reward.
    """
    if not isinstance(returned, Observation):
        raise RolloutError(
            f"{where} returned {type(returned).__name__}; expected an Observation", is_retryable=False
        )
    reward = as_number(returned.reward)
    if reward is None or not math.isfinite(reward):
        raise RolloutError(
            f"{where} returned the reward {returned.reward!r:.200}; expected a finite number",
            is_retryable=False,
        )
    return replace(returned, reward=reward)


class _Caller:
    """Calls the methods of an environment, each with a deadline. Call `release` at the end.

    The first call of a method that is not `async` starts a thread.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        """Prefix of its error messages."""
        self._timeout_s = timeout_s
        self._calls: SimpleQueue[_ThreadCall | None] | None = None

    async def call(
        self,
        method: Callable[..., object],
        *arguments: object,
        unwanted: Callable[[object], None] | None = None,
    ) -> object:
        """Calls a method. `unwanted`: called with the result of a thread that returned after its deadline.

        Raises: what the method raises; RolloutError if it takes too long, or calls `exit()`.
        """
        if inspect.iscoroutinefunction(method):
            work = _await_outcome(method, arguments)
        else:
            work = self._run_in_thread(_ThreadCall(method, arguments, unwanted))
        timeout = asyncio.timeout(self._timeout_s)
        try:
            async with timeout:
                value, error = await work
        except TimeoutError as err:
            if not timeout.expired():
                raise
            raise RolloutError(
                f"{self.name}: `{method.__name__}` took longer than {self._timeout_s:g} s"
            ) from err
        if error is None:
            return value
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise RolloutError(
                f"{self.name}: `{method.__name__}` raised {describe_error(error)}", is_retryable=False
            ) from error
        raise error

    def release(self) -> None:
        """Lets the thread end after its queued calls."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None

    async def _run_in_thread(self, call: "_ThreadCall") -> _Outcome:
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=_run_calls, args=[self._calls], name=self.name, daemon=True).start()
        self._calls.put(call)
        return await call.outcome


class _ThreadCall:
    """A call that a thread makes. The outcome goes back to the event loop that queued the call."""

    def __init__(
        self,
        method: Callable[..., object],
        arguments: Collection[object],
        unwanted: Callable[[object], None] | None,
    ) -> None:
        self._method = method
        self._arguments = arguments
        self._unwanted = unwanted
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[_Outcome] = self._loop.create_future()

    def run(self) -> None:
        """Makes the call. Runs in the thread."""
        try:
            with ending_forks():
                outcome: _Outcome = (self._method(*self._arguments), None)
        except BaseException as error:  # noqa: BLE001 - raised again in the event loop
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits for the outcome
            self._loop.call_soon_threadsafe(self._deliver, outcome)

    def _deliver(self, outcome: _Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)
            return
        # The caller gave up: its deadline passed, or its episode was cancelled.
        value, error = outcome
        if self._unwanted is not None and error is None:
            self._unwanted(value)


def _run_calls(calls: "SimpleQueue[_ThreadCall | None]") -> None:
    while (call := calls.get()) is not None:
        call.run()


async def _await_outcome(method: Callable[..., Any], arguments: Collection[object]) -> _Outcome:
    """Awaits a method, and returns its error, since raised here an exit would end the event loop, and a
    TimeoutError would be taken for the deadline."""
    try:
        with ending_forks():
            return await method(*arguments), None
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - raised again by the caller
        return None, error
