"""Inputs of a forecast: lengths of episodes and speeds of the parts, given or measured.

They are measured from a run's journal:

    lengths      the tokens of each turn of the newest episodes, unchanged
    service      from the durations of these episodes: time per token, additional time for each concurrent
                 request, and time per turn that doesn't depend on tokens (environment, prompts); see
                 `service_fit`; the number of slots is the median of what services could run
    trainers     by least squares over the steps: fixed time, and time per token; by medians: the time of a
                 publication; also the share of complete groups that filters dropped

If one run cannot distinguish two parts, such as those of the step time when all batches are alike, one of
them gets the whole time. Forecasts for a similar load are not affected.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from statistics import fmean, median

import numpy as np
from pydantic import Field

from astraflow.config import Config
from astraflow.dataflow.core.commands import (
    EpisodeFacts,
    Event,
    FateDecided,
    IssueLeases,
    LeaseIssued,
    RecordResult,
    ResultDropped,
)
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import decode_commands, decode_events
from astraflow.errors import DataError
from astraflow.types import StepRecord
from astraflow_paced.forecast.service_fit import EpisodeTime, fit_service, least_squares

__all__ = [
    "Call",
    "EpisodeShape",
    "ForecastInputs",
    "LengthsGiven",
    "ServiceSpeed",
    "TrainerSpeed",
    "draw_shapes",
    "measure_run",
]

_MOST_EPISODES = 20_000
"""Number of newest episodes of a journal that are read."""
_LEAST_EPISODES = 16
_LEAST_STEPS = 3


class LengthsGiven(Config):
    """Lengths of episodes, for a forecast without a measured run."""

    turns: int = Field(default=1, ge=1, le=1000)
    """Completions of each trained policy per episode."""
    mean_tokens: float = Field(default=500.0, ge=1, le=2**24)
    """Mean length of a completion in tokens, before `sampling.max_tokens` cuts it; lengths are log-normal."""
    sigma: float = Field(default=0.8, ge=0, le=5)
    """Standard deviation of log(length); 0 makes all completions equally long."""


class ServiceSpeed(Config):
    """A rollout service with speed 1."""

    tokens_per_s: float = Field(default=80.0, gt=0, le=1e9)
    """Tokens per second of a request that runs alone."""
    max_tokens_per_s: float = Field(default=0.0, ge=0, le=1e12)
    """Bound on the tokens per second of all requests together. With n requests, each gets 1 / (1 /
    tokens_per_s + n / max_tokens_per_s). 0: no bound."""
    slots: int = Field(default=0, ge=0, le=65_536)
    """Episodes that its engines have room for; 0: `rollout.max_episodes`."""
    turn_s: float = Field(default=0.0, ge=0)
    """Seconds per completion that don't depend on its tokens: the environment's reply, the prompt, the
    request."""
    idle_s: float = Field(default=0.0, ge=0)
    """Seconds for which an episode's slot is empty before and after it, while its lease and its result are
    in transit."""
    load_s: float = Field(default=0.0, ge=0)
    """Seconds from a version's publication until a service serves it."""


class TrainerSpeed(Config):
    """The trainer of a policy."""

    step_s: float = Field(default=10.0, ge=0)
    """Fixed seconds per step, whatever the size of its batch."""
    million_tokens_s: float = Field(default=0.0, ge=0)
    """Additional seconds per million sampled tokens of the batch."""
    publish_s: float = Field(default=0.0, ge=0)
    """Seconds that a publication takes. The next step is trained in the meantime."""
    filtered_frac: float = Field(default=0.0, ge=0, lt=1)
    """Share of the complete groups that filters drop."""


class ForecastInputs(Config):
    """Lengths and speeds. They come from a YAML file or from a run's journal."""

    lengths: LengthsGiven = LengthsGiven()
    """Only used if no run was measured."""
    service: ServiceSpeed = ServiceSpeed()
    """A rollout service. Kinds of services multiply its speed."""
    trainers: dict[str, TrainerSpeed] = Field(default_factory=dict)
    """Trained policy -> its trainer. A missing one has the defaults."""


@dataclass(frozen=True, slots=True)
class Call:
    """A completion of an episode."""

    policy: str
    num_tokens: int


EpisodeShape = tuple[Call, ...]
"""Completions of an episode, in order. Example: `(Call("solver", 812), Call("verifier", 40))`."""


def draw_shapes(
    lengths: LengthsGiven, most_tokens: Mapping[str, int], *, seed: int = 0
) -> tuple[EpisodeShape, ...]:
    """Draws episodes with the given lengths. `most_tokens`: policy -> token at which a completion is cut."""
    rng = random.Random(seed)
    middle = log(lengths.mean_tokens) - lengths.sigma**2 / 2

    def call(policy: str, most: int) -> Call:
        return Call(policy, max(1, min(most, round(rng.lognormvariate(middle, lengths.sigma)))))

    return tuple(
        tuple(call(policy, most) for _ in range(lengths.turns) for policy, most in most_tokens.items())
        for _ in range(4096)
    )


