"""A run with real services: starts them, follows the dataflow, and ends them.

Loops of a `Run`, all in one TaskGroup that `launch` owns:

    supervise      processes -> restarts; a ServiceError ends the run; woken by process ends
    follow steps   one per policy: long-polls the dataflow -> metrics.jsonl, view, supervisor, `steps`
    follow evals   long-polls the dataflow -> metrics.jsonl, view, `evals`, pages
    follow end     waits for the other followers -> ends the processes in order, sets the result of `wait`
    show           twice per second: signs of life, status -> view, run.json (for display; nothing waits for
                   it), and the pool if it sizes itself: services -> started, asked to leave, ended

However a run ends, its processes are stopped, the reason is written to run.json, and the report is made.
Pages, such as trackers, have their own threads and processes.

An interrupted run is durable: the same folder resumes it later. Nothing here decides about data.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from msgspec.structs import replace

from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.service.clock import SteadyClock
from astraflow.errors import ConfigError, ServiceError, UnavailableError
from astraflow.processes.launcher import make_launcher, with_reachable_hosts
from astraflow.processes.pool import Pool, make_pool
from astraflow.processes.program import Addresses, check_files, choose_addresses, program
from astraflow.processes.supervisor import Supervisor
from astraflow.protocols import Launcher, ProcessSpec
from astraflow.recipe.access import needs_tokens
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.resume import check_resume, redo_notes
from astraflow.recipe.run_folder import RunFolder, RunRecord
from astraflow.report.ending import ABANDONED, reason_of
from astraflow.report.metrics_log import MetricsLog
from astraflow.report.report import write_report
from astraflow.report.view import FINISHED_S, INTERRUPTED_S, RunPage, ShownRun, View, make_pages
from astraflow.report.watch.disk import DiskGauge
from astraflow.report.watch.run_snapshot import RunSnapshot, StepMemory
from astraflow.report.watch.watchdog import AlarmUpdate, Watchdog, cleared_text
from astraflow.run.at_work import find_working, note_done, trainers_at_work
from astraflow.run.hub_models import with_fetched_models
from astraflow.run.preflight import check_recipe
from astraflow.service.client import ServiceClient
from astraflow.trainer.loop import STEP_S, STOP_S
from astraflow.types import EvalRecord, RunState, StatusReply, StepRecord
from astraflow.types.alarm import Alarm
from astraflow.user_input.mistakes import as_written, hint
from astraflow.user_input.own_code import first_error

__all__ = ["Run", "launch"]

_FeedT = TypeVar("_FeedT")
_log = logging.getLogger(__name__)

_SHOW_EVERY_S = 0.5
_LONGEST_POLL_S = 25.0
"""A long poll returns after this time, even without news."""
_UNANSWERED_S = 8.0
"""Time without an answer from the dataflow after which there is an alarm. A status may take 2 s or more."""
_SAVE_EVERY = 10
"""Number of refreshes between two writes of run.json, which records how long the launcher has run."""
_WORKERS_GRACE_S = 2.4
"""Time for rollout services to stop, and for trainers if the run has failed. After a restart, they redo what
a kill lost."""
_TRAINERS_GRACE_S = STEP_S + STOP_S + 1.0
"""Time for the trainers of an interrupted run, which finish their step and save it."""
_STORES_GRACE_S = 1.0
"""Time for the dataflow and the publishers, which stop last."""
_LAST_CHECKPOINT_S = 120.0
"""Time that a trainer may take after its last commit."""
_LAST_PAGES_S = 120.0
"""Time that pages may take at the end, e.g. to write the best version, before the processes end."""
_LAST_ROLLOUT_S = 10.0
"""Time that a rollout service may take to end after the run is over."""


class _Feed(Generic[_FeedT]):
    """Records in order, for any number of readers. Each reads from the start. Readers are woken, not
    polled."""

    def __init__(self) -> None:
        self._items: list[_FeedT] = []
        self._changed = asyncio.Event()
        self._is_closed = False

    def add(self, item: _FeedT) -> None:
        self._items.append(item)
        self._wake()

    def close(self) -> None:
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        event = self._changed
        self._changed = asyncio.Event()
        event.set()

    async def __aiter__(self) -> AsyncIterator[_FeedT]:
        idx = 0
        while True:
            changed = self._changed
            while idx < len(self._items):
                yield self._items[idx]
                idx += 1
            if self._is_closed:
                return
            await changed.wait()


class Run:
    """A run whose services are running or starting, made by `launch`.

    Example: `async for step in run.steps("solver"): print(step.number, step.reward_mean)`.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        addresses: Addresses,
        view: View,
        *,
        pages: Sequence[RunPage] = (),
        module_path: tuple[str, ...] = (),
    ) -> None:
        self.recipe = recipe
        self.folder = folder
        self.url = addresses.url
        self._ports = {"dataflow": addresses.dataflow[1]}
        self._ports |= {f"publisher-{name}": port for name, (_, port) in addresses.publishers.items()}
        self._view = view
        self._module_path = module_path
        self._loop = asyncio.get_running_loop()
        token = folder.token("admin") if needs_tokens(recipe) else ""
        ca_file = recipe.dataflow.tls.ca_file
        self._http = ServiceClient(self.url, token=token, patience_s=60.0, ca_file=ca_file)
        self._quick_http = ServiceClient(self.url, token=token, patience_s=0.0, ca_file=ca_file)
        self._client = DataflowClient(self._http)
        self._metrics = MetricsLog(folder.metrics)
        self._pages = tuple(pages)
        self._steps = {name: _Feed[StepRecord]() for name in recipe.trained}
        self._evals = _Feed[EvalRecord]()
        self._watchdog = Watchdog()
        self._skew_s = 0.0
        """Seconds by which the dataflow's clock, which all times refer to, is ahead of this machine's."""
        self._disk = DiskGauge(folder)
        self._memory = StepMemory()
        self._alarms: tuple[Alarm, ...] = ()
        """The current alarms."""
        self._state: RunState = "running"
        self._reason = ""
        """Why the run ended; the first reason wins."""
        self._ended = asyncio.Event()
        self._is_stopped = False
        """Whether `run.json` has the state that the run ended with."""
        self._followers: list[asyncio.Task[None]] = []
        self._save_failure: OSError | None = None
        self._is_failure_noted = False
        self._clock = SteadyClock()
        self._begin_s = self._clock()
        self._earlier = folder.load_record().active if folder.record.is_file() else ()
        self._supervisor: Supervisor | None = None
        self._pool = Pool(())

    # --- for the caller ---

    def steps(self, policy: str) -> AsyncIterator[StepRecord]:
        """Yields the steps of a policy that are committed during this start of the run, until the run ends.

        Raises: ConfigError if the recipe does not train the policy.
        """
        if policy not in self._steps:
            raise ConfigError(f"policy {policy!r} has no trainer{hint(policy, list(self._steps))}")
        return aiter(self._steps[policy])

    def evals(self) -> AsyncIterator[EvalRecord]:
        """Yields evaluation rounds that finish during this start of the run, until the run ends."""
        return aiter(self._evals)

    async def status(self) -> StatusReply:
        """Returns the current status. Raises: UnavailableError while the dataflow does not answer."""
        return await DataflowClient(self._quick_http).status()

    async def wait(self) -> RunState:
        """Waits until the run is over and its processes have ended; returns `finished` or `failed`."""
        await self._ended.wait()
        return self._state

    def note_stop(self, reason: str) -> None:
        """Records why the caller leaves the block of `launch`, unless the run has already ended."""
        self._reason = self._reason or reason

    def kill(self) -> None:
        """Kills all processes. Durable data is kept."""
        for page in self._pages:
            page.kill()
        if self._supervisor is not None:
            self._supervisor.kill_all()

    def leave_at_once(self, reason: str) -> None:
        """Records why the launcher exits now, without waiting for anything."""
        self.note_stop(reason)
        self.folder.release()
        self._try_to_save("stopped" if self._state == "running" else self._state)

    # --- life ---

    def start(self, group: asyncio.TaskGroup, starter: Launcher, specs: Sequence[ProcessSpec]) -> None:
        """Starts the processes, and all loops in `group`."""
        self._pool = make_pool(self.recipe, self.folder, specs, self._clock)
        supervisor = Supervisor(starter, self._pool.first_specs, on_change=self.note_change)
        self._supervisor = supervisor
        self.folder.summary.unlink(missing_ok=True)  # from an earlier end of the run
        self._save("running")
        if self.recipe.max_services == 0:
            token = f" --token-file {self.folder.secrets / 'worker'}" if needs_tokens(self.recipe) else ""
            self._view.note(
                f"this run starts no rollout services; add one with: astraflow join {self.url}{token}"
            )
        for record in self._metrics.earlier_evals:
            self._view.recall(record)

        def begin(loop: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
            return group.create_task(self._run_loop(loop), name=name)

        begin(supervisor.run, "supervise")
        feeds = [partial(self._follow_steps, name) for name in self.recipe.trained]
        followers = [begin(feed, "follow") for feed in (*feeds, self._follow_evals)]
        followers.append(begin(partial(self._follow_end, list(followers), supervisor), "follow end"))
        followers.append(begin(partial(self._show, supervisor), "show"))
        self._followers = followers

    async def open_pages(self) -> None:
        """Opens the pages of the run. A page that cannot be opened is skipped, with a note to the user."""
        for page in self._pages:
            try:
                await page.open(self._note_soon)
            except OSError as err:
                self._view.note(f"there is no page about this run: {err}")

    def _wake_pages(self) -> None:
        for page in self._pages:
            page.wake()

    async def _run_loop(self, loop: Callable[[], Awaitable[None]]) -> None:
        """Runs one of the loops. If an error ends it, records that error as the reason why the run failed."""
        with self.record_failure():
            await loop()

    @contextmanager
    def record_failure(self) -> Generator[None]:
        """Records an exception that leaves the block as the reason why the run failed."""
        try:
            yield
        except Exception as err:
            if self._state == "running":
                self._state = "failed"
                self._reason = reason_of(err)
            raise

    async def stop(self) -> None:
        """Stops the running processes, workers first, and records the state of the run."""
        for task in self._followers:
            task.cancel()
        deadline_s = FINISHED_S if self._state == "finished" else INTERRUPTED_S
        closing = [asyncio.create_task(page.close(deadline_s)) for page in self._pages]
        if self._supervisor is not None:
            workers = [state.name for state in self._supervisor.states if state.name not in self._ports]
            training = trainers_at_work(self._supervisor) if self._state == "running" else []
            others = [name for name in workers if name not in training]
            await asyncio.gather(
                self._supervisor.stop(others, grace_s=_WORKERS_GRACE_S),
                self._supervisor.stop(training, grace_s=_TRAINERS_GRACE_S),
            )
            await self._supervisor.stop(grace_s=_STORES_GRACE_S)
        self._pool.close()
        for feed in (*self._steps.values(), self._evals):
            feed.close()
        self.folder.release()  # from here on, nothing else writes to the disk
        self._is_stopped = True
        self._try_to_save("stopped" if self._state == "running" else self._state)
        for closed in closing:
            await closed
        self._metrics.close()
        self._note_failure()
        await self._http.close()
        await self._quick_http.close()

    def _save(self, state: str) -> None:
        services = self._supervisor.states if self._supervisor else ()
        record = RunRecord(
            name=self.recipe.name,
            url=self.url,
            state=state,
            launcher_pid=os.getpid(),
            at_s=self._clock(),
            reason="" if state == "running" else self._reason or ABANDONED,
            active=(*self._earlier, (self._begin_s, self._clock())),
            services=tuple(replace(each, port=self._ports.get(each.name, 0)) for each in services),
            alarms=self._alarms if state == "running" else (),
            pool=self._pool.text if state == "running" else "",
            module_path=self._module_path,
        )
        self.folder.save_record(record)

    def note_change(self) -> None:
        """Writes run.json, because a process started or ended, or some time has passed."""
        if not self._ended.is_set() and not self._is_stopped:
            self._try_to_save("running")

    def _try_to_save(self, state: str) -> None:
        """Writes run.json. A full disk doesn't end the run, since the file is only for display."""
        try:
            self._save(state)
            self._save_failure = None
        except OSError as err:
            self._save_failure = err
        self._metrics.retry()
        self._note_failure()

    def _note_soon(self, text: str) -> None:
        """Shows a message, from any thread."""
        self._loop.call_soon_threadsafe(self._view.note, text)

    def _note_failure(self) -> None:
        """Tells the user once if the run folder can't be written, and once when it can be written again."""
        failure = self._metrics.failure or self._save_failure
        if failure is not None and not self._is_failure_noted:
            self._view.note(
                f"{self.folder.path} cannot be written: {failure}; the run continues, and writes the missing "
                "records once there is space"
            )
        elif failure is None and self._is_failure_noted:
            self._view.note(f"{self.folder.path} can be written again")
        self._is_failure_noted = failure is not None

    # --- loops ---

    async def _follow_steps(self, policy: str) -> None:
        after = self._metrics.last_step(policy)
        is_over = False
        records: tuple[StepRecord, ...] = ()
        while not is_over:
            is_over = not records and await self._is_over()
            records = ()
            with contextlib.suppress(UnavailableError):
                records = await self._client.steps(policy, after, 0.0 if is_over else _LONGEST_POLL_S)
            for record in records:
                after = record.step
                self._take_step(record)
        self._steps[policy].close()

    def _take_step(self, record: StepRecord) -> None:
        self._metrics.write(record)
        self._wake_pages()
        self._note_failure()
        self._steps[record.policy].add(record)
        self._view.step(record)
        self._memory.add(record)
        nodes = range(1, self.recipe.policies[record.policy].train.nodes)
        agents = [f"node-{record.policy}-{node}" for node in nodes]
        own = ("dataflow", f"publisher-{record.policy}", f"trainer-{record.policy}")
        if self._supervisor is not None:
            self._supervisor.note_progress(*own, *agents)

    async def _follow_evals(self) -> None:
        is_over = False
        while not is_over:
            is_over = await self._is_over()
            with contextlib.suppress(UnavailableError):
                for record in await self._client.evals(
                    self._metrics.num_evals, 0.0 if is_over else _LONGEST_POLL_S
                ):
                    self._metrics.write(record)
                    self._wake_pages()
                    self._note_failure()
                    self._evals.add(record)
                    self._view.evaluated(record)
                    for page in self._pages:
                        page.evaluated(record)
        self._evals.close()

    async def _is_over(self) -> bool:
        """Returns whether the dataflow reports that the run is over.

        Call this before a poll, so that the last poll misses no record. It isn't needed after a poll that
        returned records, because the next poll can't be the last one.
        """
        with contextlib.suppress(UnavailableError):
            return (await self._client.status()).state in {"finished", "failed"}
        return False

    async def _follow_end(self, feeds: list[asyncio.Task[None]], supervisor: Supervisor) -> None:
        await asyncio.wait(feeds)
        status = await self._client.status()
        self._reason = status.reason
        if status.state == "failed":
            self._state = "failed"
            raise ServiceError(f"the run failed: {status.reason}")
        names = [state.name for state in supervisor.states]
        for prefix, longest_s in (("trainer-", _LAST_CHECKPOINT_S), ("rollout-", _LAST_ROLLOUT_S)):
            chosen = [name for name in names if name.startswith(prefix)]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(longest_s):
                    await supervisor.wait_for_end(chosen)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_PAGES_S):
                for page in self._pages:
                    await page.settle()
        await supervisor.stop()
        self._state = "finished"
        self._ended.set()

    async def _show(self, supervisor: Supervisor) -> None:
        answered_s = math.inf
        for turn in itertools.count():
            supervisor.look()
            status = None
            with contextlib.suppress(UnavailableError):
                status = await self.status()
                answered_s = self._clock()
            if status is not None:
                supervisor.note_progress(*find_working(status, supervisor))
                await self._size(status, supervisor)
                note_done(status, supervisor)
            alarms = self._watch(status, supervisor, max(0.0, self._clock() - answered_s))
            self._view.status(status, supervisor.states, alarms)
            if turn % _SAVE_EVERY == 0:
                self.note_change()
            await asyncio.sleep(_SHOW_EVERY_S)

    async def _size(self, status: StatusReply, supervisor: Supervisor) -> None:
        """Adapts the number of services to the load if the pool sizes itself."""
        look = self._pool.look(status, supervisor)
        if look.note:
            self._view.note(look.note)
        for handle in look.asked_to_leave:
            with contextlib.suppress(UnavailableError):  # the next round asks again
                await DataflowClient(self._quick_http).ask_to_leave(handle)

    def _watch(self, status: StatusReply | None, supervisor: Supervisor, unanswered_s: float) -> AlarmUpdate:
        """Lets the watchdog check the run, and logs changes of its alarms."""
        if status is not None:
            self._skew_s = status.now_s - self._clock()
        update = self._watchdog.look(
            RunSnapshot(
                now_s=self._clock() + self._skew_s,
                status=status,
                services=supervisor.states,
                steps=self._memory.steps,
                unanswered_s=unanswered_s if unanswered_s > _UNANSWERED_S else 0.0,
                disk=self._disk.measure(),
            )
        )
        for alarm in update.raised:
            _log.warning("%s: %s", alarm.rule, alarm.text)
        for alarm in update.cleared:
            _log.info("%s", cleared_text(alarm))
        self._alarms = update.alarms
        if update.raised or update.cleared:
            self.note_change()
        return update


