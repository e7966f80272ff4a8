"""A second bookkeeper: what recorded commands and events must say.

Written from the rules (draws, attempts, fates, batches, versions, evaluation), not from the core: it keeps
its own state of every group and episode, and expects each event where the rules ask for one.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from astraflow.algorithms.task_orders import ShuffleConfig
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import (
    AddTasks,
    AddWorker,
    AttachTrainer,
    AttemptFailed,
    BatchDropped,
    BatchTaken,
    BatchView,
    ChangeSchedule,
    Command,
    CommitStep,
    DropBatch,
    DropWorker,
    EpisodeFacts,
    EvalFinished,
    Event,
    ExpireEval,
    ExpireLeases,
    FateDecided,
    GroupDrawn,
    IssueLeases,
    LeaseIssued,
    PublishVersion,
    RecordResult,
    ReleaseSteps,
    ResultDropped,
    RunEnded,
    RunResumed,
    ScheduleChanged,
    ServiceRestored,
    ServiceSetAside,
    StepCommitted,
    StepRedone,
    StopRun,
    TasksPushed,
    TrajectoryMeta,
    VersionPublished,
)
from astraflow.dataflow.core.plan import RunPlan
from astraflow.types import HANDED_IN, Failure, FateCounts
from simulator.rounds import Rounds

__all__ = ["History"]

_LOST = {"filtered", "failed", "unused"}
_DONE = {"all steps are done", "all steps up to the recipe's stop are done"}


@dataclass(slots=True)
class _Episode:
    attempt: int = 0
    issued: int = -1
    """The latest attempt that went out."""
    worker_id: str = ""
    """Who holds the lease that is out, if one is."""
    lease_id: str = ""
    winner: str = ""
    has_failed: bool = False
    is_late: bool = False
    """It failed because it took too long."""
    facts: EpisodeFacts | None = None
    num_lost: int = 0
    """Attempts that no result ended."""
    num_handed_in: int = 0
    """Attempts that their services gave back; the next one may go on from them."""
    afresh: int = 0
    """The first attempt after the newest one that failed by itself: it goes on from no other."""
    oldest: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    """Attempt -> policy -> oldest version that a token of its result may have: what its service served, or
    those of the lost attempts that it may go on from."""

    @property
    def is_open(self) -> bool:
        return not self.winner and not self.has_failed


@dataclass(slots=True)
class _Service:
    name: str
    strikes: int = 0
    struck_s: float = 0.0
    leases: dict[str, int] = field(default_factory=dict[str, int])
    """Leases that are out, with the strikes as they were issued."""

    def rests_until_s(self) -> float:
        """Three strikes set it aside: 1 s, then twice as long each time, up to a minute."""
        return self.struck_s + min(2.0 ** (self.strikes - 3), 60.0) if self.strikes >= 3 else 0.0


@dataclass(slots=True)
class _Group:
    admitted: tuple[str, ...]
    episodes: list[_Episode]
    verdict: dict[str, str] = field(default_factory=dict[str, str])
    """What each policy must find once the group is complete: `ready`, `filtered`, `unused` or `failed`."""


@dataclass(slots=True)
class _Policy:
    waiting: dict[int, None] = field(default_factory=dict[int, None])
    """Drawn, admitted, undecided and in no batch; in draw order."""
    ready: dict[int, None] = field(default_factory=dict[int, None])
    """In the order of completion."""
    fates: dict[int, FateDecided] = field(default_factory=dict[int, FateDecided])
    batches: dict[int, BatchTaken] = field(default_factory=dict[int, BatchTaken])
    kept: dict[int, int] = field(default_factory=dict[int, int])
    """Groups that may be replayed, in the order in which they were first taken, with the steps of each."""
    num_drawn: int = 0
    num_committed: int = 0
    num_discarded: int = 0
    unusable_in_a_row: int = 0
    failed_in_a_row: int = 0
    newest: int = -1
    epoch: int = 0
    base_step: int = 0
    base_version: int = 0
    done: int = 0
    has_session: bool = True
    newest_step: int = 0
    stops_at: int | None = None
    """Steps after which the plan's stop ends it, once that is certain."""


