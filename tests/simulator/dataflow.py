"""The dataflow service under virtual time: the real core and liveness, and the delivery rules around them.

What the service does with sockets, threads and a disk is modelled: requests that find nothing are parked and
looked at again when their topic is woken; an answer goes out when all that it rests on is durable; a crash
loses a part of what is not, and a restart is the latest snapshot and a replay of the commands since.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from astraflow.dataflow.core.commands import (
    AddTasks,
    AddWorker,
    AttachTrainer,
    BatchView,
    ChangeSchedule,
    Command,
    CommitStep,
    DropWorker,
    Event,
    ExpireEval,
    ExpireLeases,
    IssueLeases,
    LeaseIssued,
    PublishVersion,
    RecordResult,
    ReleaseSteps,
    RunResumed,
    StopRun,
    TakeBatch,
)
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import Schedule
from astraflow.dataflow.service.liveness import Liveness, WorkerLife
from astraflow.errors import RefusedError
from astraflow.types import (
    EpisodeReceipt,
    HeartbeatReply,
    LeaseReply,
    Load,
    ServedVersions,
    Task,
    VersionsReply,
)
from simulator.clock import World
from simulator.referee import Referee
from simulator.scenario import LEASE_TIMEOUT_S, POLL_S, Scenario

__all__ = ["Dataflow", "Record"]

Record = tuple[Command, float, tuple[Event, ...]]
Answer = Callable[[object], None]
_SNAPSHOT_EVERY = 60
"""Records between snapshots."""


@dataclass(slots=True)
class _Parked:
    topic: str
    look: Callable[[], object | None]
    answer: Answer
    or_else: Callable[[], object | None]
    again_s: Callable[[], float]
    """When to look again without a wake-up."""
    is_waiting: bool = True


class Dataflow:
    """Serves one simulated run; `crash` at any time."""

    def __init__(self, world: World, scenario: Scenario, referee: Referee) -> None:
        self._world, self._plan, self._referee = world, scenario.plan, referee
        self.records: list[Record] = []
        self._snapshot: tuple[int, bytes] | None = None
        self._life = 0
        """Which life of the process this is: what an earlier one began is forgotten."""
        self.is_up = False
        self.is_disk_slow = False
        self._start(Core(self._plan))

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self._world.now_s

    @property
    def is_over(self) -> bool:
        """Whether the run's end is durable."""
        return self.is_up and self.core.state != "running" and self._durable == len(self.records)

    def handle(self, method: str, args: tuple[Any, ...], answer: Answer) -> None:
        """One request. A refusal is its answer; while the process is down there is none."""
        if not self.is_up:
            return
        try:
            getattr(self, f"_on_{method}")(answer, *args)
        except RefusedError as refusal:
            self._world.tell("dataflow refuses %s: %s", method, refusal)
            answer(refusal)

    # --- life and death ---

    def _start(self, core: Core) -> None:
        self.core, self.is_up = core, True
        self.liveness = Liveness(LEASE_TIMEOUT_S)
        self._parked: dict[str, list[_Parked]] = {}
        self._durable = len(self.records)
        self._unsent: list[tuple[int, Answer, object]] = []
        self._is_flushing = False
        self._newest_ask: dict[str, object] = {}
        for worker in core.workers():
            self.liveness.add(
                WorkerLife(worker.worker_id, worker.name, "", worker.hosts, last_seen_s=self._world.now_s)
            )
            self.liveness.grant(core.worker_leases(worker.worker_id), self._world.now_s)
        self._watch(self._life)

    def crash(self, down_s: float) -> None:
        """The process dies; records that nobody was told of may be lost, the newest first."""
        if not self.is_up:
            return
        world = self._world
        self._referee.check_replay(self.core, self.records)
        kept = world.rng.randint(self._durable, len(self.records))
        world.tell("dataflow dies: %d of its last %d records are lost", len(self.records) - kept, kept)
        del self.records[kept:]
        if self._snapshot is not None and self._snapshot[0] > kept:
            self._snapshot = None
        self.is_up = False
        self._life += 1
        world.after(down_s, self._restart)

    def _restart(self) -> None:
        after, core = 0, Core(self._plan)
        if self._snapshot is not None:
            after, data = self._snapshot
            core = Core.from_snapshot(self._plan, data)
        for command, now_s, events in self.records[after:]:
            if core.apply(command, now_s).events != events:
                self._referee.problem(f"replay of {command} leads to other events")
        self._world.tell("dataflow is back: record %d, snapshot %d", len(self.records), after)
        self._start(core)

    def _watch(self, life: int) -> None:
        """Looks for what is overdue, at the earliest deadline and at least once per second."""
        if life != self._life or not self.is_up:
            return
        now_s, core, liveness = self._world.now_s, self.core, self.liveness
        for worker_id in liveness.overdue_workers(now_s):
            leases = core.worker_leases(worker_id)
            self._apply(DropWorker(worker_id=worker_id, reason="heartbeats stopped"))
            liveness.end(leases)
            liveness.drop(worker_id)
        overdue = liveness.overdue_leases(now_s)
        live = tuple(lease_id for lease_id in overdue if core.lease(lease_id) is not None)
        if live:
            self._apply(ExpireLeases(lease_ids=live))
        liveness.end(overdue)
        for round_id, deadline_s in core.eval_deadlines():
            if deadline_s <= now_s:
                self._apply(ExpireEval(round_id=round_id))
        self._world.after(1.0, self._watch, life)

    def change_schedule(self, schedule: Schedule) -> None:
        """A person resumes the run with another schedule, and with no fewer steps than are done."""
        done = {status.name: status.step for status in self.core.policy_status()}
        steps = {name: max(asked, done[name]) for name, asked in schedule.steps.items()}
        was_over = self.core.state != "running"
        self._apply(ChangeSchedule(schedule=replace(schedule, steps=steps)))
        if was_over and any(isinstance(event, RunResumed) for event in self.records[-1][2]):
            self._referee.resumed(done)

    # --- commands, records, answers ---

    def _apply(self, command: Command) -> Any:
        now_s = self._world.now_s
        decision = self.core.apply(command, now_s)
        if decision.events or not isinstance(command, IssueLeases | TakeBatch):
            self.records.append((command, now_s, decision.events))
            self._world.tell("dataflow #%d %s", len(self.records), command)
            for event in decision.events:
                self._world.tell("    %s", event)
            self._flush()
            if len(self.records) % _SNAPSHOT_EVERY == 0:
                self._snapshot = (len(self.records), self.core.snapshot())
            issued = [event.lease_id for event in decision.events if isinstance(event, LeaseIssued)]
            self.liveness.grant(issued, now_s)
        self._referee.watch(self.core)
        if self.core.state != "running":
            self._wake(tuple(self._parked))
        self._wake(decision.wakes)
        return decision.answer

    def _flush(self) -> None:
        if self._is_flushing or self._durable == len(self.records):
            return
        self._is_flushing = True
        delay_s = self._world.rng.random() * (3.0 if self.is_disk_slow else 0.02)
        self._world.after(delay_s, self._flushed, self._life, len(self.records))

    def _flushed(self, life: int, num: int) -> None:
        if life != self._life:
            return
        self._is_flushing, self._durable = False, num
        unsent, self._unsent = self._unsent, []
        for after, answer, value in unsent:
            if after <= num:
                answer(value)
            else:
                self._unsent.append((after, answer, value))
        self._flush()

    def _settle(self, answer: Answer, value: object) -> None:
        """Answers as soon as everything that the answer rests on is durable."""
        if self._durable == len(self.records):
            answer(value)
        else:
            self._unsent.append((len(self.records), answer, value))

    def _poll(
        self,
        topic: str,
        look: Callable[[], object | None],
        answer: Answer,
        or_else: Callable[[], object | None] = lambda: None,
        again_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Answers with what `look` finds now, after a wake-up or at `again_s`, or what is there after the
        longest wait."""
        found = look()
        if found is not None or self.core.state != "running":
            self._settle(answer, found if found is not None else or_else())
            return
        parked = _Parked(topic, look, answer, or_else, again_s)
        self._park(parked)
        self._world.after(POLL_S, self._poll_ends, self._life, parked)

    def _park(self, parked: _Parked) -> None:
        self._parked.setdefault(parked.topic, []).append(parked)
        if math.isfinite(at_s := parked.again_s()):
            self._world.after(at_s - self._world.now_s + 0.001, self._time_has_come, self._life, parked)

    def _time_has_come(self, life: int, parked: _Parked) -> None:
        waiting = self._parked.get(parked.topic, ())
        if life == self._life and any(other is parked for other in waiting):
            self._parked[parked.topic].remove(parked)
            self._look_again(life, parked)

    def _wake(self, topics: Iterable[str]) -> None:
        for topic in {"leases" if topic.startswith("worker/") else topic: None for topic in topics}:
            for parked in self._parked.pop(topic, ()):
                self._world.after(0.0, self._look_again, self._life, parked)

    def _look_again(self, life: int, parked: _Parked) -> None:
        if life != self._life or not parked.is_waiting:
            return
        try:
            found = parked.look()
        except RefusedError as refusal:
            parked.is_waiting = False
            parked.answer(refusal)
            return
        if found is not None or self.core.state != "running":
            parked.is_waiting = False
            self._settle(parked.answer, found if found is not None else parked.or_else())
        else:
            self._park(parked)

    def _poll_ends(self, life: int, parked: _Parked) -> None:
        waiting = self._parked.get(parked.topic, ())
        if life != self._life or not any(other is parked for other in waiting):
            return
        self._parked[parked.topic].remove(parked)
        parked.is_waiting = False
        # An episode that was left to another service comes back when that one is no longer at work.
        may_come_late = math.isfinite(parked.again_s())
        try:
            found = parked.look()
        except RefusedError as refusal:
            self._referee.problem(f"a wait for {parked.topic} was not woken to be refused: {refusal}")
            found = None
        if found and not may_come_late:
            self._referee.problem(f"a wait for {parked.topic} was not woken for {found}")
        self._settle(parked.answer, found if found is not None else parked.or_else())

    # --- rollout services ---

    def _on_register(self, answer: Answer, name: str) -> None:
        worker_id = f"{name}.{len(self.records)}"
        hosts = tuple(self._plan.policies)
        self._apply(AddWorker(worker_id=worker_id, name=name, hosts=hosts))
        self.liveness.add(WorkerLife(worker_id, name, "", hosts, self._world.now_s))
        self._settle(answer, worker_id)

    def _on_heartbeat(
        self, answer: Answer, worker_id: str, lease_ids: tuple[str, ...], served: tuple[ServedVersions, ...]
    ) -> None:
        state = self.core.state
        if self.liveness.has_left(worker_id):
            self._settle(answer, HeartbeatReply(revoked=lease_ids, state=state, is_draining=True))
            return
        worker = self._known(worker_id)
        revoked = self.core.revoked_leases(worker_id, lease_ids)
        has_loaded = served != worker.served
        live = set(lease_ids) - set(revoked)
        self.liveness.note_beat(worker_id, live, Load(versions=served), self._world.now_s)
        if has_loaded:
            self._wake(("leases",))
        reply = HeartbeatReply(revoked=revoked, state=state, is_draining=worker.is_draining)
        if state == "running":
            answer(reply)
        else:
            self._settle(answer, reply)  # Who hears of the end leaves.

    def _on_drain(self, answer: Answer, worker_id: str) -> None:
        if not self.liveness.has_left(worker_id):
            self._known(worker_id).is_draining = True
            self._drop_if_drained(worker_id)
        self._settle(answer, True)

    def _on_leases(
        self,
        answer: Answer,
        worker_id: str,
        num_free: int,
        served: tuple[ServedVersions, ...],
        held: frozenset[str],
    ) -> None:
        worker = self._known(worker_id)
        me = self._newest_ask[worker_id] = object()
        lost = tuple(lease_id for lease_id in self.core.worker_leases(worker_id) if lease_id not in held)
        if lost:
            self._apply(ExpireLeases(lease_ids=lost, never_arrived=True))
            self.liveness.end(lost)
        worker.served = served

        def look() -> LeaseReply | None:
            is_newest = self._newest_ask.get(worker_id) is me
            if not is_newest or worker.is_draining or self.liveness.worker(worker_id) is not worker:
                return None
            command = IssueLeases(worker_id=worker_id, num_free=num_free, served=worker.served)
            leases = self._apply(command)
            return LeaseReply(leases=leases, state=self.core.state) if leases else None

        self._poll(
            "leases", look, answer, again_s=lambda: self.core.next_chance_s(worker_id, self._world.now_s)
        )

    def _on_episodes(self, answer: Answer, worker_id: str, results: tuple[tuple[str, Any], ...]) -> None:
        self.liveness.note_seen(worker_id, self._world.now_s)
        receipts: list[EpisodeReceipt] = []
        for lease_id, outcome in results:
            try:
                receipt = self._apply(RecordResult(lease_id=lease_id, worker_id=worker_id, outcome=outcome))
            except RefusedError as refusal:
                receipt = EpisodeReceipt(lease_id=lease_id, status="invalid", reason=str(refusal))
            else:
                self.liveness.end((lease_id,))
            receipts.append(receipt)
        self._drop_if_drained(worker_id)
        self._settle(lambda value: self._acknowledge(answer, value, results), tuple(receipts))

    def _acknowledge(self, answer: Answer, receipts: Any, results: tuple[tuple[str, Any], ...]) -> None:
        for receipt, (_, outcome) in zip(receipts, results, strict=True):
            self._referee.acknowledged(receipt, outcome)
        answer(receipts)

    def _on_push(self, answer: Answer, tasks: tuple[Task, ...]) -> None:
        self._settle(answer, self._apply(AddTasks(tasks=tasks)))

    def _on_stop(self, answer: Answer) -> None:
        self._settle(answer, self._apply(StopRun(reason="enough", is_failure=False)) or True)

    def _known(self, worker_id: str) -> WorkerLife:
        worker = self.liveness.worker(worker_id)
        if worker is None:
            raise RefusedError(f"{worker_id} is not known", code="unknown_worker", status=404)
        self.liveness.note_seen(worker_id, self._world.now_s)
        return worker

    def _drop_if_drained(self, worker_id: str) -> None:
        worker = self.liveness.worker(worker_id)
        if worker is not None and worker.is_draining and not self.core.worker_leases(worker_id):
            self._apply(DropWorker(worker_id=worker_id, reason="drained"))
            self.liveness.drop(worker_id)

    # --- trainers, and who follows versions ---

    def _on_attach(self, answer: Answer, policy: str, trainer_id: str, durable_step: int) -> None:
        command = AttachTrainer(policy=policy, trainer_id=trainer_id, durable_step=durable_step)

        def attached(session: Any) -> None:
            self._referee.attached(policy, session, durable_step)
            answer(session)

        self._settle(attached, self._apply(command))

    def _on_batch(self, answer: Answer, policy: str, epoch: int, step: int) -> None:
        def look() -> object | None:
            if self.core.state != "running":
                return None
            return self._apply(TakeBatch(policy=policy, epoch=epoch, step=step))

        def served(view: Any) -> None:
            if isinstance(view, BatchView):
                self._referee.batch_served(view)
            answer(view)

        self._poll(f"batch/{policy}", look, served, or_else=lambda: self.core.state)

    def _on_publish(self, answer: Answer, *fields: Any) -> None:
        policy, epoch, step, manifest = fields
        command = PublishVersion(policy=policy, epoch=epoch, step=step, manifest=manifest)
        self._settle(answer, self._apply(command))

    def _on_commit(self, answer: Answer, *fields: Any) -> None:
        policy, epoch, step, version = fields
        self._apply(CommitStep(policy=policy, epoch=epoch, step=step, version=version, metrics=()))
        self._settle(answer, True)

    def _on_release(self, answer: Answer, policy: str, epoch: int, step: int) -> None:
        self._apply(ReleaseSteps(policy=policy, epoch=epoch, step=step))
        self._settle(answer, True)

    def _on_versions(self, answer: Answer, policy: str, after: int, pinned: tuple[int, ...]) -> None:
        def look() -> VersionsReply | None:
            reply = self.core.versions(policy, after=after)
            return reply if reply.manifests or reply.pinned != pinned else None

        def served(reply: Any) -> None:
            self._referee.versions_served(policy, reply)
            answer(reply)

        self._poll(
            f"versions/{policy}", look, served, or_else=lambda: self.core.versions(policy, after=after)
        )
