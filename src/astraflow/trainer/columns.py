"""Converts the samples of a batch into flat numpy columns, checked by the rules of `trajectory_rules`. Pure.

Legend: B samples, N tokens of all samples, P trained tokens of all samples.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow import wire
from astraflow.errors import WireError
from astraflow.trajectory_rules import ANY_TRAINER, check_shape, check_values, values_hold
from astraflow.types import AdvantageSpan, Sample, SampleRules, Trajectory
from astraflow.types.facts import episode_weights
from astraflow.types.token_columns import Columns

__all__ = ["TEACHER_STREAM", "columns_from_samples", "reward_mean", "sample_name"]

TEACHER_STREAM = "teacher_logprobs"
"""Name of the stream with a teacher's logprobs at the sampling temperature, float32 [T]."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


def sample_name(columns: Columns, sample: int) -> str:
    """The name of a sample in messages."""
    return f"group {columns.group_ids[sample]}/episode {columns.episode_idx[sample]}"


def columns_from_samples(
    samples: Sequence[Sample],
    *,
    vocab_size: int,
    rules: SampleRules = ANY_TRAINER,
    is_slice: bool = False,
) -> Columns:
    """Checks and joins samples. `is_slice`: other ranks have further samples, so there may be none here.

    `rules`: what the policy's trainer needs in addition to the vocabulary. A stream that it does not name is
    kept if all trajectories have it with the same type; otherwise it is counted in `num_left_out`. Raises:
    WireError, naming the group and episode, if a trajectory breaks a rule of `trajectory_rules`, or if
    trained tokens lack a finite advantage.
    """
    if not samples and not is_slice:
        raise WireError("the batch has no samples; a step needs at least one")
    _check_trajectories(samples, msgspec.structs.replace(rules, vocab_size=vocab_size))
    trajectories = [s.trajectory for s in samples]
    token_ids = wire.array(b"".join(t.token_ids for t in trajectories), "int32")
    mask = wire.array(b"".join(t.mask for t in trajectories), "uint8")
    behavior = wire.array(b"".join(t.behavior_logprobs for t in trajectories), "float32")
    lengths = np.array([len(t.mask) for t in trajectories], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    trained_idx = np.flatnonzero(mask)
    counts = np.array([t.mask.count(1) for t in trajectories], dtype=np.int64)
    advantages, spans = _advantages(samples, starts, len(mask))
    joined, num_left_out = _streams(trajectories)
    columns = Columns(
        token_ids=token_ids,
        starts=starts,
        lengths=lengths,
        group_ids=np.array([s.group_id for s in samples], dtype=np.int64),
        episode_idx=np.array([s.episode_idx for s in samples], dtype=np.int64),
        episode_tokens=_episode_tokens(samples, counts),
        temperatures=np.array([t.temperature for t in trajectories], dtype=np.float32),
        trained_idx=trained_idx,
        trained_starts=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)]),
        behavior_logprobs=behavior[trained_idx],
        advantages=advantages[trained_idx],
        is_turn_end=np.diff(spans[trained_idx], append=-1) != 0,
        versions=_versions(trajectories, starts, len(mask))[trained_idx],
        streams={name: entries[trained_idx] for name, entries in joined.items()},
        is_zeroed=np.array([bool(s.zeroed_by) for s in samples], dtype=np.bool_),
        num_left_out=num_left_out,
        media=[t.media for t in trajectories] if any(t.media for t in trajectories) else (),
    )
    is_bad = (spans[trained_idx] < 0) | ~np.isfinite(columns.advantages)
    _refuse(columns, trained_idx[is_bad], "trained tokens without a finite advantage")
    return columns


def reward_mean(samples: Sequence[Sample]) -> float:
    """Mean reward of the samples' episodes, counted once per role; 0 without samples."""
    episodes = [(s.group_id, s.episode_idx, s.trajectory.role) for s in samples]
    shares = episode_weights(episodes, [s.trajectory.mask.count(1) for s in samples])
    total = sum(w * s.trajectory.reward for w, s in zip(shares, samples, strict=True))
    return total / max(1, len(set(episodes)))


