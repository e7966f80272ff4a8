"""Makes one trace per episode across the services from the records of the journal.

    episode (dataflow)  from the draw of its group until its last fate
      attempt (a rollout service)  from the lease until its result or failure
        workflow (the same)        the duration that the service reports for the episode
          invoke_agent ROLE        the same, for each trajectory
      table POLICY (dataflow)      from the completion of the group until a batch takes it
      step POLICY (a trainer)      from then until the step is committed

The journal has all this data, so services measure nothing for traces, and a run can be traced after it has
ended. Ids are derived from the run and the episode, so exporting a run twice sends the same spans.

Attributes `gen_ai.*` are those of OpenTelemetry's conventions for generative AI, version 0.1.0
(https://github.com/open-telemetry/semantic-conventions-genai); all others are AstraFlow's own.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from astraflow.addons.view.groups import LeaseId, lease_of
from astraflow.addons.view.schema import TRAIN
from astraflow.dataflow.core.commands import (
    AttemptFailed,
    BatchTaken,
    Event,
    FateDecided,
    GroupDrawn,
    LeaseIssued,
    RecordResult,
    ResultDropped,
    TrajectoryMeta,
)
from astraflow.dataflow.journal.records import Record, decode_commands, decode_events
from astraflow.types import Failure

__all__ = ["Span", "TraceMaker"]

_MAX_OPEN = 50_000
"""Maximum number of unfinished groups. If there are more, the oldest are not traced to their end."""
_MAX_LEASES = 200_000

Value = str | int | float | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A span with its place in a trace. Times are Unix seconds."""

    trace_id: int
    span_id: int
    parent_id: int
    """0 for the root of a trace."""
    service: str
    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Value]
    is_error: bool = False


@dataclass(slots=True)
class _Open:
    """A group that still waits for fates."""

    task: str
    drawn_s: float
    waiting: set[str]
    """Policies that don't have a fate yet."""
    ended_s: float = 0.0
    """When the group's newest result arrived."""
    scores: dict[int, float] = field(default_factory=dict[int, float])
    taken_s: dict[str, float] = field(default_factory=dict[str, float])
    fates: dict[str, str] = field(default_factory=dict[str, str])


