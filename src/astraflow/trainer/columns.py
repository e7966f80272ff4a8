"""The samples of a batch as flat numpy columns, checked. Pure.

A batch of hundreds of short samples is checked at once; only when something is wrong are the samples looked
at one by one, so that the message names the one at fault.

Legend: B samples, N tokens of all samples, P trained tokens of all samples.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from astraflow import wire
from astraflow.errors import WireError
from astraflow.facts import episode_weights
from astraflow.token_columns import Columns
from astraflow.types import Sample

__all__ = ["TEACHER_STREAM", "columns_from_samples", "reward_mean", "sample_name"]

TEACHER_STREAM = "teacher_logprobs"
"""Name of the trajectories' stream of a teacher's logprobs, float32 [T], at the sampling temperature."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


def sample_name(columns: Columns, sample: int) -> str:
    """How messages name a sample."""
    return f"group {columns.group_ids[sample]}/episode {columns.episode_idx[sample]}"


def columns_from_samples(
    samples: Sequence[Sample],
    *,
    vocab_size: int,
    needed_streams: Sequence[str] = (),
    is_slice: bool = False,
) -> Columns:
    """Checks and joins samples. `is_slice`: other ranks have more, so these may hold nothing to train.

    Raises: WireError naming the group and episode if columns differ in length, hold ids outside the
    vocabulary or numbers that are not finite, lack advantages or versions of trained tokens, or lack a stream
    that is needed or that other samples carry.
    """
    if not samples and not is_slice:
        raise WireError("the batch holds no samples; a step needs at least one")
    for sample in samples:
        _check_lengths(sample)
    trajectories = [s.trajectory for s in samples]
    token_ids = wire.array(b"".join(t.token_ids for t in trajectories), "int32")
    mask = wire.array(b"".join(t.mask for t in trajectories), "uint8")
    behavior = wire.array(b"".join(t.behavior_logprobs for t in trajectories), "float32")
    lengths = np.array([len(t.mask) for t in trajectories], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    trained_idx = np.flatnonzero(mask)
    counts = np.add.reduceat(mask != 0, starts, dtype=np.int64)
    advantages, spans = _advantages(samples, starts, len(mask))
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
        versions=_versions(samples, starts, len(mask))[trained_idx],
        streams={name: entries[trained_idx] for name, entries in _streams(samples, needed_streams).items()},
        media=[t.media for t in trajectories] if any(t.media for t in trajectories) else (),
    )
    if not columns.trained_idx.size and not is_slice:
        raise WireError(f"none of the batch's {len(samples)} samples has a trained token")
    _check(columns, vocab_size)
    return columns


def reward_mean(samples: Sequence[Sample]) -> float:
    """Mean reward of the samples' episodes, counted once per role; 0 without samples."""
    episodes = [(s.group_id, s.episode_idx, s.trajectory.role) for s in samples]
    shares = episode_weights(episodes, [s.trajectory.mask.count(1) for s in samples])
    total = sum(w * s.trajectory.reward for w, s in zip(shares, samples, strict=True))
    return total / max(1, len(set(episodes)))


def _episode_tokens(samples: Sequence[Sample], num_trained: Ints) -> Ints:
    """[B]: the trained tokens of each sample's episode and role; all of its samples must be at hand, as they
    are in a slice of a batch."""
    numbers: dict[tuple[int, int, str], int] = {}
    keys = ((s.group_id, s.episode_idx, s.trajectory.role) for s in samples)
    episodes = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    totals = np.zeros(len(numbers), dtype=np.int64)
    np.add.at(totals, episodes, num_trained)
    return totals[episodes]