def _episode_tokens(samples: Sequence[Sample], num_trained: Ints) -> Ints:
    """[B]: number of trained tokens of each sample's episode and role. All samples of an episode must be
    given, as is the case in a slice of a batch."""
    numbers: dict[tuple[int, int, str], int] = {}
    keys = ((s.group_id, s.episode_idx, s.trajectory.role) for s in samples)
    episodes = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    totals = np.zeros(len(numbers), dtype=np.int64)
    np.add.at(totals, episodes, num_trained)
    return totals[episodes]


def _check_trajectories(samples: Sequence[Sample], rules: SampleRules) -> None:
    for idx, sample in enumerate(samples):
        try:
            check_shape(sample.trajectory, rules)
        except WireError as err:
            raise WireError(f"{_trajectory_name(samples, idx)}: {err}") from err
    if not samples or values_hold([s.trajectory for s in samples], rules.vocab_size):
        return
    for idx, sample in enumerate(samples):
        try:
            check_values(sample.trajectory, rules)
        except WireError as err:
            raise WireError(f"{_trajectory_name(samples, idx)}: {err}") from err


def _streams(trajectories: Sequence[Trajectory]) -> tuple[dict[str, NDArray[Any]], int]:
    """Name -> [N], or [N, W] with W values per token, of every stream that all trajectories have with the
    same type; and the number of other streams, which are left out."""
    forms: dict[str, set[tuple[wire.ColumnType, int]]] = {}
    parts: dict[str, list[bytes]] = {}
    for trajectory in trajectories:
        for stream in trajectory.streams:
            forms.setdefault(stream.name, set()).add((stream.dtype, stream.width))
            parts.setdefault(stream.name, []).append(stream.data)
    joined: dict[str, NDArray[Any]] = {}
    for name in sorted(forms):
        if len(parts[name]) < len(trajectories) or len(forms[name]) > 1:
            continue
        ((dtype, width),) = forms[name]
        entries = wire.array(b"".join(parts[name]), dtype)
        joined[name] = entries if width == 1 else entries.reshape(-1, width)
    return joined, len(forms) - len(joined)


def _trajectory_name(samples: Sequence[Sample], idx: int) -> str:
    """Policy, group, episode, and the index of the trajectory among the policy's in that episode."""
    own = samples[idx]
    trajectory = own.trajectory
    before = [(s.group_id, s.episode_idx) for s in samples[:idx]].count((own.group_id, own.episode_idx))
    return (
        f"policy {trajectory.policy}, group {own.group_id}/episode {own.episode_idx}/trajectory {before} "
        f"(role {trajectory.role})"
    )


def _advantages(samples: Sequence[Sample], starts: Ints, num_tokens: int) -> tuple[Floats, Ints]:
    """[N] advantages, and [N] the number of the span that covers the token, or -1 if none does."""
    column = np.zeros(num_tokens, dtype=np.float32)
    numbers = np.full(num_tokens, -1, dtype=np.int64)
    number = 0
    for sample, offset in zip(samples, starts.tolist(), strict=True):
        num = len(sample.trajectory.mask)
        for span in sample.advantages:
            _check_span(sample, span, num)
            column[offset + span.start : offset + span.end] = span.value
            numbers[offset + span.start : offset + span.end] = number
            number += 1
    return column, numbers


def _versions(trajectories: Sequence[Trajectory], starts: Ints, num_tokens: int) -> Ints:
    """[N] versions, -1 where no span covers the token."""
    column = np.full(num_tokens, -1, dtype=np.int64)
    for trajectory, offset in zip(trajectories, starts.tolist(), strict=True):
        for span in trajectory.versions:
            column[offset + span.start : offset + span.start + span.length] = span.version
    return column


def _check_span(sample: Sample, span: AdvantageSpan, num: int) -> None:
    if not 0 <= span.start <= span.end <= num:
        raise WireError(
            f"group {sample.group_id}/episode {sample.episode_idx}: an advantage covers tokens {span.start} "
            f"to {span.end} of {num}"
        )


def _refuse(columns: Columns, tokens: NDArray[Any], what: str) -> None:
    """Raises: WireError if there are any faulty tokens, naming the sample of the first."""
    if not tokens.size:
        return
    first = int(tokens[0])
    sample = int(np.flatnonzero(columns.starts <= first)[-1])
    position = first - int(columns.starts[sample])
    raise WireError(
        f"{sample_name(columns, sample)}: {what} (first at token {position}; {len(tokens)} in the batch)"
    )