class TraceMaker:
    """Turns records into spans.

    Example: `maker = TraceMaker("run-1")`, then `for span in maker.spans(record)` for each record.
    """

    def __init__(self, run_id: str, *, every: int = 1) -> None:
        """Traces only the groups whose number is a multiple of `every`."""
        self._run_id = run_id
        self._every = every
        self._groups: dict[int, _Open] = {}
        self._leases: dict[str, tuple[str, float]] = {}
        """Lease -> (the service that holds it, time when it was issued)."""

    def spans(self, record: Record) -> Iterator[Span]:
        """Yields the spans that end with a record. Raises: JournalError if it cannot be decoded."""
        for command, events in zip(decode_commands(record), decode_events(record), strict=True):
            for event in events:
                self._begin(event, record.at_s)
            if isinstance(command, RecordResult):
                yield from self._result(command, events, record.at_s)
            for event in events:
                if isinstance(event, AttemptFailed):
                    yield from self._failed(event, record.at_s)
                elif isinstance(event, FateDecided):
                    yield from self._fate(event, record.at_s)

    # --- what begins ---

    def _begin(self, event: Event, at_s: float) -> None:
        match event:
            case GroupDrawn():
                if event.group_id % self._every == 0:
                    self._groups[event.group_id] = _Open(event.task_id, at_s, set(event.admitted))
                if len(self._groups) > _MAX_OPEN:
                    del self._groups[next(iter(self._groups))]
            case LeaseIssued():
                self._leases[event.lease_id] = (event.worker_id, at_s)
                if len(self._leases) > _MAX_LEASES:
                    del self._leases[next(iter(self._leases))]
            case BatchTaken():
                for group_id in event.group_ids:
                    if (group := self._groups.get(group_id)) is not None:
                        group.taken_s[event.policy] = at_s
            case _:
                pass

    # --- what ends ---

    def _result(self, command: RecordResult, events: Sequence[Event], at_s: float) -> Iterator[Span]:
        facts = command.outcome
        lease = lease_of(command.lease_id)
        if isinstance(facts, Failure) or lease is None or not self._is_traced(lease):
            return
        worker_id, issued_s = self._leases.pop(command.lease_id, (command.worker_id, at_s))
        is_dropped = any(isinstance(event, ResultDropped) for event in events)
        metrics = {item.name: item.value for item in facts.metrics}
        attributes: dict[str, Value] = {"score": facts.score, **metrics, "dropped": int(is_dropped)}
        attempt = self._span(lease, f"attempt {lease.attempt}", worker_id, (issued_s, at_s), attributes)
        began_s = max(issued_s, at_s - facts.duration_s)
        yield attempt
        operation: dict[str, Value] = {"gen_ai.operation.name": "invoke_workflow"}
        workflow = self._span(
            lease, f"workflow {lease.attempt}", worker_id, (began_s, at_s), operation, parent=attempt.span_id
        )
        yield workflow
        for part, meta in enumerate(facts.trajectories):
            own = self._span(
                lease,
                f"invoke_agent {meta.role}",
                worker_id,
                (began_s, at_s),
                _agent(meta),
                parent=workflow.span_id,
            )
            yield replace(own, span_id=_number(8, workflow.span_id, part))
        if is_dropped:
            return
        if lease.kind != TRAIN:
            yield self._root(lease, issued_s, at_s, {"kind": "eval", "score": facts.score})
        elif (group := self._groups.get(lease.group_id)) is not None:
            group.ended_s = at_s
            group.scores[lease.episode_idx] = facts.score

    def _failed(self, event: AttemptFailed, at_s: float) -> Iterator[Span]:
        lease = lease_of(event.lease_id)
        worker_id, issued_s = self._leases.pop(event.lease_id, ("", at_s))
        if lease is not None and self._is_traced(lease):
            attributes: dict[str, Value] = {"error": event.error_class}
            yield self._span(
                lease, f"attempt {lease.attempt}", worker_id, (issued_s, at_s), attributes, is_error=True
            )

    def _fate(self, event: FateDecided, at_s: float) -> Iterator[Span]:
        group = self._groups.get(event.group_id)
        if group is None:
            return
        group.waiting.discard(event.policy)
        group.fates[event.policy] = event.fate
        complete_s = group.ended_s or group.drawn_s
        taken_s = group.taken_s.get(event.policy)
        attributes: dict[str, Value] = {"fate": event.fate, "staleness": event.staleness}
        for episode_idx in group.scores:
            lease = LeaseId(TRAIN, event.group_id, episode_idx, 0)
            table = (complete_s, at_s if taken_s is None else taken_s)
            yield self._span(lease, f"table {event.policy}", "dataflow", table, attributes)
            if taken_s is not None and event.fate == "trained":
                step = {"step": event.step + 1}
                trainer = f"trainer {event.policy}"
                yield self._span(lease, f"step {event.policy}", trainer, (taken_s, at_s), {**step})
        if not group.waiting:
            del self._groups[event.group_id]
            fates = {f"fate {policy}": fate for policy, fate in group.fates.items()}
            for episode_idx, score in group.scores.items():
                lease = LeaseId(TRAIN, event.group_id, episode_idx, 0)
                attributes = {"kind": "train", "task": group.task, "score": score, **fates}
                yield self._root(lease, group.drawn_s, at_s, attributes)

    # --- spans ---

    def _is_traced(self, lease: LeaseId) -> bool:
        return lease.kind != TRAIN or lease.group_id % self._every == 0

    def _root(self, lease: LeaseId, start_s: float, end_s: float, attributes: dict[str, Value]) -> Span:
        attributes = {**attributes, "group": lease.group_id, "episode": lease.episode_idx}
        return Span(
            self._trace_id(lease), self._root_id(lease), 0, "dataflow", "episode", start_s, end_s, attributes
        )

    def _span(
        self,
        lease: LeaseId,
        name: str,
        service: str,
        times_s: tuple[float, float],
        attributes: dict[str, Value],
        *,
        parent: int = 0,
        is_error: bool = False,
    ) -> Span:
        return Span(
            trace_id=self._trace_id(lease),
            span_id=_number(8, self._run_id, lease[:3], name),
            parent_id=parent or self._root_id(lease),
            service=service.partition(".")[0] or "unknown",  # a worker's id is `NAME.NUMBER`
            name=name,
            start_s=times_s[0],
            end_s=max(times_s),
            attributes=attributes,
            is_error=is_error,
        )

    def _trace_id(self, lease: LeaseId) -> int:
        return _number(16, self._run_id, lease[:3])

    def _root_id(self, lease: LeaseId) -> int:
        return _number(8, self._run_id, lease[:3], "episode")


def _agent(meta: TrajectoryMeta) -> dict[str, Value]:
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": meta.role,
        "gen_ai.request.model": meta.policy,
        "gen_ai.response.finish_reasons": (meta.finish_reason,),
        "gen_ai.usage.input_tokens": sum(start for start, _ in meta.turn_spans),
        "gen_ai.usage.output_tokens": sum(end - start for start, end in meta.turn_spans),
        "version": meta.newest_version,
        "reward": meta.reward,
    }


def _number(num_bytes: int, *parts: object) -> int:
    """Derives an id from the parts that it identifies. It is never 0, which would mean "no id"."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=num_bytes).digest()
    return int.from_bytes(digest) or 1
