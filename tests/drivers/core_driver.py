"""Drives a dataflow core through a run in a few words, and keeps what it did: for tests of the core."""

from collections.abc import Sequence
from typing import Literal

from astraflow.config import parse_config
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import (
    AddWorker,
    AttachTrainer,
    BatchView,
    Command,
    CommitStep,
    Decision,
    DropBatch,
    DropWorker,
    EpisodeFacts,
    Event,
    ExpireLeases,
    FateDecided,
    IssueLeases,
    LeaseView,
    PayloadRef,
    PublishVersion,
    RecordResult,
    ReleaseSteps,
    TakeBatch,
    TrajectoryMeta,
)
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import EvalPlan, EvalSetPlan, PolicyPlan, RunPlan
from astraflow.types import (
    Chunk,
    DropReply,
    EpisodeReceipt,
    Failure,
    FateCounts,
    FileInfo,
    Manifest,
    PolicyStatus,
    PublicationReply,
    ServedVersions,
    Session,
)

__all__ = ["Driver", "make_chunk_manifest", "make_core_plan", "make_facts", "make_meta", "make_table"]


def make_table(
    *,
    group_size: int = 2,
    groups_per_batch: int = 2,
    max_staleness: int = 1,
    engine_lag: int = 0,
    **fields: object,
) -> TableConfig:
    """A table of two groups of two, one version of slack."""
    sizes = {
        "group_size": group_size,
        "groups_per_batch": groups_per_batch,
        "max_staleness": max_staleness,
        "engine_lag": engine_lag,
    }
    return parse_config({**sizes, **fields}, TableConfig, where="table")


def make_core_plan(
    *,
    table: TableConfig | None = None,
    policies: Sequence[str] = ("actor",),
    tables: dict[str, TableConfig] | None = None,
    num_steps: int = 4,
    num_tasks: int = 100,
    eval_sets: dict[str, EvalSetPlan] | None = None,
    eval_every: int = 2,
    max_evals: int = 0,
    max_attempts: int = 3,
    max_lost: int = 0,
    admission: Literal["any", "all"] = "any",
    curators: tuple[object, ...] = (),
    seed: int = 0,
) -> RunPlan:
    """A run of one policy, four steps, a hundred tasks, no evaluation."""
    by_name = tables or dict.fromkeys(policies, table or make_table())
    return RunPlan(
        seed=seed,
        group_size=next(iter(by_name.values())).group_size,
        policies={name: PolicyPlan(table=t, num_steps=num_steps) for name, t in by_name.items()},
        sources={"train": num_tasks},
        curators=curators,  # type: ignore[arg-type]
        eval=EvalPlan(eval_sets or {}, eval_every, deadline_s=300.0, max_per_service=max_evals),
        max_attempts=max_attempts,
        max_lost=max_lost,
        admission=admission,
    )


def make_meta(
    policy: str = "actor",
    *,
    reward: float = 1.0,
    versions: tuple[int, int] = (0, 0),
    num_tokens: int = 10,
    num_trained: int = 4,
    role: str = "",
    offset: int = 0,
    turn_spans: tuple[tuple[int, int], ...] = (),
    turn_rewards: tuple[float, ...] = (),
    num_trained_by_turn: tuple[int, ...] = (),
) -> TrajectoryMeta:
    """Ten tokens, the last four sampled in one turn by version 0."""
    return TrajectoryMeta(
        policy=policy,
        role=role or policy,
        reward=reward,
        num_tokens=num_tokens,
        num_trained_tokens=num_trained,
        oldest_version=versions[0],
        newest_version=versions[1],
        finish_reason="stop",
        turn_spans=turn_spans or ((num_tokens - num_trained, num_tokens),),
        turn_rewards=turn_rewards or (reward,),
        num_trained_by_turn=num_trained_by_turn or (num_trained,),
        payload=PayloadRef(segment=0, offset=offset, length=100),
    )