def _streams(samples: Sequence[Sample], needed: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Name -> [N], or [N, W] with W values per token, of every stream that a sample carries.

    Raises: WireError if another sample lacks it.
    """
    types: dict[str, tuple[wire.ColumnType, int]] = {}
    for sample in samples:
        for stream in sample.trajectory.streams:
            types.setdefault(stream.name, (stream.dtype, stream.width))
    if TEACHER_STREAM in types:
        types[TEACHER_STREAM] = ("float32", 1)
    for name in needed:
        if name not in types:
            raise WireError(
                f"policy {samples[0].trajectory.policy}: train.loss reads stream {name!r}, and no trajectory "
                "of the batch carries it; record it in the workflow (Rewards.add_stream) or in the engine "
                "(Generation.streams)"
            )
    return {name: _stream(samples, name, *kind) for name, kind in sorted(types.items())}


def _stream(samples: Sequence[Sample], name: str, dtype: wire.ColumnType, width: int) -> NDArray[Any]:
    parts: list[bytes] = []
    for idx, sample in enumerate(samples):
        trajectory = sample.trajectory
        stream = next((s for s in trajectory.streams if s.name == name), None)
        num_wanted = len(trajectory.mask) * width
        is_same = stream is not None and (stream.dtype, stream.width) == (dtype, width)
        if stream is None or not is_same or len(wire.array(stream.data, dtype)) != num_wanted:
            has = "no entries" if stream is None else f"{len(stream.data)} bytes of {stream.dtype}"
            raise WireError(
                f"policy {trajectory.policy}, {_trajectory_name(samples, idx)}: stream {name!r} has {has}; "
                f"expected {num_wanted} {dtype} entries, since other trajectories of the batch carry them or "
                "train.loss reads them"
            )
        parts.append(stream.data)
    entries = wire.array(b"".join(parts), dtype)
    return entries if width == 1 else entries.reshape(-1, width)


def _trajectory_name(samples: Sequence[Sample], idx: int) -> str:
    """Group, episode, and which of the policy's trajectories of that episode it is."""
    own = samples[idx]
    before = [(s.group_id, s.episode_idx) for s in samples[:idx]].count((own.group_id, own.episode_idx))
    return f"group {own.group_id}/episode {own.episode_idx}/trajectory {before} (role {own.trajectory.role})"


def _check_lengths(sample: Sample) -> None:
    trajectory = sample.trajectory
    num = len(trajectory.mask)
    sizes = (len(trajectory.token_ids), len(trajectory.behavior_logprobs))
    if num < 2 or sizes != (4 * num, 4 * num):
        raise WireError(
            f"group {sample.group_id}/episode {sample.episode_idx}: {sizes[0] / 4:g} token ids, {num} mask "
            f"entries and {sizes[1] / 4:g} logprobs; they must be equally many, and at least 2"
        )


def _advantages(samples: Sequence[Sample], starts: Ints, num_tokens: int) -> tuple[Floats, Ints]:
    """[N], NaN where no span covers the token; and [N], the span's number."""
    column = np.full(num_tokens, np.nan, dtype=np.float32)
    numbers = np.full(num_tokens, -1, dtype=np.int64)
    number = 0
    for sample, offset in zip(samples, starts.tolist(), strict=True):
        num = len(sample.trajectory.mask)
        for span in sample.advantages:
            _check_span(sample, "an advantage", span.start, span.end - span.start, num)
            column[offset + span.start : offset + span.end] = span.value
            numbers[offset + span.start : offset + span.end] = number
            number += 1
    return column, numbers


def _versions(samples: Sequence[Sample], starts: Ints, num_tokens: int) -> Ints:
    """[N], -1 where no span covers the token."""
    column = np.full(num_tokens, -1, dtype=np.int64)
    for sample, offset in zip(samples, starts.tolist(), strict=True):
        num = len(sample.trajectory.mask)
        for span in sample.trajectory.versions:
            _check_span(sample, "a version", span.start, span.length, num)
            column[offset + span.start : offset + span.start + span.length] = span.version
    return column


def _check_span(sample: Sample, what: str, start: int, length: int, num: int) -> None:
    if start < 0 or length < 0 or start + length > num:
        raise WireError(
            f"group {sample.group_id}/episode {sample.episode_idx}: {what} covers tokens {start} to "
            f"{start + length} of {num}"
        )


def _check(columns: Columns, vocab_size: int) -> None:
    ids = columns.token_ids
    _refuse(
        columns, np.flatnonzero((ids < 0) | (ids >= vocab_size)), f"token ids outside 0..{vocab_size - 1}"
    )
    is_first = np.isin(columns.trained_idx, columns.starts)
    _refuse(columns, columns.trained_idx[is_first], "a trained first token, which nothing predicts")
    problems = (
        (~np.isfinite(columns.behavior_logprobs), "behavior logprobs that are not finite"),
        (~np.isfinite(columns.advantages), "trained tokens without a finite advantage"),
        (columns.versions < 0, "trained tokens without a version"),
    )
    for name, entries in columns.streams.items():
        is_good = np.isfinite(entries)
        is_bad = ~(is_good if is_good.ndim == 1 else is_good.all(axis=1))
        problems += ((is_bad, f"entries of stream {name!r} that are not finite"),)
    for is_bad, what in problems:
        _refuse(columns, columns.trained_idx[is_bad], what)
    cold = ~(np.isfinite(columns.temperatures) & (columns.temperatures > 0))
    _refuse(
        columns, columns.starts[cold], "a sampling temperature that is not above 0; greedy data cannot train"
    )


def _refuse(columns: Columns, tokens: NDArray[Any], what: str) -> None:
    """Raises if any token is at fault, naming the first one's sample."""
    if not tokens.size:
        return
    first = int(tokens[0])
    sample = int(np.flatnonzero(columns.starts <= first)[-1])
    position = first - int(columns.starts[sample])
    raise WireError(
        f"{sample_name(columns, sample)}: {what} (first at token {position}; {len(tokens)} in the batch)"
    )
