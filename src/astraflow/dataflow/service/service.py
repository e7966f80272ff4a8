"""The dataflow service of one run: recovers the core, serves the protocol, watches deadlines.

Concurrent parts, all in one event loop:

- Request handlers, one per request. Consume requests; produce commands and replies; wait for a topic (woken
  by `Topics.wake` after a command), for leases (assigned by `LeaseQueue`, in a callback of the loop after a
  command), or for a record to become durable (woken by the flush task).
- The deadline watch, one task. Consumes `Liveness` and the evaluation rounds; produces ExpireLeases,
  DropWorker, ExpireEval; waits for the earliest deadline (woken by `deadline_moved`).
- The journal's flush task. Consumes pending records and payloads; produces durable records; waits for the
  disk, in a thread (started by `append`).
- The journal's task for its tables, and sometimes a compaction. Consume durable records; produce rows and
  snapshots, and delete data that is no longer needed; wait for SQLite, in their own thread.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping, Sequence

import msgspec
from starlette.types import ASGIApp

from astraflow.dataflow.config import DataflowConfig
from astraflow.dataflow.core.commands import ChangeSchedule, ExpireEval, ExpireLeases, ResumeRun
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import RunPlan
from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.journal.records import PolicyFacts, RecordedPlan
from astraflow.dataflow.service.dispatcher import Dispatcher
from astraflow.dataflow.service.liveness import Liveness, WorkerLife
from astraflow.dataflow.service.long_poll import LongPolls
from astraflow.dataflow.service.routes import make_app
from astraflow.dataflow.service.routes_shared import ServedRun
from astraflow.dataflow.service.scaling import WaitShares
from astraflow.dataflow.service.task_lookup import TaskLookup
from astraflow.dataflow.service.trainer_contacts import TrainerContacts
from astraflow.dataflow.service.waiting import wait_until
from astraflow.errors import ComponentError, JournalError
from astraflow.protocols import TaskSource
from astraflow.types import RunInfo, RunState
from astraflow.weights.addresses import PeerRules

__all__ = ["DataflowService"]

_log = logging.getLogger(__name__)
_FAREWELL_S = 1.0
"""Delay that a heartbeat may have when the run is over."""
_MAX_NAMED = 5
"""Most services or leases that a log line names."""
_WORKERS_AT_A_TIME = 50
_LEASES_AT_A_TIME = 500
"""What expires together; other requests are served between two parts."""
_JOURNAL_PAUSE_S = 1.0
"""Time until the next try to expire leases while the journal cannot be written."""


class DataflowService:
    """Serves one run. `start` before the first request, `stop` after the last; the caller owns the socket.

    Example::

        service = DataflowService(plan, sources, eval_sources, run_info, config, Journal(folder))
        await service.start()
        url = await HttpServer(service.app, host=config.host, port=config.port, name="dataflow").start()

    The service owns the journal from then on. It fills in `run_info.run_id` and `run_info.state`: the id is
    the journal's, so it stays the same after a restart.
    """

    def __init__(  # noqa: PLR0917 - the parts of a run, in the order in which `launch` makes them
        self,
        plan: RunPlan,
        sources: Mapping[str, TaskSource],
        eval_sources: Mapping[str, TaskSource],
        run_info: RunInfo,
        config: DataflowConfig,
        journal: Journal,
        *,
        peer_rules: PeerRules | None = None,
        resumes_failed: bool = False,
        shares: WaitShares | None = None,
    ) -> None:
        """Recovers the core. Without `peer_rules`, services don't learn where others serve weights.

        `resumes_failed`: a run that ended with a failure is resumed, because a person asked for it. `shares`
        replace the default wait shares, which cover five minutes.

        Raises: JournalError if the journal cannot be replayed.
        """
        self._plan = plan
        self._journal = journal
        self._resumes_failed = resumes_failed
        first = _with_first_schedule(plan, journal)
        core = journal.recover(
            new=lambda: Core(first), restore=lambda state: Core.from_snapshot(first, state)
        )
        self._liveness = Liveness(config.lease_timeout_s, heartbeat_s=config.heartbeat_s)
        self._dispatcher = Dispatcher(core, journal, self._liveness, shares=shares)
        policies = [msgspec.structs.replace(info, date=journal.date) for info in run_info.policies]
        self._run_info = msgspec.structs.replace(
            run_info, run_id=journal.run_id, state=core.state, policies=tuple(policies)
        )
        self._watch: asyncio.Task[None] | None = None
        self._polls = LongPolls(self._dispatcher)
        self._run = ServedRun(
            self._dispatcher,
            self._polls,
            TaskLookup(core, sources, eval_sources),
            TrainerContacts(
                [*plan.policies], heartbeat_s=config.heartbeat_s, started_s=self._dispatcher.started_s
            ),
            self._run_info,
            config,
            max_tokens={name: policy.max_tokens for name, policy in plan.policies.items()},
            peer_rules=peer_rules or PeerRules(),
        )
        self.app: ASGIApp = make_app(self._run)

    @property
    def state(self) -> RunState:
        """`running`, `finished` or `failed`."""
        return self._dispatcher.core.state

    @property
    def fatal(self) -> asyncio.Event:
        """Set if the core itself failed. End the process then; its supervisor restarts it."""
        return self._dispatcher.fatal

    async def start(self) -> None:
        """Gives new deadlines to leases and services from before a restart, and starts the watch."""
        loop = asyncio.get_running_loop()
        core = self._dispatcher.core
        policies = {
            name: PolicyFacts(
                group_size=policy.table.group_size,
                min_group_size=policy.table.min_group_size,
                groups_per_batch=policy.table.batch_groups,
                staleness_bound=policy.table.max_staleness,
                num_steps=policy.num_steps,
                max_replayed=policy.table.max_replayed,
                replaces_fresh=policy.table.replay.share > 0,
                max_uses=policy.table.replay.max_uses,
            )
            for name, policy in self._plan.policies.items()
        }
        schedule = self._plan.schedule
        recorded = RecordedPlan(
            recipe=self._run_info.recipe,
            policies=policies,
            schedule=schedule,
            most_drawn=self._plan.most_drawn,
        )
        self._journal.note_plan(recorded)
        if core.schedule != schedule:
            self._dispatcher.apply(ChangeSchedule(schedule=schedule))
        if self._resumes_failed and core.state == "failed":
            _log.info("the run had failed: %s", core.reason)
            self._dispatcher.apply(ResumeRun())
        for worker in core.workers():
            life = WorkerLife(worker.worker_id, worker.name, "", worker.hosts, last_seen_s=loop.time())
            self._liveness.add(life)
            self._liveness.grant(core.worker_leases(worker.worker_id), loop.time())
        for life in self._liveness.workers():
            life.heartbeat_s = self._liveness.interval_s  # the longest that it can have been told
        await self._journal.wait_flushed()
        self._watch = asyncio.create_task(self._watch_deadlines(), name="deadline watch")
        self._watch.add_done_callback(self._on_watch_end)
        _log.info("dataflow ready: run %s, %s, record %d", self._run_info.name, core.state, self._journal.seq)

    async def say_farewell(self) -> None:
        """Waits until every service has learned that the run is over, or has had time for two heartbeats."""
        if self.state == "running":
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * self._liveness.interval_s + _FAREWELL_S):
                while not self._liveness.all_know_the_end:
                    self._liveness.farewells_changed.clear()
                    await self._liveness.farewells_changed.wait()

    async def stop(self) -> None:
        """Answers all waiting requests, writes a snapshot and closes the journal. Raises: JournalError."""
        self._polls.stop()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
            self._watch = None
        if not self._dispatcher.fatal.is_set():
            try:
                self._journal.snapshot(self._dispatcher.core)
            except ComponentError as err:
                _log.error("no snapshot was written: %s; the next start replays the journal", err)
        await self._journal.close()

    def _on_watch_end(self, task: asyncio.Task[None]) -> None:
        """Ends the service if the watch failed, because without it nothing would expire."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("the deadline watch failed", exc_info=error)
            self._dispatcher.fatal.set()

    async def _watch_deadlines(self) -> None:
        loop = asyncio.get_running_loop()
        dispatcher = self._dispatcher
        while True:
            dispatcher.deadline_moved.clear()
            deadline_s = min(
                self._liveness.next_deadline_s(),
                self._liveness.next_silence_s(),
                dispatcher.round_deadline_s(),
            )
            if self._journal.failure is not None:
                deadline_s = max(deadline_s, loop.time() + _JOURNAL_PAUSE_S)
            dispatcher.watched_until_s = deadline_s
            await wait_until(dispatcher.deadline_moved, deadline_s)
            if loop.time() >= deadline_s:
                self._log_silence(loop.time())
                await self._expire(loop.time())

    def _log_silence(self, now_s: float) -> None:
        silent = self._liveness.newly_silent(now_s)
        if not silent:
            return
        _log.warning(
            "no sign of life for %.0f s of %s; stopped, hanging, or cut off from the dataflow; leases are "
            "issued again %.0f s after their last heartbeats",
            now_s - min(worker.last_seen_s for worker in silent),
            _format_services([f"{worker.name} {worker.id}" for worker in silent]),
            self._liveness.timeout_s,
        )

    async def _expire(self, now_s: float) -> None:
        """Turns what is overdue into commands, a part at a time.

        While the journal cannot be written, it stays overdue.
        """
        core = self._dispatcher.core
        try:
            if dropped := self._liveness.overdue_workers(now_s):
                _log.warning("still silent, so their leases are reissued: %s", _format_services(dropped))
            while dropped := self._liveness.overdue_workers(now_s)[:_WORKERS_AT_A_TIME]:
                for worker_id in dropped:
                    self._dispatcher.drop_worker(worker_id, "heartbeats stopped")
                await asyncio.sleep(0)
            while overdue := self._liveness.overdue_leases(now_s)[:_LEASES_AT_A_TIME]:
                live = tuple(lease_id for lease_id in overdue if core.lease(lease_id) is not None)
                if live:
                    few = _first_few(live)
                    _log.warning("%d leases without heartbeats are reissued: %s", len(live), few)
                    self._dispatcher.apply(ExpireLeases(lease_ids=live))
                self._liveness.end(overdue)
                await asyncio.sleep(0)
            if self._dispatcher.round_deadline_s() <= now_s:
                rounds = core.eval_deadlines()
                earliest_s = min((deadline_s for _, deadline_s in rounds), default=math.inf)
                for round_id in [round_id for round_id, deadline_s in rounds if deadline_s <= earliest_s]:
                    self._dispatcher.apply(ExpireEval(round_id=round_id))
        except JournalError as err:
            _log.warning("overdue leases and services cannot expire now: %s", err)


def _format_services(services: Sequence[str]) -> str:
    """Rollout services for a log line: their number and the first few names."""
    return f"{len(services)} rollout service{'s' if len(services) > 1 else ''} ({_first_few(services)})"


def _first_few(names: Sequence[str]) -> str:
    rest = ", ..." if len(names) > _MAX_NAMED else ""
    return f"{', '.join(names[:_MAX_NAMED])}{rest}"


def _with_first_schedule(plan: RunPlan, journal: Journal) -> RunPlan:
    """The plan with the first schedule of the journal, under which its first records were decided; later
    records change the schedule. Raises: JournalError."""
    with journal.reader() as reader:
        plans = reader.plans()
    return plan.with_schedule(plans[0][1].schedule) if plans else plan