@asynccontextmanager
async def launch(
    recipe: Recipe,
    run_dir: str | Path,
    *,
    view: View | None = None,
    pages: Sequence[RunPage] | None = None,
    module_path: tuple[str, ...] = (),
    launcher: Launcher | None = None,
) -> AsyncGenerator[Run]:
    """Starts all services of a recipe; leaving the block stops them.

    If the folder has an interrupted or failed run of the recipe, that run is resumed. A finished run is
    resumed if the recipe has more steps. `module_path` has the folders with the recipe's own modules. `pages`
    show the run; None means the pages of installed packages that need neither a terminal nor a browser.
    `launcher` replaces the recipe's launcher, and is closed at the end.

    Raises: ConfigError or DataError before anything starts; ServiceError if a process fails for good.
    """
    folder = RunFolder(Path(os.path.realpath(run_dir)))  # noqa: ASYNC240 # before anything else runs
    tell = view.note if view is not None else _log.info
    recipe = await asyncio.to_thread(with_fetched_models, recipe, folder.path, tell)
    recipe = check_recipe(recipe, folder.path).recipe
    with folder.lock(), contextlib.closing(launcher or make_launcher(recipe.launcher)) as starter:
        recipe = with_reachable_hosts(recipe, starter)
        earlier = folder.load_record().services if folder.record.is_file() else ()
        addresses = choose_addresses(recipe, {each.name: each.port for each in earlier if each.port})
        _prepare(folder, recipe, tell)
        folder.reserve()
        if pages is None:
            viewed = ShownRun(recipe=recipe, where=str(run_dir), folder=folder, module_path=module_path)
            pages = make_pages(viewed)
        run = Run(recipe, folder, addresses, view or View(), pages=pages, module_path=module_path)
        try:
            async with asyncio.TaskGroup() as group:
                try:
                    with run.record_failure():
                        specs = program(recipe, folder, addresses, module_path=module_path)
                        check_files(specs)
                        run.start(group, starter, specs)
                        await run.open_pages()
                    yield run
                except BaseException as err:
                    run.note_stop(reason_of(err))
                    raise
                finally:
                    await run.stop()
        except BaseExceptionGroup as err:
            raise first_error(err) from None
        finally:
            await asyncio.to_thread(_report, folder, recipe)


def _report(folder: RunFolder, recipe: Recipe) -> None:
    """Makes the report of a run, however it ended. An error here must not hide why the run ended."""
    try:
        write_report(folder, recipe)
    except Exception:  # noqa: BLE001 - a broken matplotlib, for example; it is logged
        _log.exception("the report on %s could not be made", folder.path)


def _prepare(folder: RunFolder, recipe: Recipe, tell: Callable[[str], None]) -> None:
    """Creates the folder, or checks that its run can be resumed with the recipe. Records the changes, and
    tells what will be trained again."""
    folder.create()
    if folder.recipe.is_file():
        changes, done, has_more_steps = check_resume(folder, recipe)
        if folder.is_finished and not has_more_steps:
            raise ConfigError(
                f"{folder.path} holds a finished run of {max(done.values(), default=0)} steps; raise "
                f"{as_written('policies.*.train.steps')} or `stop` to train longer, or pass another folder "
                "to start a new run"
            )
        if changes:
            folder.note_changes(changes)
        for text in redo_notes(folder, recipe, done):
            tell(text)
    folder.save_recipe(recipe)
    folder.resume.touch()