def make_facts(*metas: TrajectoryMeta, score: float = 1.0) -> EpisodeFacts:
    """An episode of these trajectories."""
    return EpisodeFacts(trajectories=metas, score=score, metrics=(), duration_s=1.0)


def make_chunk_manifest(
    policy: str, version: int, *, kind: str = "full", base: int = -1, has_files: bool = False
) -> Manifest:
    """A version of one empty chunk."""
    return Manifest(
        policy=policy,
        version=version,
        kind=kind,  # type: ignore[arg-type]
        base=base,
        tensors=(),
        chunks=(Chunk("00", 0),),
        digest="00",
        files=(FileInfo(name="config.json", chunk=Chunk("00", 0)),) if has_files else (),
        num_bytes=0,
    )


class Driver:
    """A core, all that was done to it, and shorthands for its peers.

    Example: `d = Driver(make_plan()); d.start(); d.run_step()` trains the first step.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.core = Core(plan)
        self.now_s = 0.0
        self.commands: list[tuple[Command, float, tuple[Event, ...]]] = []
        self.events: list[Event] = []
        self.last: Decision = Decision()
        self.sessions: dict[str, Session] = {}
        self.out: dict[str, LeaseView] = {}
        """Leases that nobody answered yet."""

    def apply(self, command: Command) -> Decision:
        """Applies a command, one second after the one before."""
        self.now_s += 1.0
        self.last = self.core.apply(command, self.now_s)
        if self.last.events or not isinstance(command, IssueLeases | TakeBatch):
            self.commands.append((command, self.now_s, self.last.events))
        self.events.extend(self.last.events)
        return self.last

    # --- rollout ---

    def join(self, worker_id: str = "w0") -> None:
        """A rollout service joins."""
        self.apply(AddWorker(worker_id=worker_id, name=worker_id, hosts=tuple(self.plan.policies)))

    def join_as(self, worker_id: str, name: str) -> None:
        """A rollout service joins under a name that may have been there before."""
        self.apply(AddWorker(worker_id=worker_id, name=name, hosts=tuple(self.plan.policies)))

    def drop(self, worker_id: str = "w0") -> None:
        """A rollout service is lost."""
        self.apply(DropWorker(worker_id=worker_id, reason="killed"))

    def served(self, **versions: int) -> tuple[ServedVersions, ...]:
        """The newest version of each policy, or those given."""
        newest = {status.name: status.newest_version for status in self.core.policy_status()} | versions
        return tuple(ServedVersions(policy=p, versions=(v,)) for p, v in newest.items() if v >= 0)

    def lease(
        self, num: int = 1, worker_id: str = "w0", served: tuple[ServedVersions, ...] | None = None
    ) -> tuple[LeaseView, ...]:
        """Up to `num` leases."""
        command = IssueLeases(
            worker_id=worker_id, num_free=num, served=self.served() if served is None else served
        )
        leases = self.apply(command).answer
        self.out.update({lease.id: lease for lease in leases})
        return leases

    def finish(
        self, lease: LeaseView | str, *, reward: float | None = None, version: int | None = None
    ) -> EpisodeReceipt:
        """Answers a lease with one trajectory of each policy; rewards differ within a group."""
        lease_id = lease if isinstance(lease, str) else lease.id
        episode_idx = int(lease_id.split(".")[1])
        score = float(episode_idx % 2) if reward is None else reward
        metas = [
            make_meta(
                status.name,
                reward=score,
                versions=(status.newest_version if version is None else version,) * 2,
            )
            for status in self.core.policy_status()
        ]
        return self.result(lease_id, make_facts(*metas, score=score))

    def fail(self, lease: LeaseView, *, is_retryable: bool = True) -> EpisodeReceipt:
        """Answers a lease with a failure."""
        failure = Failure(error_class="Boom", message="it broke", is_retryable=is_retryable)
        return self.result(lease.id, failure)

    def result(self, lease_id: str, outcome: EpisodeFacts | Failure) -> EpisodeReceipt:
        """Answers a lease."""
        receipt = self.apply(RecordResult(lease_id=lease_id, worker_id="w0", outcome=outcome)).answer
        self.out.pop(lease_id, None)
        return receipt

    def expire(self, *leases: LeaseView) -> None:
        """The heartbeats of these leases stop."""
        self.apply(ExpireLeases(lease_ids=tuple(lease.id for lease in leases)))

    def finish_groups(self, num_groups: int, **result: float) -> None:
        """Leases and answers whole groups."""
        for lease in self.lease(num_groups * self.plan.group_size):
            self.finish(lease, **result)  # type: ignore[arg-type]

    # --- trainer ---

    def attach(self, policy: str = "actor", durable_step: int = 0) -> Session:
        """A trainer attaches."""
        command = AttachTrainer(policy=policy, trainer_id="t", durable_step=durable_step)
        self.sessions[policy] = self.apply(command).answer
        return self.sessions[policy]

    def publish(self, step: int, policy: str = "actor", **manifest: object) -> PublicationReply:
        """The next version, holding `step` steps."""
        version = manifest.pop("version", self.status(policy).newest_version + 1)
        return self.apply(
            PublishVersion(
                policy=policy,
                epoch=self.sessions[policy].epoch,
                step=step,
                manifest=make_chunk_manifest(policy, version, **manifest),  # type: ignore[arg-type]
            )
        ).answer

    def take(self, step: int, policy: str = "actor") -> BatchView | None:
        """The batch of a step."""
        return self.apply(TakeBatch(policy=policy, epoch=self.sessions[policy].epoch, step=step)).answer

    def commit(self, step: int, policy: str = "actor", version: int | None = None) -> None:
        """Commits a step with the newest version."""
        self.apply(
            CommitStep(
                policy=policy,
                epoch=self.sessions[policy].epoch,
                step=step,
                version=self.status(policy).newest_version if version is None else version,
                metrics=(),
            )
        )

    def release(self, step: int, policy: str = "actor") -> None:
        """A checkpoint of `step` steps is durable."""
        self.apply(ReleaseSteps(policy=policy, epoch=self.sessions[policy].epoch, step=step))

    def drop_batch(self, policy: str = "actor", step: int | None = None) -> DropReply:
        """A person drops the batch of the oldest step that is not committed."""
        status = self.status(policy)
        step = status.step if step is None else step
        return self.apply(
            DropBatch(policy=policy, epoch=status.epoch, step=step, reason="it does not fit")
        ).answer

    # --- both ---

    def start(self) -> None:
        """One service has joined and every trainer published version 0."""
        self.join()
        for policy in self.plan.policies:
            self.attach(policy)
            self.publish(0, policy, has_files=True)

    def run_step(self, policy: str = "actor") -> BatchView:
        """Rolls out, trains, publishes and commits the policy's next step."""
        self.finish_groups(self.plan.policies[policy].table.groups_per_batch)
        return self.train(policy)

    def train(self, policy: str = "actor") -> BatchView:
        """Trains, publishes and commits the policy's next step, whose groups are complete."""
        step = self.status(policy).step
        batch = self.take(step, policy)
        assert batch is not None
        self.publish(step + 1, policy)
        self.commit(step, policy)
        return batch

    def status(self, policy: str = "actor") -> PolicyStatus:
        """The policy's figures."""
        return next(status for status in self.core.policy_status() if status.name == policy)

    def fates(self, policy: str = "actor") -> FateCounts:
        """The policy's accounting."""
        return self.status(policy).fates

    def fate_of(self, group_id: int, policy: str = "actor") -> list[str]:
        """All fates that the group got for the policy."""
        decided = [e for e in self.events if isinstance(e, FateDecided)]
        return [e.fate for e in decided if e.group_id == group_id and e.policy == policy]
