"""Keeps the processes of a run alive.

    per process, a watch task:
        start -> wait for its end -> normal end | stopped | restart after a backoff
        consumes exit codes; produces `states`, calls of `on_change`; waits for the process or `stop`;
        woken by the end of the process, `stop`, `kill_all`
    and a silence task:
        no sign of life for too long -> stacks into its log -> kill, which wakes the watch task
    `look`, which the owner calls every few seconds, updates `states` for people; it restarts nothing

A crashed process is restarted after an exponential backoff. Its earlier crashes are forgotten once
`note_progress` says that it does its work again, and when its machine is lost, which isn't a crash. A process
fails the run if it keeps crashing, or if it finds its settings wrong before it has done any work: `run` then
ends with a ServiceError that names its log. Whatever ends `run`, no process is left behind.

A pool that sizes itself starts further processes with `add`, and lets them go with `retire`.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from astraflow.errors import ServiceError
from astraflow.processes.launcher import CheckedHandle, start_process
from astraflow.protocols import MACHINE_LOST, Launcher, ProcessLife, ProcessSpec
from astraflow.recipe.service_state import TROUBLE_AFTER_S, ServiceState
from astraflow.rollout.waiting import wait_for_any
from astraflow.service.memory import MemoryRecord
from astraflow.service.restarts import RETIRED_CODE, SIGKILL_CODES, Backoff, code_text, last_lines

__all__ = ["USER_ERROR_CODE", "Supervisor"]

_log = logging.getLogger(__name__)

USER_ERROR_CODE = 2
"""Exit code of a process whose settings are wrong, so that a restart would end the same way."""

_TERMINATE_GRACE_S = 5.0
_TAIL_LINES = 12
_KILLED = (
    "killed by signal 9 (SIGKILL), which AstraFlow didn't send, perhaps because its machine ran out of memory"
)
_LOST = "its machine was lost"
_LATE_NEWS_S = 5.0
"""A process may end this long before the supervisor's owner, who asks twice per second, learns why."""


@dataclass(slots=True)
class _Watched:
    """A process, and what is known of it."""

    spec: ProcessSpec
    backoff: Backoff
    state: ServiceState
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    handle: CheckedHandle | None = None
    starting: asyncio.Timeout | None = None
    """The timeout of a start whose launcher may still wait for a machine. A stop expires it."""
    started_s: float = 0.0
    troubled_s: float | None = None
    """Time at which its trouble began."""
    killed_because: str = ""
    used_bytes: int = 0
    """The memory that it used when it was last looked at, if it is on this machine."""
    has_worked: bool = False
    is_retired: bool = False
    """It isn't restarted, and is forgotten when it has ended: `retire` or its exit code said so."""