class History:
    """Books one record after the other; `problem` is told what does not hold."""

    def __init__(self, plan: RunPlan, problem: Callable[[str], None]) -> None:
        self._plan, self._problem = plan, problem
        self._policies = {name: _Policy() for name in plan.policies}
        self._groups: dict[int, _Group] = {}
        self._workers: dict[str, _Service] = {}
        self._absent: dict[str, _Service] = {}
        """Services that left with strikes, by name."""
        self._now_s = 0.0
        self._num_good = 0
        self._draws: Counter[int] = Counter()
        self._pushed: set[str] = set()
        self._ever_pushed: set[str] = set()
        self._ended: RunEnded | None = None
        self._may_resume = False
        """Whether the run was done, and got more steps just now."""
        self._rounds = Rounds(plan, problem, self._last_step)
        self._expected: list[tuple[str, int, str]] = []
        """(policy, group, fate) that must be among the events of the command in hand."""
        self.accepted: dict[str, EpisodeFacts] = {}

    # --- results ---

    def counts(self, name: str) -> FateCounts:
        """The accounting of a policy."""
        policy = self._policies[name]
        fates = Counter(event.fate for event in policy.fates.values())
        return FateCounts(drawn=policy.num_drawn, live=policy.num_drawn - len(policy.fates), **fates)

    def num_committed(self, name: str) -> int:
        """Committed steps of a policy."""
        return self._policies[name].num_committed

    def close(self, reason: str) -> None:
        """After the last record: everything ended, and for the reason given."""
        if self._ended is None or self._ended.reason != reason:
            self._problem(f"the run is over ({reason}), its events say {self._ended}")
            return
        for name, policy in self._policies.items():
            if len(policy.fates) != policy.num_drawn:
                self._problem(f"{name}: {policy.num_drawn} groups drawn, {len(policy.fates)} fates")
        if reason in _DONE:
            self._check_done()
        elif reason.startswith("every rollout service fails"):
            if any(service.strikes < (10 if self._num_good else 8) for service in self._workers.values()):
                self._problem(f"{reason}: {self._workers}")
        elif reason != "enough" and not any(self._is_starved(name) for name in self._policies):
            self._problem(f"no policy is starved, yet the run failed: {reason}")

    def _check_done(self) -> None:
        for name, policy in self._policies.items():
            if policy.num_committed != self._last_step(name):
                self._problem(f"{name}: the run is done after {policy.num_committed} steps")
        self._rounds.check_done()

    def _is_starved(self, name: str) -> bool:
        policy, size = self._policies[name], self._plan.policies[name].table.groups_per_batch
        num_tasks = sum(self._plan.sources.values())
        by_loss = policy.unusable_in_a_row >= max(2 * num_tasks, size)
        by_time = policy.unusable_in_a_row >= max(64, 4 * size) and self._now_s >= 600.0
        return by_loss or by_time or policy.failed_in_a_row >= max(64, 2 * size)

    def check_view(self, view: BatchView) -> None:
        """What a trainer was given is what its groups' accepted episodes hold."""
        taken = self._policies[view.policy].batches.get(view.step)
        if taken is None:
            self._problem(f"{view.policy}: the batch of step {view.step} was served and is lost")
            return
        groups = (*taken.group_ids, *taken.replayed_ids)
        wanted = [(g, idx, m) for g in groups for idx, m in self._samples(view.policy, g)]
        found = [(s.group_id, s.episode_idx, s.payload, s.num_tokens) for s in view.samples]
        if found != [(g, idx, m.payload, m.num_tokens) for g, idx, m in wanted]:
            self._problem(f"{view.policy}: step {view.step} holds {found}, not {wanted}")
        totals, metas = view.totals, [meta for _, _, meta in wanted]
        if (totals.num_groups, totals.num_samples, totals.num_tokens, totals.num_trained_tokens) != (
            len(groups),
            len(metas),
            sum(meta.num_tokens for meta in metas),
            sum(meta.num_trained_tokens for meta in metas),
        ) or abs(totals.reward_sum - sum(meta.reward for meta in metas)) > 1e-9:
            self._problem(f"{view.policy}: step {view.step} has totals {totals} for {metas}")
        staleness_max = max(*taken.staleness, *taken.replayed_staleness, 0)
        if (view.trainer_version, view.staleness_max) != (taken.trainer_version, staleness_max):
            self._problem(f"{view.policy}: step {view.step}: {view} is not what was taken: {taken}")

    # --- one record ---

    def book(self, command: Command, events: tuple[Event, ...], now_s: float) -> None:
        """Books a command and what it led to."""
        if self._ended is not None and not self._may_follow_the_end(command, events):
            self._problem(f"after the run's end: {command} leads to {events}")
        self._expected.clear()
        self._now_s = now_s
        self._before(command, events)
        for idx, event in enumerate(events):
            if _begins_end(event) and not any(map(_begins_end, events[:idx])):
                self._find_stops(now_s)  # Before what is left over is cancelled.
            _BOOKINGS[type(event)](self, event, command)
        self._after(command, events, now_s)
        if self._may_resume:
            self._problem(f"{command} gave the run more steps, and it did not go on")
        if self._expected and not any(isinstance(event, RunEnded) for event in events):
            self._problem(f"{command} should have led to {self._expected}, it led to {events}")

    def _may_follow_the_end(self, command: Command, events: tuple[Event, ...]) -> bool:
        if isinstance(command, RecordResult):
            return all(isinstance(event, ResultDropped) for event in events)
        if isinstance(command, ChangeSchedule):
            return True
        kinds = AddWorker | DropWorker | ReleaseSteps | CommitStep | PublishVersion | ExpireEval | StopRun
        return isinstance(command, kinds | ExpireLeases) and not events

    def _before(self, command: Command, events: tuple[Event, ...]) -> None:
        if isinstance(command, AddWorker):
            service = self._absent.pop(command.name, None) or _Service(command.name)
            self._workers[command.worker_id] = self._workers.get(command.worker_id) or service
        elif isinstance(command, AttachTrainer):
            policy = self._policies[command.policy]
            policy.epoch += 1
            policy.base_step = policy.done = command.durable_step
            policy.base_version = policy.newest + 1
            policy.has_session = True
        elif isinstance(command, RecordResult) and isinstance(command.outcome, EpisodeFacts):
            is_dropped = any(isinstance(event, ResultDropped) for event in events)
            if not is_dropped:
                self._accept(command, command.outcome)

    # --- the plan's stop ---

    def _last_step(self, name: str) -> int:
        """The number of steps after which a policy ends, as far as is known."""
        num_steps, stops_at = self._plan.policies[name].num_steps, self._policies[name].stops_at
        return num_steps if stops_at is None else min(num_steps, stops_at)

    def _num_left(self) -> float:
        """How many groups may still be drawn."""
        if not self._plan.stop.epochs:
            return float("inf")
        return max(0, self._plan.stop.epochs * self._num_tasks - self._draws.total()) + len(self._pushed)

    def _find_stops(self, now_s: float) -> None:
        """Notes which policies can have no further batch, or have all that they may."""
        stop, newest = self._plan.stop, {name: p.newest for name, p in self._policies.items()}
        for name, policy in self._policies.items():
            taken = [g for b in policy.batches.values() for g in (*b.group_ids, *b.replayed_ids)]
            metas = [meta for g in taken for _, meta in self._samples(name, g)]
            num_tokens = sum(meta.num_trained_tokens for meta in metas)
            is_enough = 0 < stop.sequences <= len(metas) or 0 < stop.tokens <= num_tokens
            size = self._num_fresh(name)
            if policy.stops_at is None and (is_enough or self._num_left() + len(policy.waiting) < size):
                policy.stops_at = len(policy.batches)
                if policy.newest >= 0 and policy.newest_step == policy.stops_at:
                    self._rounds.due(name, policy.newest_step, now_s, newest)

    def _after(self, command: Command, events: tuple[Event, ...], now_s: float) -> None:
        if events and self._ended is None:
            self._find_stops(now_s)
        if isinstance(command, DropWorker):
            self._forget(command.worker_id)
            open_groups = [g for g_id, g in self._groups.items() if not self._is_complete(g_id)]
            if self._ended is None and any(
                e.worker_id == command.worker_id for g in open_groups for e in g.episodes
            ):
                self._problem(f"{command.worker_id} is gone, and its leases are not")
        elif isinstance(command, IssueLeases):
            num = sum(isinstance(event, LeaseIssued) for event in events)
            if num > command.num_free:
                self._problem(f"{num} leases for {command.num_free} free slots")
            elif num < command.num_free and self._ended is None and not self._is_set_aside(command):
                self._check_full(command)
        elif isinstance(command, CommitStep):
            policy = self._policies[command.policy]
            if command.epoch != policy.epoch:
                self._problem(f"{command.policy}: session {command.epoch} commits, {policy.epoch} holds it")
            if command.step == policy.done and self._ended is None:
                self._problem(f"{command.policy}: the commit of step {command.step} led to {events}")
        self._rounds.after(command, now_s, {name: p.newest for name, p in self._policies.items()})

    def _is_set_aside(self, command: IssueLeases) -> bool:
        return self._workers[command.worker_id].strikes >= 3

    def _forget(self, worker_id: str) -> None:
        if (service := self._workers.pop(worker_id, None)) is not None:
            self._absent.pop(service.name, None)
            service.leases.clear()
            if service.strikes:
                self._absent[service.name] = service

    def _check_full(self, command: IssueLeases) -> None:
        """A service that may run training episodes got fewer than it asked for: no policy may have room."""
        served = {entry.policy: entry.versions for entry in command.served}
        if any(self._lag(name, served) > p.table.engine_lag for name, p in self._plan.policies.items()):
            return
        if any(self._is_held_up(name) for name in self._policies):
            return
        for name in self._policies:
            if self._has_room(name):
                self._problem(f"{command} got too little: {name} has room: {self._policies[name]}")

    def _is_held_up(self, name: str) -> bool:
        """Whether nothing may be drawn because this policy has no room."""
        return self._plan.admission == "all" and self._needs_groups(name) and not self._has_room(name)

    def _needs_groups(self, name: str) -> bool:
        policy, table = self._policies[name], self._plan.policies[name].table
        num_left = self._last_step(name) - len(policy.batches)
        num_later = max(0, num_left - 1) * (table.groups_per_batch - self._num_replaced(table))
        return num_left > 0 and len(policy.waiting) < self._num_fresh(name) + num_later

    @staticmethod
    def _num_replaced(table: TableConfig) -> int:
        """How many groups of a batch may be replayed instead of fresh ones."""
        return int(table.replay.share * table.batch_groups)

    def _num_fresh(self, name: str) -> int:
        """How many fresh groups the next batch holds."""
        policy, table = self._policies[name], self._plan.policies[name].table
        version = self._next_version(policy) if policy.has_session else policy.newest
        ages = [version - self._oldest(name, group_id) for group_id in policy.kept]
        num_again = sum(age <= table.max_staleness for age in ages)
        return table.batch_groups - min(num_again, self._num_replaced(table))

    def _has_room(self, name: str) -> bool:
        """Whether a draw is to be charged to the policy."""
        policy, plan = self._policies[name], self._plan.policies[name]
        least_staleness = self._next_version(policy) - (policy.newest - plan.table.engine_lag)
        num_live = policy.num_drawn - len(policy.fates)
        num_versions = plan.table.max_staleness - plan.table.replay.reserve - plan.table.engine_lag + 1
        size = plan.table.batch_groups
        return (
            self._needs_groups(name)
            and self._num_left() > 0
            and num_live < max(size, num_versions * (size - self._num_replaced(plan.table)))
            and (least_staleness <= plan.table.max_staleness or not policy.has_session)
        )

    def _lag(self, name: str, served: Mapping[str, tuple[int, ...]]) -> int:
        """How far a service is behind; a policy without a version is as far as can be."""
        newest = self._policies[name].newest
        return newest - max(served.get(name, ()), default=-9) if newest >= 0 else 9

    # --- draws, leases, results ---

    def _tasks_pushed(self, event: TasksPushed, command: Command) -> None:
        assert isinstance(command, AddTasks)
        new = {task.id for task in command.tasks} - self._ever_pushed
        if (
            event.num_refused
            or set(event.accepted) != new
            or event.num_known != len(command.tasks) - len(new)
        ):
            self._problem(f"{command} led to {event}; {new} are new")
        self._pushed |= new
        self._ever_pushed |= new

    def _drawn(self, event: GroupDrawn, _: Command) -> None:
        if event.group_id != len(self._groups):
            self._problem(f"group {event.group_id} is drawn, {len(self._groups)} is next")
        if not event.admitted or {*event.admitted, *event.unadmitted} != self._policies.keys():
            self._problem(f"{event} does not name every policy once")
        if event.task_idx < 0:
            if event.task_id not in self._pushed:
                self._problem(f"{event} draws a task that was not pushed, or was drawn before")
        else:
            if self._pushed:
                self._problem(f"{event} passes over pushed tasks {self._pushed}")
            fewest = min(self._draws[n] for n in range(self._num_tasks))
            if self._plan.curators == (ShuffleConfig(),) and self._draws[event.task_idx] > fewest:
                self._problem(f"{event} draws a task again before all others")
        episodes = [_Episode() for _ in range(self._plan.group_size)]
        self._groups[event.group_id] = _Group(event.admitted, episodes)
        self._charged(event)
        self._pushed.discard(event.task_id)
        if event.task_idx >= 0:
            self._draws[event.task_idx] += 1

    def _charged(self, event: GroupDrawn) -> None:
        for name, policy in self._policies.items():
            if name not in event.admitted:
                if self._is_held_up(name):
                    self._problem(f"{event} is drawn without {name}, which needs groups: {policy}")
                policy.num_drawn += 1
                self._expected.append((name, event.group_id, "unadmitted"))
                continue
            if not self._has_room(name):
                self._problem(f"{event} is charged to {name}, which has no room: {policy}")
            policy.num_drawn += 1
            policy.waiting[event.group_id] = None

    @property
    def _num_tasks(self) -> int:
        return sum(self._plan.sources.values())

    def _episode(self, lease_id: str) -> "tuple[_Episode, int]":
        """The episode of a lease, of a round or a group, and the lease's attempt."""
        owner, episode_idx, attempt = lease_id.split(".")
        if owner.startswith("e"):
            return self._rounds.slot(int(owner[1:]), int(episode_idx), _Episode), int(attempt)
        return self._groups[int(owner)].episodes[int(episode_idx)], int(attempt)

    def _leased(self, event: LeaseIssued, command: Command) -> None:
        assert isinstance(command, IssueLeases)
        episode, attempt = self._episode(event.lease_id)
        if not episode.is_open or episode.lease_id or attempt != episode.attempt:
            self._problem(f"{event.lease_id} goes out, but its episode is {episode}")
        if event.worker_id not in self._workers or event.worker_id != command.worker_id:
            self._problem(f"{event} to a service that is not there")
        service = self._workers[event.worker_id]
        if service.strikes >= 3:
            is_tried = any(n == service.strikes and self._is_out(i) for i, n in service.leases.items())
            if self._now_s < service.rests_until_s() or is_tried:
                self._problem(f"{event.lease_id} goes to {service}, which is set aside")
        service.leases[event.lease_id] = service.strikes
        episode.issued = attempt
        episode.lease_id, episode.worker_id = event.lease_id, event.worker_id
        served = {entry.policy: entry.versions for entry in command.served}
        if event.kind == "eval":
            self._rounds.leased(event, served)
            return
        before = {} if attempt == episode.afresh else episode.oldest.get(attempt - 1, {})
        episode.oldest[attempt] = {p: min(v[-1], before.get(p, v[-1])) for p, v in served.items() if v}
        if self._is_complete(event.group_id):
            self._problem(f"{event.lease_id} goes out, but its group is over")
        for name, policy in self._policies.items():
            if self._lag(name, served) > self._plan.policies[name].table.engine_lag:
                self._problem(
                    f"{event.lease_id} for a service that serves {served}; {name} is at {policy.newest}"
                )

    def _is_out(self, lease_id: str) -> bool:
        owner = lease_id.split(".")[0]
        is_over = self._rounds.is_over(int(owner[1:])) if owner[0] == "e" else self._is_complete(int(owner))
        return not is_over and self._episode(lease_id)[0].lease_id == lease_id

    def _is_complete(self, group_id: int) -> bool:
        group = self._groups[group_id]
        return not any(self._is_undecided(name, group_id) for name in group.admitted)

    def _is_undecided(self, name: str, group_id: int) -> bool:
        policy = self._policies[name]
        return group_id in policy.waiting and group_id not in policy.ready

    def _accept(self, command: RecordResult, facts: EpisodeFacts) -> None:
        episode, attempt = self._episode(command.lease_id)
        if episode.winner == command.lease_id:
            return
        if not episode.is_open or attempt > episode.issued:
            self._problem(f"{command.lease_id} is accepted, but its episode is {episode}")
        for meta in facts.trajectories:
            oldest = episode.oldest.get(attempt, {}).get(meta.policy, -1)
            if meta.num_trained_tokens and meta.oldest_version < oldest:
                self._problem(f"{command.lease_id}: {meta} is older than all that was served: {oldest}")
        episode.winner, episode.facts = command.lease_id, facts
        holder = episode.worker_id if episode.lease_id == command.lease_id else command.worker_id
        self._num_good += 1
        if holder in self._workers:
            self._workers[holder].strikes = 0
        episode.lease_id = episode.worker_id = ""
        self.accepted[command.lease_id] = facts
        owner = command.lease_id.split(".")[0]
        if not owner.startswith("e"):
            self._settle(int(owner))

    def _attempt_failed(self, event: AttemptFailed, command: Command) -> None:
        episode, attempt = self._episode(event.lease_id)
        if episode.lease_id != event.lease_id:
            self._problem(f"{event} of a lease that is not out")
        is_hopeless = isinstance(command, RecordResult) and not _can_be_retried(command.outcome)
        service = self._workers.get(episode.worker_id)
        is_hopeless &= service is None or service.strikes < 3
        is_handed_in = event.error_class == HANDED_IN
        is_excused = is_handed_in and episode.num_handed_in < 200
        if is_excused:
            episode.num_handed_in += 1
        elif isinstance(command, RecordResult):
            episode.afresh = episode.afresh if is_handed_in else attempt + 1
        else:
            episode.num_lost += 1
        counted = attempt + 1 - episode.num_handed_in - min(episode.num_lost, self._plan.max_lost)
        if event.is_final != (is_hopeless or counted >= self._plan.max_attempts):
            self._problem(f"{event} after {command}, of {self._plan.max_attempts} attempts")
        is_blamed = not (is_excused or (isinstance(command, ExpireLeases) and command.never_arrived))
        strikes = service.leases.pop(event.lease_id, -1) if service is not None else -1
        if service is not None and is_blamed and strikes == service.strikes:
            service.strikes += 1
            service.struck_s = self._now_s
        episode.lease_id = episode.worker_id = ""
        if not event.is_final:
            episode.attempt += 1
            return
        episode.has_failed = True
        episode.is_late = event.error_class == "DeadlineError"
        owner = event.lease_id.split(".")[0]
        if owner.startswith("e"):
            return
        group_id = int(owner)
        num_failed = sum(e.has_failed for e in self._groups[group_id].episodes)
        for name in self._groups[group_id].admitted:
            if num_failed > self._plan.policies[name].table.max_failed and self._is_undecided(name, group_id):
                self._expect(name, group_id, "failed")
        self._settle(group_id)

    def _dropped(self, event: ResultDropped, command: Command) -> None:
        assert isinstance(command, RecordResult)
        if self._ended is not None:
            return
        owner = event.lease_id.split(".")[0]
        if owner.startswith("e") and self._rounds.is_over(int(owner[1:])):
            return
        episode, _ = self._episode(event.lease_id)
        is_late = not owner.startswith("e") and self._is_complete(int(owner))
        if episode.is_open and not is_late and isinstance(command.outcome, EpisodeFacts):
            self._problem(f"{event}: the first result of an open episode")

    def _set_aside(self, event: ServiceSetAside, _: Command) -> None:
        service = self._workers[event.worker_id]
        if (event.strikes, service.strikes) != (3, 3) or event.name != service.name:
            self._problem(f"{event} of {service}")

    def _restored(self, event: ServiceRestored, _: Command) -> None:
        if self._workers[event.worker_id].strikes:
            self._problem(f"{event} of {self._workers[event.worker_id]}")

    # --- fates ---

    def _settle(self, group_id: int) -> None:
        """If all episodes are over: what each policy that the group still serves must make of it."""
        group = self._groups[group_id]
        if any(episode.is_open for episode in group.episodes):
            return
        for name in group.admitted:
            if not self._is_undecided(name, group_id) or group.verdict.get(name) == "failed":
                continue
            metas = [meta for _, meta in self._samples(name, group_id)]
            policy = self._policies[name]
            if not metas:
                self._expect(name, group_id, "unused")
            elif self._plan.policies[name].table.filters and len({meta.reward for meta in metas}) == 1:
                self._expect(name, group_id, "filtered")
            else:
                group.verdict[name] = "ready"
                policy.ready[group_id] = None
                policy.unusable_in_a_row = policy.failed_in_a_row = 0

    def _expect(self, name: str, group_id: int, fate: str) -> None:
        self._groups[group_id].verdict[name] = fate
        self._expected.append((name, group_id, fate))

    def _samples(self, name: str, group_id: int) -> list[tuple[int, TrajectoryMeta]]:
        """What a group's good episodes hold for a policy."""
        episodes = enumerate(self._groups[group_id].episodes)
        return [
            (idx, meta)
            for idx, episode in episodes
            if episode.facts is not None
            for meta in episode.facts.trajectories
            if meta.policy == name and meta.num_trained_tokens
        ]

    def _oldest(self, name: str, group_id: int) -> int:
        return min(meta.oldest_version for _, meta in self._samples(name, group_id))

    def _decided(self, event: FateDecided, command: Command) -> None:  # noqa: C901 - a case a fate
        name, group_id = event.policy, event.group_id
        policy = self._policies[name]
        if group_id in policy.fates:
            self._problem(f"{event} after {policy.fates[group_id]}")
        if event.fate in {"unadmitted", *_LOST}:
            if (name, group_id, event.fate) not in self._expected:
                self._problem(f"{event} at {command}; expected: {self._expected}")
            else:
                self._expected.remove((name, group_id, event.fate))
        elif event.fate == "stale":
            bound = self._plan.policies[name].table.max_staleness
            found = self._next_version(policy) - self._oldest(name, group_id)
            if group_id not in policy.ready or found != event.staleness or found <= bound:
                self._problem(f"{event}: its staleness is {found}, {bound} is allowed")
        elif event.fate == "trained":
            batch = policy.batches.get(event.step)
            if batch is None or group_id not in batch.group_ids or event.step != policy.num_committed:
                self._problem(f"{event} is not in the batch of the step that is committed: {batch}")
        elif event.fate == "evicted":
            is_full = group_id in policy.ready and self._plan.policies[name].table.remover.name == "capacity"
            if not is_full and not self._is_dropped(command, name, group_id):
                self._problem(f"{event}: nothing evicts it")
        elif event.fate != "cancelled":
            self._problem(f"{event}: nothing leads to this fate")
        policy.fates[group_id] = event
        policy.waiting.pop(group_id, None)
        policy.ready.pop(group_id, None)
        policy.num_discarded += event.fate != "trained"
        policy.unusable_in_a_row += event.fate in _LOST
        if event.fate in _LOST:
            policy.failed_in_a_row = policy.failed_in_a_row + 1 if event.fate == "failed" else 0

    def _is_dropped(self, command: Command, name: str, group_id: int) -> bool:
        """Whether it is in a batch of the policy that the command drops."""
        policy = self._policies[name]
        own = [b for step, b in policy.batches.items() if step >= policy.num_committed]
        return (
            isinstance(command, DropBatch)
            and command.policy == name
            and any(group_id in batch.group_ids for batch in own)
        )

    # --- trainers ---

    def _batch_dropped(self, event: BatchDropped, command: Command) -> None:
        assert isinstance(command, DropBatch)
        policy = self._policies[event.policy]
        steps = tuple(step for step in policy.batches if step >= policy.num_committed)
        if event.steps != steps or command.step != steps[0] or command.epoch != policy.epoch:
            self._problem(f"{event} at {command}; {steps} are not committed, {policy.epoch} is the session")
        for step in steps:
            group_ids = policy.batches.pop(step).group_ids
            if any(policy.fates[group_id].fate != "evicted" for group_id in group_ids):
                self._problem(f"{event}: not all groups of step {step} are evicted")
            for group_id in group_ids:
                policy.kept.pop(group_id, None)  # no step was trained on it
        policy.stops_at = None
        policy.epoch += 1
        policy.has_session = False

    def _next_version(self, policy: _Policy) -> int:
        return policy.base_version + len(policy.batches) - policy.base_step

    def _taken(self, event: BatchTaken, _: Command) -> None:
        name = event.policy
        policy, table = self._policies[name], self._plan.policies[name].table
        if event.step != len(policy.batches) or event.trainer_version != self._next_version(policy):
            self._problem(
                f"{event}: step {len(policy.batches)}, version {self._next_version(policy)} are next"
            )
        queue = {"fifo": policy.waiting, "sweep": policy.ready}.get(table.sampler.name)
        num_fresh = self._num_fresh(name)
        wanted = tuple(queue)[:num_fresh] if queue is not None else event.group_ids
        if event.group_ids != wanted or not policy.ready.keys() >= set(wanted):
            self._problem(f"{event}: {wanted} are next, {tuple(policy.ready)} are ready")
        if len(set(event.group_ids)) != num_fresh:
            self._problem(f"{event}: {num_fresh} fresh groups make a batch")
        self._replayed(event, table)
        for group_id, staleness in zip(event.group_ids, event.staleness, strict=True):
            found = event.trainer_version - self._oldest(name, group_id)
            if staleness != found or found > table.max_staleness:
                self._problem(
                    f"{event}: group {group_id} has staleness {found}, {table.max_staleness} allowed"
                )
            policy.waiting.pop(group_id, None)
            policy.ready.pop(group_id, None)
        policy.batches[event.step] = event
        self._keep(policy, event, table)

    def _replayed(self, event: BatchTaken, table: TableConfig) -> None:
        """Replayed groups are of earlier batches, fresh enough, and in none too many of them."""
        if (
            len(set(event.replayed_ids)) != len(event.replayed_ids)
            or len(event.replayed_ids) > table.max_replayed
        ):
            self._problem(f"{event} replays a group twice, or more than {table.max_replayed}")
        earlier = self._policies[event.policy].batches.values()
        for group_id, staleness in zip(event.replayed_ids, event.replayed_staleness, strict=True):
            uses = sum(group_id in (*batch.group_ids, *batch.replayed_ids) for batch in earlier)
            if not any(group_id in batch.group_ids for batch in earlier) or uses >= table.replay.max_uses:
                self._problem(f"{event} replays group {group_id}, which {uses} earlier batches held")
            found = event.trainer_version - self._oldest(event.policy, group_id)
            if staleness != found or found > table.max_staleness:
                self._problem(f"{event}: replayed group {group_id} has staleness {found}")
        self._all_replayed(event, table)

    def _all_replayed(self, event: BatchTaken, table: TableConfig) -> None:
        """As many are replayed as there may be; with `latest`, those with the newest tokens."""
        name, kept = event.policy, self._policies[event.policy].kept
        for group_id in tuple(kept):
            if event.trainer_version - self._oldest(name, group_id) > table.max_staleness:
                del kept[group_id]
        num = min(table.max_replayed, len(kept))
        if len(event.replayed_ids) != num or not kept.keys() >= set(event.replayed_ids):
            self._problem(f"{event}: {num} of {kept} are to be replayed")
        if table.replay.select == "latest":
            newest = sorted((self._oldest(name, group_id) for group_id in kept), reverse=True)[:num]
            if sorted((self._oldest(name, g) for g in event.replayed_ids), reverse=True) != newest:
                self._problem(f"{event}: not the newest of {kept} are replayed")

    def _keep(self, policy: _Policy, event: BatchTaken, table: TableConfig) -> None:
        """Books the uses of what was replayed, and keeps the fresh groups for later batches."""
        for group_id in event.replayed_ids:
            policy.kept[group_id] += 1
            if policy.kept[group_id] >= table.replay.max_uses:
                del policy.kept[group_id]
        if table.max_replayed:
            policy.kept.update(dict.fromkeys(event.group_ids, 1))
        for group_id in tuple(policy.kept)[: max(0, len(policy.kept) - table.replay.size)]:
            del policy.kept[group_id]

    def _published(self, event: VersionPublished, command: Command) -> None:
        policy = self._policies[event.policy]
        steps = policy.base_step + event.version - policy.base_version
        if event.version != policy.newest + 1 or event.epoch != policy.epoch or event.step != steps:
            self._problem(f"{event} follows version {policy.newest} of epoch {policy.epoch}, {steps} steps")
        policy.newest = event.version
        policy.newest_step = event.step

    def _step_committed(self, event: StepCommitted, command: Command) -> None:
        record = event.record
        policy = self._policies[record.policy]
        batch = policy.batches[record.step]
        groups = (*batch.group_ids, *batch.replayed_ids)
        metas = [meta for g in groups for _, meta in self._samples(record.policy, g)]
        rewards: defaultdict[tuple[int, int, str], list[tuple[float, int]]] = defaultdict(list)
        for g in batch.group_ids:
            for episode, meta in self._samples(record.policy, g):
                rewards[g, episode, meta.role].append((meta.reward, meta.num_trained_tokens))
        mean = fmean(
            sum(reward * num for reward, num in own) / sum(num for _, num in own) for own in rewards.values()
        )
        said = (record.step, record.num_groups, record.num_samples, record.num_trained_tokens)
        tokens = sum(meta.num_trained_tokens for meta in metas)
        if said != (policy.num_committed, len(groups), len(metas), tokens):
            self._problem(f"{record} is not what its batch holds: {metas}")
        staleness = (*batch.staleness, *batch.replayed_staleness)
        if abs(record.reward_mean - mean) > 1e-9 or record.staleness_max != max(staleness):
            self._problem(f"{record}: mean reward {mean}, staleness {staleness}")
        if record.num_discarded_groups != policy.num_discarded or record.version > policy.newest:
            self._problem(f"{record}: {policy.num_discarded} groups were discarded; newest: {policy.newest}")
        if any(policy.fates[g].fate != "trained" for g in batch.group_ids if g in policy.fates):
            self._problem(f"{record}: not all of its groups are trained")
        policy.num_discarded = 0
        policy.num_committed += 1
        policy.done += 1

    def _redone(self, event: StepRedone, command: Command) -> None:
        policy = self._policies[event.policy]
        if event.step >= policy.num_committed or event.step != policy.done:
            self._problem(
                f"{event}: {policy.num_committed} steps are committed, {policy.done} by this session"
            )
        policy.done += 1

    # --- evaluation, the schedule, the end ---

    def _schedule_changed(self, event: ScheduleChanged, command: Command) -> None:
        """What comes later is held to the new schedule. A run that was done goes on if it got more steps."""
        if not isinstance(command, ChangeSchedule) or command.schedule != event.schedule:
            self._problem(f"{event} at {command}")
        for policy in self._policies.values() if event.schedule.stop != self._plan.stop else ():
            policy.stops_at = None
        self._plan = self._plan.with_schedule(event.schedule)
        self._rounds.change(self._plan)
        has_more = any(p.num_committed < self._last_step(n) for n, p in self._policies.items())
        self._may_resume = self._ended is not None and not self._ended.is_failure and has_more

    def _run_resumed(self, event: RunResumed, _: Command) -> None:
        if not self._may_resume:
            self._problem(f"{event} after {self._ended}")
        self._ended = None
        self._may_resume = False
        self._num_good = 0
        self._rounds.resume()
        self._absent.clear()
        for service in self._workers.values():
            service.strikes = 0
            service.leases.clear()
        for policy in self._policies.values():
            for step in [step for step in policy.batches if step >= policy.num_committed]:
                for group_id in policy.batches.pop(step).group_ids:
                    policy.kept.pop(group_id, None)
            policy.unusable_in_a_row = policy.failed_in_a_row = 0
            policy.stops_at = None
            policy.epoch += 1
            policy.has_session = False

    def _evaluated(self, event: EvalFinished, command: Command) -> None:
        self._rounds.finished(event.record, expired=isinstance(command, ExpireEval))

    def _run_ended(self, event: RunEnded, command: Command) -> None:
        if self._ended is not None:
            self._problem(f"{event} after {self._ended}")
        self._ended = event
        if event.is_failure == (event.reason in {*_DONE, "enough"}):
            self._problem(f"{event}: is this a failure?")


def _begins_end(event: Event) -> bool:
    return isinstance(event, RunEnded) or (isinstance(event, FateDecided) and event.fate == "cancelled")


def _can_be_retried(outcome: EpisodeFacts | Failure) -> bool:
    return not isinstance(outcome, Failure) or outcome.is_retryable


_BOOKINGS: dict[type[Any], Callable[[History, Any, Command], None]] = {
    TasksPushed: History._tasks_pushed,
    GroupDrawn: History._drawn,
    LeaseIssued: History._leased,
    AttemptFailed: History._attempt_failed,
    ResultDropped: History._dropped,
    FateDecided: History._decided,
    BatchTaken: History._taken,
    BatchDropped: History._batch_dropped,
    VersionPublished: History._published,
    StepCommitted: History._step_committed,
    StepRedone: History._redone,
    EvalFinished: History._evaluated,
    RunEnded: History._run_ended,
    RunResumed: History._run_resumed,
    ScheduleChanged: History._schedule_changed,
    ServiceSetAside: History._set_aside,
    ServiceRestored: History._restored,
}