# --- measured -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """What a journal records about episodes, groups and steps."""

    shapes: list[EpisodeShape] = field(default_factory=list[EpisodeShape])
    times: list[EpisodeTime] = field(default_factory=list[EpisodeTime])
    idle_s: list[float] = field(default_factory=list[float])
    fates: dict[str, dict[str, int]] = field(
        default_factory=lambda: defaultdict[str, dict[str, int]](lambda: defaultdict[str, int](int))
    )
    """Policy -> fate -> number of groups."""
    issued: dict[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])
    """Open lease -> since when it is open, and on which service."""
    num_open: Counter[str] = field(default_factory=Counter[str])
    """Service -> number of its open leases."""
    slots: list[int] = field(default_factory=list[int])
    """Running and free slots of a service, whenever it got leases."""


def measure_run(
    journal: Path, policies: Sequence[str], num_slots: int
) -> tuple[ForecastInputs, tuple[EpisodeShape, ...]]:
    """Measures the speeds and the episodes of a run.

    `num_slots` is the number of requests that a service of this run can process at once.

    Raises: JournalError if the journal cannot be read; DataError if the run was too short.
    """
    with JournalReader(journal) as reader:
        run = _episodes(reader, frozenset(policies))
        steps = reader.steps()
        loads: dict[str, list[float]] = defaultdict(list)
        for row in reader.telemetry():
            if row.span.kind == "load":
                loads[row.source].append(row.span.end_s - row.span.start_s)
    if len(run.shapes) < _LEAST_EPISODES:
        raise DataError(
            f"{journal} has {len(run.shapes)} whole episodes with their leases; a forecast needs at least "
            f"{_LEAST_EPISODES}: let the run continue, or give lengths and speeds with --given"
        )
    later = [seconds for spans in loads.values() for seconds in spans[1:]]
    fixed_s, row_s, turn_s = fit_service(run.times, num_slots)
    service = ServiceSpeed(
        tokens_per_s=1 / max(fixed_s, 1e-9),
        slots=round(median(run.slots)),
        max_tokens_per_s=1 / row_s if row_s > 0 else 0.0,
        turn_s=turn_s,
        idle_s=fmean(run.idle_s),
        load_s=median(later) if later else 0.0,
    )
    trainers = {name: _trainer_speed(name, steps, run.fates[name]) for name in policies}
    return ForecastInputs(service=service, trainers=trainers), tuple(run.shapes)


def _episodes(reader: JournalReader, policies: frozenset[str]) -> _Run:
    run = _Run()
    for record in reader.records():
        for command, events in zip(decode_commands(record), decode_events(record), strict=True):
            if isinstance(command, IssueLeases):
                run.slots.append(run.num_open[command.worker_id] + command.num_free)
            _note_events(run, events, record.at_s)
            is_dropped = any(isinstance(event, ResultDropped) for event in events)
            if isinstance(command, RecordResult) and not is_dropped:
                _note_result(run, command, record.at_s, policies)
    for column in (run.shapes, run.times, run.idle_s, run.slots):
        del column[:-_MOST_EPISODES]
    return run


def _note_events(run: _Run, events: Sequence[Event], at_s: float) -> None:
    for event in events:
        if isinstance(event, LeaseIssued):
            run.issued[event.lease_id] = (at_s, event.worker_id)
            run.num_open[event.worker_id] += 1
        elif isinstance(event, FateDecided):
            run.fates[event.policy][event.fate] += 1


def _note_result(run: _Run, result: RecordResult, at_s: float, policies: frozenset[str]) -> None:
    since_s, service = run.issued.pop(result.lease_id, (0.0, ""))
    run.num_open[service] -= 1
    facts = result.outcome
    if not isinstance(facts, EpisodeFacts):
        return
    shape = tuple(
        Call(trajectory.policy, num_tokens)
        for trajectory in facts.trajectories
        if trajectory.policy in policies
        for num_tokens in trajectory.num_trained_by_turn
        if num_tokens
    )
    if not service or not shape or result.lease_id.startswith("e"):
        return
    run.shapes.append(shape)
    num_tokens = sum(call.num_tokens for call in shape)
    run.times.append(EpisodeTime(service, at_s, facts.duration_s, num_tokens, len(shape)))
    run.idle_s.append(max(0.0, at_s - since_s - facts.duration_s))


def _trainer_speed(name: str, steps: Sequence[StepRecord], fates: Mapping[str, int]) -> TrainerSpeed:
    """Returns the speed of a trainer. Leaves out the first step, which loads and compiles."""
    own = [{item.name: item.value for item in step.metrics} for step in steps if step.policy == name]
    tokens = [float(step.num_trained_tokens) for step in steps if step.policy == name]
    own = own[1:]
    tokens = tokens[1:]
    if len(own) < _LEAST_STEPS:
        raise DataError(
            f"policy {name!r} committed {len(own) + 1} steps in the measured run; a forecast needs at least "
            f"{_LEAST_STEPS + 1}: let the run continue, or give its speed with --given"
        )
    spent_s = np.array([step.get("train_s", 0.0) + step.get("export_s", 0.0) for step in own])
    columns = np.stack([np.ones(len(own)), np.array(tokens) / 1e6], axis=1)
    step_s, million_tokens_s = least_squares(columns, spent_s)
    complete = sum(fates.get(fate, 0) for fate in ("trained", "filtered", "stale", "evicted"))
    return TrainerSpeed(
        step_s=step_s,
        million_tokens_s=million_tokens_s,
        publish_s=median(step.get("publish_s", 0.0) for step in own),
        filtered_frac=min(0.99, fates.get("filtered", 0) / complete) if complete else 0.0,
    )