class Supervisor:
    """Runs processes until they end normally, are stopped, or fail for good.

    Example: `supervisor = Supervisor(launcher, specs); await supervisor.run()`. To end it, another task calls
    `await supervisor.stop()`.

    Call `note_done` when a process that ends with the run has done its work. If such a process ends before
    that, it counts as crashed, unless it was asked to leave. `first_backoff_s`: before the first restart.
    """

    def __init__(
        self,
        launcher: Launcher,
        specs: Sequence[ProcessSpec],
        *,
        on_change: Callable[[], None] = lambda: None,
        first_backoff_s: float = 0.5,
        late_news_s: float = _LATE_NEWS_S,
        memory: MemoryRecord | None = None,
    ) -> None:
        self._late_news_s = late_news_s
        self._launcher = launcher
        self._first_backoff_s = first_backoff_s
        self._on_change = on_change
        self._group: asyncio.TaskGroup | None = None
        """Owns the watch tasks while `run` runs."""
        self._memory = memory or MemoryRecord()
        self._watched: dict[str, _Watched] = {}
        for spec in specs:
            self._enter(spec)

    @property
    def states(self) -> tuple[ServiceState, ...]:
        """The states of all processes, in the order in which they were added."""
        return tuple(each.state for each in self._watched.values())

    def note_progress(self, *names: str) -> None:
        """Records that these processes work, so their earlier crashes don't count. Ignores other names."""
        for name in self._watched.keys() & set(names):
            self._watched[name].has_worked = True
            self._watched[name].backoff.reset()

    def add(self, spec: ProcessSpec) -> None:
        """Starts one more process. Its name must be new."""
        each = self._enter(spec)
        if self._group is not None:
            self._group.create_task(self._watch(each), name=f"watch:{spec.name}")
        self._on_change()

    def retire(self, name: str) -> None:
        """Never restarts the process again, and forgets it when it has ended. This doesn't end the process,
        unless it still waits for a machine."""
        self._watched[name].is_retired = True
        self._stop(self._watched[name])

    def terminate(self, name: str) -> None:
        """Asks a process to stop, if it runs."""
        if (each := self._watched.get(name)) and each.handle:
            each.handle.terminate()

    def kill(self, name: str) -> None:
        """Kills a process, if it runs."""
        if (each := self._watched.get(name)) and each.handle:
            each.killed_because = "killed by AstraFlow"
            each.handle.kill()

    def note_done(self, name: str) -> None:
        """Records that the process has done its work. From now on, exit code 0 is its normal end."""
        self._watched[name].done.set()

    def look(self) -> None:
        """Updates `states` with the signs of life and the troubles of all processes."""
        now_s = asyncio.get_running_loop().time()
        self._memory.look(now_s)
        has_changed = False
        for each in self._watched.values():
            if each.handle is None:
                continue
            had_trouble = bool(each.state.trouble)
            life = each.handle.life()
            each.used_bytes = life.memory_bytes or each.used_bytes
            is_troubled = now_s - _troubled_since_s(each, life, now_s) >= TROUBLE_AFTER_S
            each.state = replace(
                each.state,
                age_s=now_s - each.started_s,
                silent_s=life.silent_s,
                is_silent=is_troubled and not life.works,
                trouble=_trouble(each.spec, life) if is_troubled else "",
                is_starved=is_troubled and life.is_starved,
            )
            has_changed |= had_trouble != bool(each.state.trouble)
        if has_changed:
            self._on_change()

    async def run(self) -> None:
        """Starts everything and watches until all have ended. Raises: ServiceError, Error of the launcher."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for each in self._watched.values():
                    group.create_task(self._watch(each), name=f"watch:{each.spec.name}")
        except BaseExceptionGroup as err:
            raise err.exceptions[0] from err
        finally:
            self._group = None
            await self.stop(grace_s=_TERMINATE_GRACE_S)

    async def wait_for_end(self, names: Sequence[str]) -> None:
        """Waits until these processes have ended for good."""
        # An unknown name was retired and has ended.
        for each in [self._watched[name] for name in names if name in self._watched]:
            await each.ended.wait()

    async def stop(self, names: Sequence[str] | None = None, *, grace_s: float = _TERMINATE_GRACE_S) -> None:
        """Asks these processes (by default all) to stop. After `grace_s`, kills those that still run."""
        chosen = [each for name, each in self._watched.items() if names is None or name in names]
        for each in chosen:
            self._stop(each)
        handles = [each.handle for each in chosen if each.handle]
        for handle in handles:
            handle.terminate()
        waits = [asyncio.ensure_future(handle.wait()) for handle in handles]
        if not waits:
            return
        _, late = await asyncio.wait(waits, timeout=grace_s)
        if late:
            for handle in handles:
                handle.kill()
            await asyncio.wait(waits)

    def kill_all(self) -> None:
        """Kills every process."""
        for each in self._watched.values():
            self._stop(each)
            if each.handle:
                each.handle.kill()

    def _stop(self, each: _Watched) -> None:
        """Prevents further starts of a process, including one that still waits for a machine."""
        each.stop.set()
        if each.starting:
            each.starting.reschedule(asyncio.get_running_loop().time())

    async def _watch(self, each: _Watched) -> None:
        try:
            while not each.stop.is_set():
                code = await self._run_once(each)
                each.is_retired |= code == RETIRED_CODE
                if each.stop.is_set() or each.is_retired:
                    self._set(each, state="stopped", exit_code=code)
                    break
                if code == 0 and each.spec.ends_with_run and await self._is_done(each):
                    self._set(each, state="ended", exit_code=code)
                    return
                await self._wait_for_restart(each, code)
            if each.is_retired:
                del self._watched[each.spec.name]
                self._on_change()
        finally:
            each.ended.set()

    def _enter(self, spec: ProcessSpec) -> _Watched:
        backoff = Backoff(limit=spec.max_restarts, first_s=self._first_backoff_s)
        each = self._watched[spec.name] = _Watched(spec, backoff, ServiceState(spec.name))
        return each

    async def _is_done(self, each: _Watched) -> bool:
        """Whether a process that ended with code 0 has done its work.

        The user's own code may have ended it too early. A process may learn earlier than the owner of the
        supervisor that its work is done, so this waits for the owner for a while.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._late_news_s):
                await wait_for_any(each.done, each.stop)
        return each.done.is_set() or each.stop.is_set()

    async def _run_once(self, each: _Watched) -> int:
        handle = await self._start(each)
        if handle is None:
            return 0
        each.handle = handle
        each.started_s = asyncio.get_running_loop().time()
        each.troubled_s = None
        if each.stop.is_set():
            handle.terminate()
        self._set(each, state="running", pid=handle.pid)
        silence = asyncio.create_task(self._kill_when_silent(each, handle), name=f"silence:{each.spec.name}")
        try:
            code = await handle.wait()
        finally:
            silence.cancel()
        each.handle = None
        return code

    async def _start(self, each: _Watched) -> CheckedHandle | None:
        """Starts a process. Returns: None if it was stopped before the launcher had a machine for it."""
        try:
            async with asyncio.timeout(None) as each.starting:
                try:
                    return await start_process(self._launcher, each.spec)
                finally:
                    each.starting = None
        except TimeoutError:
            return None

    async def _kill_when_silent(self, each: _Watched, handle: CheckedHandle) -> None:
        """Kills a process that shows no sign of life for too long; its watch task then restarts it."""
        spec = each.spec
        if spec.longest_silence_s <= 0:
            return
        state = await handle.silence(spec.longest_silence_s)
        _log.warning(
            "%s has shown no sign of life for %.0f s: %s; it is killed and restarted",
            spec.name,
            spec.longest_silence_s,
            state,
        )
        silence = f"{spec.name} has shown no sign of life for {spec.longest_silence_s:.0f} s"
        each.killed_because = f"{silence}: {state}"
        handle.kill()

    async def _wait_for_restart(self, each: _Watched, code: int) -> None:
        """Waits for the backoff or a stop. Raises: ServiceError if the process has failed for good."""
        if code == MACHINE_LOST:
            each.backoff.reset()
        delay_s = each.backoff.next_delay_s()
        is_hopeless = code == USER_ERROR_CODE and not each.has_worked
        name = each.spec.name
        line = self._why_ended(each, code)
        if delay_s is None or is_hopeless:
            self._set(each, state="failed", exit_code=code, last_line=line)
            # The first line says all that matters; below it is the log's end.
            log = each.spec.log_path
            raise ServiceError(
                f"{name} failed for good ({code_text(code)}, {each.backoff.num_crashes} in a row)"
                f"{f': {line}' if line else ''}; its log is {log} and ends with:\n"
                f"{last_lines(log, _TAIL_LINES)}"
            )
        restarts = each.state.restarts + 1
        self._set(each, state="restarting", exit_code=code, restarts=restarts, last_line=line)
        _log.info("%s ended with %d (%s); restart %d in %.1f s", name, code, line, restarts, delay_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await each.stop.wait()

    def _why_ended(self, each: _Watched, code: int) -> str:
        """Why a process ended, in one line; empty if nothing is known. A kill from outside goes into its log,
        which the process itself could not write."""
        spec = each.spec
        used_bytes = each.used_bytes
        killed_because = each.killed_because
        each.used_bytes = 0
        each.killed_because = ""
        if killed_because:
            return killed_because
        if code == MACHINE_LOST:
            return _LOST
        if code not in SIGKILL_CODES:
            return last_lines(spec.log_path, 1).strip() if code > 0 else ""
        now_s = asyncio.get_running_loop().time()
        line = self._memory.cause(now_s, used_bytes, spec.memory_advice) if used_bytes else _KILLED
        with contextlib.suppress(OSError), spec.log_path.open("a", encoding="utf-8") as log:
            log.write(f"--- {spec.name} was {line}\n")
        return line

    def _set(self, each: _Watched, **changes: object) -> None:
        """Changes the state of a process, and resets what was known about its signs of life."""
        unknown = {"age_s": 0.0, "silent_s": None, "is_silent": False, "trouble": "", "is_starved": False}
        each.state = replace(each.state, **{**unknown, **changes})
        self._on_change()


def _troubled_since_s(each: _Watched, life: ProcessLife, now_s: float) -> float:
    """Time at which a process's trouble began; infinity if it has none."""
    if not life.condition:
        each.troubled_s = None
        return math.inf
    if each.troubled_s is None:
        each.troubled_s = now_s
    # The condition of a silent process is known late, but it began with the silence.
    return each.troubled_s if life.works or life.silent_s is None else now_s - life.silent_s


def _trouble(spec: ProcessSpec, life: ProcessLife) -> str:
    """What is wrong with a process, and whether it will be restarted."""
    longest_s = spec.longest_silence_s
    if life.works or life.is_starved or life.silent_s is None or longest_s <= 0:
        return life.condition
    return f"{life.condition}; after {longest_s:.0f} s of silence it is restarted"
