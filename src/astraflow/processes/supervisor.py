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

from msgspec.structs import replace

from astraflow.errors import ServiceError
from astraflow.processes.launcher import CheckedHandle, start_process
from astraflow.protocols import MACHINE_LOST, Launcher, ProcessLife, ProcessSpec
from astraflow.recipe.service_state import TROUBLE_AFTER_S, ServiceState
from astraflow.service.memory import MemoryRecord
from astraflow.service.restarts import SIGKILL_CODES, Backoff, code_text, last_lines

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
"""A process may end this long before the supervisor's owner learns that the work was done. The owner asks the
dataflow twice per second, and the answer may take a while."""


class Supervisor:
    """Runs processes until they end normally, are stopped, or fail for good.

    Example: `supervisor = Supervisor(launcher, specs); await supervisor.run()`. To end it, another task calls
    `await supervisor.stop()`.

    Call `note_done` when a process that ends with the run has done its work. If such a process ends before
    that, it counts as crashed, whatever its exit code. `first_backoff_s`: delay before the first restart.
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
        self._specs: dict[str, ProcessSpec] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._states: dict[str, ServiceState] = {}
        self._retired: set[str] = set()
        """Processes that aren't restarted, and are forgotten when they have ended."""
        self._handles: dict[str, CheckedHandle] = {}
        self._killed_because: dict[str, str] = {}
        self._memory = memory or MemoryRecord()
        self._used_bytes: dict[str, int] = {}
        """The memory that each process of this machine used when it was last looked at."""
        self._starting: dict[str, asyncio.Timeout] = {}
        """Timeouts of the processes whose launcher may still wait for a machine. A stop expires them."""
        self._started_s: dict[str, float] = {}
        self._troubled_s: dict[str, float] = {}
        """Name of a process -> time at which its trouble began."""
        self._has_worked: set[str] = set()
        self._stops: dict[str, asyncio.Event] = {}
        self._done: dict[str, asyncio.Event] = {}
        self._ended: dict[str, asyncio.Event] = {}
        for spec in specs:
            self._enter(spec)

    @property
    def states(self) -> tuple[ServiceState, ...]:
        """The states of all processes, in the order in which they were added."""
        return tuple(self._states.values())

    def note_progress(self, *names: str) -> None:
        """Records that these processes work, so their earlier crashes don't count. Ignores other names."""
        for name in self._backoffs.keys() & set(names):
            self._has_worked.add(name)
            self._backoffs[name].reset()

    def add(self, spec: ProcessSpec) -> None:
        """Starts one more process. Its name must be new."""
        self._enter(spec)
        if self._group is not None:
            self._group.create_task(self._watch(spec), name=f"watch:{spec.name}")
        self._on_change()

    def retire(self, name: str) -> None:
        """Never restarts the process again, and forgets it when it has ended. This doesn't end the process,
        unless it still waits for a machine."""
        self._retired.add(name)
        self._stop(name)

    def terminate(self, name: str) -> None:
        """Asks a process to stop, if it runs."""
        if name in self._handles:
            self._handles[name].terminate()

    def kill(self, name: str) -> None:
        """Kills a process, if it runs."""
        if name in self._handles:
            self._killed_because[name] = "killed by AstraFlow"
            self._handles[name].kill()

    def note_done(self, name: str) -> None:
        """Records that the process has done its work. From now on, exit code 0 is its normal end."""
        self._done[name].set()

    def look(self) -> None:
        """Updates `states` with the signs of life and the troubles of all processes."""
        now_s = asyncio.get_running_loop().time()
        self._memory.look(now_s)
        has_changed = False
        for name, handle in self._handles.items():
            before = self._states[name]
            life = handle.life()
            if life.memory_bytes:
                self._used_bytes[name] = life.memory_bytes
            is_troubled = now_s - self._troubled_since_s(name, life, now_s) >= TROUBLE_AFTER_S
            after = replace(
                before,
                age_s=now_s - self._started_s[name],
                silent_s=life.silent_s,
                is_silent=is_troubled and not life.works,
                trouble=self._trouble(name, life) if is_troubled else "",
                is_starved=is_troubled and life.is_starved,
            )
            self._states[name] = after
            if bool(before.trouble) != bool(after.trouble):
                has_changed = True
        if has_changed:
            self._on_change()

    def _troubled_since_s(self, name: str, life: ProcessLife, now_s: float) -> float:
        """Time at which a process's trouble began; infinity if it has none."""
        if not life.condition:
            self._troubled_s.pop(name, None)
            return math.inf
        since_s = self._troubled_s.setdefault(name, now_s)
        # The condition of a silent process is known late, but it began with the silence.
        return since_s if life.works or life.silent_s is None else now_s - life.silent_s

    def _trouble(self, name: str, life: ProcessLife) -> str:
        """What is wrong with a process, and whether it will be restarted."""
        longest_s = self._specs[name].longest_silence_s
        if life.works or life.is_starved or life.silent_s is None or longest_s <= 0:
            return life.condition
        return f"{life.condition}; after {longest_s:.0f} s of silence it is restarted"

    async def run(self) -> None:
        """Starts everything and watches until all have ended. Raises: ServiceError, Error of the launcher."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for spec in self._specs.values():
                    group.create_task(self._watch(spec), name=f"watch:{spec.name}")
        except BaseExceptionGroup as err:
            raise err.exceptions[0] from err
        finally:
            self._group = None
            await self.stop(grace_s=_TERMINATE_GRACE_S)

    async def wait_for_end(self, names: Sequence[str]) -> None:
        """Waits until these processes have ended for good."""
        # A name without an event was retired and has ended.
        for ended in [self._ended[name] for name in names if name in self._ended]:
            await ended.wait()

    async def stop(self, names: Sequence[str] | None = None, *, grace_s: float = _TERMINATE_GRACE_S) -> None:
        """Asks these processes (by default all) to stop. After `grace_s`, kills those that still run."""
        chosen = [name for name in self._specs if names is None or name in names]
        for name in chosen:
            self._stop(name)
        handles = [self._handles[name] for name in chosen if name in self._handles]
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
        for name in self._specs:
            self._stop(name)
        for handle in self._handles.values():
            handle.kill()

    def _stop(self, name: str) -> None:
        """Prevents further starts of a process, including one that still waits for a machine."""
        self._stops[name].set()
        if name in self._starting:
            self._starting[name].reschedule(asyncio.get_running_loop().time())

    async def _watch(self, spec: ProcessSpec) -> None:
        stop = self._stops[spec.name]
        ended = self._ended[spec.name]
        try:
            while not stop.is_set():
                code = await self._run_once(spec)
                if stop.is_set():
                    self._set(spec.name, state="stopped", exit_code=code)
                elif code == 0 and spec.ends_with_run and await self._is_done(spec):
                    self._set(spec.name, state="ended", exit_code=code)
                    return
                else:
                    await self._wait_for_restart(spec, code)
            if spec.name in self._retired:
                self._forget(spec.name)
        finally:
            ended.set()

    def _enter(self, spec: ProcessSpec) -> None:
        name = spec.name
        self._specs[name] = spec
        self._backoffs[name] = Backoff(limit=spec.max_restarts, first_s=self._first_backoff_s)
        self._states[name] = ServiceState(name)
        self._stops[name] = asyncio.Event()
        self._done[name] = asyncio.Event()
        self._ended[name] = asyncio.Event()

    def _forget(self, name: str) -> None:
        """Removes everything about a process that was retired and has ended."""
        self._retired.discard(name)
        self._has_worked.discard(name)
        kept = (self._specs, self._backoffs, self._states, self._stops, self._done, self._ended)
        times = (self._started_s, self._troubled_s, self._killed_because, self._used_bytes)
        for of_name in (*kept, *times):
            of_name.pop(name, None)
        self._on_change()

    async def _is_done(self, spec: ProcessSpec) -> bool:
        """Whether a process that ended with code 0 has done its work.

        The user's own code may have ended it too early. A process may learn earlier than the owner of the
        supervisor that its work is done, so this waits for the owner for a while.
        """
        waits = [
            asyncio.create_task(event.wait()) for event in (self._done[spec.name], self._stops[spec.name])
        ]
        await asyncio.wait(waits, timeout=self._late_news_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return self._done[spec.name].is_set() or self._stops[spec.name].is_set()

    async def _run_once(self, spec: ProcessSpec) -> int:
        handle = await self._start(spec)
        if handle is None:
            return 0
        self._handles[spec.name] = handle
        self._started_s[spec.name] = asyncio.get_running_loop().time()
        self._troubled_s.pop(spec.name, None)
        if self._stops[spec.name].is_set():
            handle.terminate()
        self._set(spec.name, state="running", pid=handle.pid)
        silence = asyncio.create_task(self._kill_when_silent(spec, handle), name=f"silence:{spec.name}")
        try:
            code = await handle.wait()
        finally:
            silence.cancel()
        del self._handles[spec.name]
        return code

    async def _start(self, spec: ProcessSpec) -> CheckedHandle | None:
        """Starts a process. Returns: None if it was stopped before the launcher had a machine for it."""
        try:
            async with asyncio.timeout(None) as patience:
                self._starting[spec.name] = patience
                try:
                    return await start_process(self._launcher, spec)
                finally:
                    del self._starting[spec.name]
        except TimeoutError:
            return None

    async def _kill_when_silent(self, spec: ProcessSpec, handle: CheckedHandle) -> None:
        """Kills a process that shows no sign of life for too long; its watch task then restarts it."""
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
        self._killed_because[spec.name] = f"{silence}: {state}"
        handle.kill()

    async def _wait_for_restart(self, spec: ProcessSpec, code: int) -> None:
        """Waits for the backoff or a stop. Raises: ServiceError if the process has failed for good."""
        if code == MACHINE_LOST:
            self._backoffs[spec.name].reset()
        delay_s = self._backoffs[spec.name].next_delay_s()
        is_hopeless = code == USER_ERROR_CODE and spec.name not in self._has_worked
        line = self._why_ended(spec, code)
        if delay_s is None or is_hopeless:
            self._set(spec.name, state="failed", exit_code=code, last_line=line)
            raise ServiceError(self._obituary(spec, code, line))
        restarts = self._states[spec.name].restarts + 1
        self._set(spec.name, state="restarting", exit_code=code, restarts=restarts, last_line=line)
        _log.info("%s ended with %d (%s); restart %d in %.1f s", spec.name, code, line, restarts, delay_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stops[spec.name].wait()

    def _why_ended(self, spec: ProcessSpec, code: int) -> str:
        """Why a process ended, in one line; empty if nothing is known. A kill from outside goes into its log,
        which the process itself could not write."""
        used_bytes = self._used_bytes.pop(spec.name, 0)
        if killed_because := self._killed_because.pop(spec.name, ""):
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

    def _obituary(self, spec: ProcessSpec, code: int, line: str) -> str:
        """Why a process isn't restarted. The first line says all that matters; below it is the log's end."""
        num_crashes = self._backoffs[spec.name].num_crashes
        said = f": {line}" if line else ""
        tail = last_lines(spec.log_path, _TAIL_LINES)
        return (
            f"{spec.name} failed for good ({code_text(code)}, {num_crashes} in a row){said}; "
            f"its log is {spec.log_path} and ends with:\n{tail}"
        )

    def _set(self, name: str, **changes: object) -> None:
        """Changes the state of a process, and resets what was known about its signs of life."""
        unknown = replace(
            self._states[name], age_s=0.0, silent_s=None, is_silent=False, trouble="", is_starved=False
        )
        self._states[name] = replace(unknown, **changes)
        self._on_change()
