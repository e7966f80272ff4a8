"""The dataflow's state machine: commands in, decisions out.

The core owns all metadata of a run: draws, leases, groups, tables, versions, evaluation rounds, fates. It
doesn't open sockets, read the clock, or use random numbers. The same commands at the same times therefore
give the same decisions, and the journal's commands rebuild the core. A refused command changes nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from astraflow.dataflow.core import (
    evals,
    groups,
    leases,
    policies,
    schedule,
    snapshot,
    status,
    stops,
    strikes,
    tables,
)
from astraflow.dataflow.core.commands import (
    AddTasks,
    AddWorker,
    AttachTrainer,
    ChangeSchedule,
    Command,
    CommitStep,
    Decision,
    DropBatch,
    DropWorker,
    ExpireEval,
    ExpireLeases,
    IssueLeases,
    LeaseView,
    PayloadRef,
    PublishFrozen,
    PublishVersion,
    RecordResult,
    ReleaseSteps,
    ResumeRun,
    StopRun,
    TakeBatch,
)
from astraflow.dataflow.core.context import Context
from astraflow.dataflow.core.fates import end_run, resume_run
from astraflow.dataflow.core.plan import RunPlan, Schedule
from astraflow.dataflow.core.state import FailureStreak
from astraflow.errors import ComponentError
from astraflow.types import (
    EvalRecord,
    MetricItem,
    PolicyStatus,
    PushedTasks,
    RunState,
    SampleRules,
    ServedVersions,
    StepRecord,
    Task,
    VersionsReply,
    Wait,
    WaitReason,
)
from astraflow.types.waits import NO_ROOM

__all__ = ["Core"]


class Core:
    """The whole run as one deterministic object.

    Example::

        core = Core(plan)
        core.apply(AddWorker(worker_id="w0", name="w0", hosts=("actor",)), now_s=0.0)
        decision = core.apply(IssueLeases(worker_id="w0", num_free=8, served=served), now_s=1.0)
        leases = decision.answer        # () until version 0 is published
    """

    def __init__(self, plan: RunPlan) -> None:
        self._ctx = Context(plan)

    def apply(self, command: Command, now_s: float) -> Decision:
        """Applies one command and returns its outcome.

        `now_s` is Unix time, as are all times in the core's records and deadlines.

        Answers: IssueLeases -> tuple[LeaseView, ...]; RecordResult -> EpisodeReceipt; AddTasks ->
        PushTasksReply; AttachTrainer -> Session; TakeBatch -> BatchView | None (not ready yet);
        PublishVersion -> PublicationReply; DropBatch -> DropReply; all others -> None.

        IssueLeases and TakeBatch change the state only if the decision has events, and must be journaled only
        then. Every other accepted command must be journaled.

        Raises: RefusedError or FencedError if the command is refused; the state is then unchanged.
        """
        ctx = self._ctx
        ctx.begin(now_s)
        answer = _HANDLERS[type(command)](ctx, command)
        stops.note_stops(ctx)
        return Decision(answer=answer, events=tuple(ctx.events), wakes=tuple(ctx.wakes))

    def snapshot(self) -> bytes:
        """The full state. `Core.from_snapshot(plan, data)` continues exactly as this core would.

        Raises: ComponentError if a component of the recipe fails to return its state.
        """
        return b"".join(self.snapshot_parts())

    def snapshot_parts(self) -> Iterator[bytes]:
        """The full state of this moment, in parts that are encoded on demand. Later commands don't affect
        them."""
        return snapshot.snapshot_parts(self._ctx)

    @classmethod
    def from_snapshot(cls, plan: RunPlan, data: bytes) -> "Core":
        """Returns the core of which `data` is a snapshot, with the schedule that was in force.

        Raises: DataError if the snapshot does not fit the plan.
        """
        core = cls(plan)
        snapshot.restore_state(core._ctx, data)
        return core

    @property
    def state(self) -> RunState:
        """`running`, `finished` or `failed`."""
        return self._ctx.state.run_state

    @property
    def reason(self) -> str:
        """Why the run ended; empty while it runs."""
        return self._ctx.state.reason

    @property
    def schedule(self) -> Schedule:
        """The schedule in force."""
        return self._ctx.plan.schedule

    def policy_status(self) -> tuple[PolicyStatus, ...]:
        """One entry per trained policy, in the plan's order."""
        return tuple(status.policy_status(self._ctx, name) for name in self._ctx.plan.policies)

    @property
    def repetition_of(self) -> frozenset[str]:
        """Policies with a filter that reads how much a trajectory repeats itself."""
        return self._ctx.repetition_of

    def curation(self) -> tuple[MetricItem, ...]:
        """What the curators have done so far; empty for a plain order.

        Also empty if a curator fails. The next commit or snapshot then ends the run with the reason.

        """
        try:
            return self._ctx.curation.metrics()
        except ComponentError:
            return ()

    def num_batches(self, policy: str) -> float:
        """Batches that the policy's trainer has taken, plus the fraction of a batch that is ready."""
        state = self._ctx.policy(policy)
        return state.taken + len(state.ready) / self._ctx.num_fresh(policy)

    def waits(self, now_s: float = 0.0, started_s: float = 0.0) -> tuple[Wait, ...]:
        """Who waits for whom, why, and since when, as far as the core can tell.

        Some reasons are given only for long waits. Without `now_s`, every wait is short. No wait begins
        before `started_s`, when the dataflow started.
        """
        return status.waits(self._ctx, now_s, started_s)

    def steps(self, policy: str, after: int = -1) -> tuple[StepRecord, ...]:
        """Records of the policy's committed steps with a number above `after`."""
        return tuple(self._ctx.policy(policy).records[max(0, after + 1) :])

    def evals(self, after: int = 0) -> tuple[EvalRecord, ...]:
        """Finished evaluation rounds in the order in which they finished, without the first `after`."""
        return tuple(self._ctx.state.eval_records[max(0, after) :])

    def newest_records(self) -> tuple[StepRecord | EvalRecord, ...]:
        """The newest step of each policy, and its newest evaluation of each set."""
        state = self._ctx.state
        steps = [policy.records[-1] for policy in state.policies.values() if policy.records]
        evals = {(record.policy, record.eval_set): record for record in state.eval_records}
        return (*steps, *evals.values())

    def versions(self, policy: str, after: int = -1) -> VersionsReply:
        """The policy's kept manifests newer than `after`, and the versions that evaluation needs."""
        return policies.versions_reply(self._ctx, policy, after)

    def newest_version(self, policy: str) -> int:
        """The policy's newest published version; -1 if there is none yet."""
        return self._ctx.policy(policy).newest

    def sample_rules(self, policy: str) -> SampleRules:
        """The requirements of the policy's trainer for trajectories, as far as it has sent them."""
        return self._ctx.policy(policy).rules

    def why_no_lease(self, served: Sequence[ServedVersions], worker_id: str = "") -> tuple[WaitReason, ...]:
        """Why a service with these versions gets no lease. Empty if it can get one."""
        return leases.why_none(self._ctx, served, worker_id)

    def is_held_back(self, served: Sequence[ServedVersions]) -> bool:
        """Whether a service with these versions gets no lease because no policy has room for a group."""
        return any(reason.kind in NO_ROOM for reason in self.why_no_lease(served))

    def is_restricted(self, worker_id: str) -> bool:
        """See `strikes.is_restricted`."""
        return strikes.is_restricted(self._ctx, worker_id)

    def next_chance_s(self, worker_id: str, now_s: float) -> float:
        """The next time at which such a service may get a lease that it is refused now, even if nothing else
        changes. Infinity if there is no such time."""
        return strikes.next_chance_s(self._ctx, worker_id, now_s)

    def failure_streak(self, worker_id: str) -> FailureStreak:
        """The recent failures of a service. Do not change the result."""
        worker = self._ctx.state.workers.get(worker_id)
        return worker.failures if worker else FailureStreak()

    def is_set_aside(self, worker_id: str) -> bool:
        """Whether the service failed so often in a row that it only gets a lease from time to time."""
        worker = self._ctx.state.workers.get(worker_id)
        return worker is not None and strikes.is_set_aside(worker)

    def lease(self, lease_id: str) -> LeaseView | None:
        """An open lease as it was issued, or None."""
        return leases.view_lease(self._ctx, lease_id)

    def is_open(self, episode: tuple[int, int]) -> bool:
        """Whether a training episode, given as (group id, position in the group), still needs a result."""
        group_id, episode_idx = episode
        group = self._ctx.state.groups.get(group_id)
        return group is not None and group.episodes[episode_idx].status in {"pending", "running"}

    def worker_key(self, worker_id: str) -> str:
        """The key of a service that has joined or recently departed; empty for any other."""
        worker = self._ctx.state.workers.get(worker_id)
        return worker.key if worker else self._ctx.state.gone_keys.get(worker_id, "")

    def workers(self) -> tuple[AddWorker, ...]:
        """The rollout services of the run, as they joined."""
        known = self._ctx.state.workers.values()
        return tuple(AddWorker(worker_id=w.id, name=w.name, hosts=w.hosts, key=w.key) for w in known)

    def worker_leases(self, worker_id: str) -> tuple[str, ...]:
        """Ids of the leases that a service holds."""
        worker = self._ctx.state.workers.get(worker_id)
        return tuple(worker.leases) if worker else ()

    def revoked_leases(self, worker_id: str, lease_ids: Sequence[str]) -> tuple[str, ...]:
        """Those of a service's leases that are not worth finishing."""
        held = self._ctx.state.workers.get(worker_id)
        return tuple(i for i in lease_ids if held is None or i not in held.leases)

    @property
    def pushed(self) -> PushedTasks:
        """Counts of the pushed tasks."""
        state = self._ctx.state
        return PushedTasks(
            num_accepted=state.num_pushed,
            num_waiting=len(state.pushed_queue),
            num_known=state.num_pushed_again,
            num_refused=state.num_push_refused,
        )

    def pushed_task(self, task_idx: int) -> Task:
        """A pushed task by its position. It is kept until its group completes."""
        return self._ctx.state.pushed[task_idx]

    def eval_deadlines(self) -> tuple[tuple[int, float], ...]:
        """(round id, deadline in the commands' time) of the open evaluation rounds."""
        rounds = self._ctx.state.rounds
        return tuple((r.id, r.deadline_s) for r in rounds.values()) if rounds else ()

    def groups_for_replay(self) -> frozenset[int]:
        """Groups that a later batch of some policy may replay."""
        return status.groups_for_replay(self._ctx)

    def retained_payloads(self) -> Iterator[PayloadRef]:
        """Every trajectory that may still be served."""
        return status.retained_payloads(self._ctx)


def _stop(ctx: Context, command: StopRun) -> None:
    end_run(ctx, command.reason, is_failure=command.is_failure)


_HANDLERS: dict[type[Any], Callable[[Context, Any], Any]] = {
    AddWorker: leases.add_worker,
    DropWorker: leases.drop_worker,
    IssueLeases: leases.issue,
    ExpireLeases: leases.expire,
    RecordResult: groups.record_result,
    AddTasks: groups.push_tasks,
    AttachTrainer: policies.attach,
    TakeBatch: tables.take_batch,
    PublishFrozen: policies.publish_frozen,
    PublishVersion: policies.publish,
    CommitStep: policies.commit,
    ReleaseSteps: policies.release,
    DropBatch: tables.drop_batch,
    ExpireEval: evals.expire,
    StopRun: _stop,
    ResumeRun: resume_run,
    ChangeSchedule: schedule.change_schedule,
}
"""One handler per command."""
