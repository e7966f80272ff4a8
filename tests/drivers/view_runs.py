"""Writes run folders as the dataflow writes them, without running anything: for tests of the viewer."""

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from astraflow import wire
from astraflow.dataflow.core.commands import (
    AddWorker,
    AttemptFailed,
    Command,
    EpisodeFacts,
    Event,
    FateDecided,
    GroupDrawn,
    IssueLeases,
    LeaseIssued,
    RecordResult,
    TrajectoryMeta,
)
from astraflow.dataflow.journal.journal_db import make_insert, open_database
from astraflow.dataflow.journal.records import (
    PlanEntry,
    Record,
    chain_of,
    encode_commands,
    encode_events,
    encode_plan,
    encode_records,
)
from astraflow.dataflow.journal.segments import PLAN, RECORDS, SegmentStore
from astraflow.types import Failure, Fate, Message, MetricItem, Trajectory, Turn, VersionSpan
from astraflow.wire import column
from drivers.log_driver import plan_of

RUN_ID = "run-1"
WORKER = "rollout-0.a1"


class RunWriter:
    """Example: `run = RunWriter(tmp_path); run.group(0, [0, 1]); run.flush()`."""

    def __init__(self, folder: Path, *, segment_bytes: int = 1 << 20, run_id: str = RUN_ID) -> None:
        self.folder = folder
        self.segments = folder / "journal" / "segments"
        self._store = SegmentStore(self.segments, segment_bytes=segment_bytes)
        self._tables = open_database(folder / "journal" / "journal.sqlite")
        self._tables.execute(*make_insert("meta", ("run_id", run_id), replaces=True))
        self._store.add(PLAN, encode_plan(PlanEntry(run_id, 0, 0.0, msgspec.msgpack.encode(plan_of()))))
        self._seq = 0
        self._chain = b""
        self._waiting: list[Record] = []
        self.command(AddWorker(worker_id=WORKER, name="rollout-0", hosts=("actor",)))

    def command(self, command: Command, *events: Event) -> None:
        """One record of one command."""
        self._seq += 1
        row = (self._seq, 1000.0 + self._seq, encode_commands([command]), encode_events([events]))
        self._chain = chain_of(self._chain, Record(*row, b""))
        self._waiting.append(Record(*row, self._chain))

    def flush(self, *, is_forced: bool = False) -> None:
        """Ends a flush: payloads first, then their records. `is_forced`: even if there are none."""
        if self._waiting or is_forced:
            self._store.add(RECORDS, encode_records(self._waiting))
            self._waiting = []
        self._store.write(self._store.take())

    def close(self) -> None:
        self.flush()
        self._store.close()
        self._tables.close()

    def draw(
        self, group_id: int, task: str = "", policies: tuple[str, ...] = ("actor",), size: int = 2
    ) -> None:
        """A group is drawn, and its leases go out."""
        drawn = GroupDrawn(
            group_id=group_id,
            task_id=task or f"sums/{group_id}",
            task_idx=group_id,
            admitted=policies,
            unadmitted=(),
        )
        leases = [
            LeaseIssued(lease_id=f"{group_id}.{idx}.0", kind="train", group_id=group_id, worker_id=WORKER)
            for idx in range(size)
        ]
        self.command(IssueLeases(worker_id=WORKER, num_free=size, served=()), drawn, *leases)

    def result(
        self,
        lease_id: str,
        *,
        reward: float = 1.0,
        policy: str = "actor",
        version: int = 0,
        num: int = 4,
        **metrics: float,
    ) -> None:
        """An episode of `num` tokens, of which the last two were sampled."""
        spans = (VersionSpan(num - 2, 2, version),)
        trajectory = Trajectory(
            policy=policy,
            role=policy,
            token_ids=column(range(num), "int32"),
            mask=column([0] * (num - 2) + [1, 1], "uint8"),
            behavior_logprobs=column([0.0] * (num - 2) + [-0.5, -2.0], "float32"),
            versions=spans,
            temperature=1.0,
            finish_reason="stop",
            turns=(Turn(start=num - 2, end=num, reward=reward),),
            reward=reward,
        )
        self.play(
            lease_id, trajectory, score=reward, metrics={"turns": 1.0, "reward/exact": reward} | metrics
        )

    def play(
        self,
        lease_id: str,
        *trajectories: Trajectory,
        score: float = 0.0,
        metrics: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """An episode of these trajectories."""
        facts = EpisodeFacts(
            trajectories=tuple([self._meta(trajectory) for trajectory in trajectories]),
            score=score,
            metrics=tuple([MetricItem(name, value) for name, value in metrics.items()]),
            duration_s=0.25,
        )
        self.command(RecordResult(lease_id=lease_id, worker_id=WORKER, outcome=facts))

    def _meta(self, trajectory: Trajectory) -> TrajectoryMeta:
        versions = [span.version for span in trajectory.versions]
        return TrajectoryMeta(
            policy=trajectory.policy,
            role=trajectory.role,
            reward=trajectory.reward,
            num_tokens=len(trajectory.mask),
            num_trained_tokens=sum(trajectory.mask),
            oldest_version=min(versions),
            newest_version=max(versions),
            finish_reason=trajectory.finish_reason,
            turn_spans=tuple([(turn.start, turn.end) for turn in trajectory.turns]),
            turn_rewards=tuple([turn.reward for turn in trajectory.turns]),
            num_trained_by_turn=tuple([turn.end - turn.start for turn in trajectory.turns]),
            payload=self._store.append(wire.encode(trajectory)),
        )

    def fail(self, lease_id: str, message: str, *, error_class: str = "timeout") -> None:
        """An attempt fails with a message."""
        failure = Failure(error_class=error_class, message=message)
        failed = AttemptFailed(lease_id=lease_id, error_class=error_class, is_final=False)
        self.command(RecordResult(lease_id=lease_id, worker_id=WORKER, outcome=failure), failed)

    def decide(self, group_id: int, fate: Fate, *, step: int = -1, policy: str = "actor") -> None:
        """A group gets its fate."""
        decided = FateDecided(
            policy=policy, group_id=group_id, fate=fate, step=step, num_tokens=8, staleness=1
        )
        self.command(IssueLeases(worker_id=WORKER, num_free=0, served=()), decided)

    def group(
        self, group_id: int, rewards: Sequence[float], *, fate: Fate | None = "trained", version: int = 0
    ) -> None:
        """A whole group: drawn, with one episode per reward, and decided."""
        self.draw(group_id, size=len(rewards))
        for idx, reward in enumerate(rewards):
            self.result(f"{group_id}.{idx}.0", reward=reward, version=version)
        if fate is not None:
            self.decide(group_id, fate, step=group_id if fate == "trained" else -1)

    def transcript(
        self,
        group_id: int,
        score: float,
        *contents: str,
        kind: str = "train",
        task: str = "t",
        role: Literal["user", "assistant"] = "user",
    ) -> None:
        """The messages of an episode are kept."""
        messages = tuple(Message(role=role, content=content) for content in contents)
        ref = self._store.append(msgspec.msgpack.encode(messages))
        values = (kind, group_id, task, "actor", 3, score, ref.segment, ref.offset, ref.length, None)
        self._tables.execute(*make_insert("samples", values))

    def eval_result(self, lease_id: str, score: float) -> None:
        """An episode of an evaluation, which has no trajectories in the journal."""
        facts = EpisodeFacts(trajectories=(), score=score, metrics=(), duration_s=0.5)
        self.command(RecordResult(lease_id=lease_id, worker_id=WORKER, outcome=facts))

    @property
    def tables(self) -> sqlite3.Connection:
        return self._tables
