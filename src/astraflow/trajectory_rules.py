"""The rules that a trajectory must satisfy to be trained, and the only place where they are defined.

The dataflow checks them when a result arrives, and the trainer checks them again when it gets a batch, which
may come from another dataflow. So an accepted result never stops a trainer later. Rules that depend on the
policy are in `SampleRules`, which the policy's trainer sends when it attaches. Each check raises a
`WireError` with the value and what was expected; the caller adds the location.

Rules that only the dataflow can check (known policies, published versions, rewards, turns) are in
`dataflow.ingest`.

Short trajectories arrive in large numbers, and numpy costs microseconds per call at any length. So masks are
compared as bytes with the version spans, and `values_hold` checks the ids and logprobs of many trajectories
in a few passes. Only if it fails is each trajectory checked separately.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow import wire
from astraflow.errors import ImageError, WireError
from astraflow.models.images import ImageRules, check_media
from astraflow.types import ImageTokens, SampleRules, Stream, StreamRule, Trajectory, VersionSpan
from astraflow.types.token_columns import EXPERTS_STREAM

__all__ = [
    "ANY_TRAINER",
    "MAX_LOGPROB",
    "MIN_LOGPROB",
    "check_shape",
    "check_values",
    "num_sampled_in",
    "values_hold",
]

ANY_TRAINER = SampleRules()
"""The rules of every trainer, for any policy."""
MAX_LOGPROB = 1e-3
"""A logprob is at most 0; float32 sums over a full vocabulary exceed it by a few 1e-6."""
MIN_LOGPROB = -88.0
"""Logprob of the least likely token that can be trained, in nats. Below it, the ratio of two probabilities
overflows float32, and no token that unlikely (1 in 10^38) is ever sampled."""
_NO_VOCAB = 2**31
"""Bound of ids if the vocabulary is unknown."""
_UINT32 = np.dtype("<u4")
_FLOAT32 = np.dtype("<f4")
_HINTS = {
    EXPERTS_STREAM: ": no router of its model is known; does the engine serve another model? If not, set "
    "rollout.engine.record_experts: false"
}
_ENTRY_BYTES: dict[wire.ColumnType, int] = {"int32": 4, "float32": 4, "uint8": 1}


def check_shape(trajectory: Trajectory, rules: SampleRules | None) -> int:
    """Checks everything except the values of ids and logprobs. Returns the number of sampled tokens.

    `rules`: None if the trajectory will not be trained, so that it must only be consistent.
    Raises: WireError.
    """
    num_tokens = _check_lengths(trajectory)
    num_sampled = _num_in_spans(trajectory.versions, trajectory.mask)
    if num_sampled == 0:
        num_sampled = _check_mask(trajectory.mask)
        _check_spans(trajectory.versions, trajectory.mask, num_sampled)
    if rules is not None:
        _check_trainable(trajectory, num_tokens, rules)
    return num_sampled


def check_values(trajectory: Trajectory, rules: SampleRules | None, *, vocab_size: int = 0) -> None:
    """Checks the ids and logprobs of a trajectory that passed `check_shape`. `vocab_size`: used without
    `rules`.

    Raises: WireError.
    """
    known_size = rules.vocab_size if rules is not None else 0
    _check_ids(wire.array(trajectory.token_ids, "int32"), known_size or vocab_size)
    logprobs = wire.array(trajectory.behavior_logprobs, "float32")
    sampled = wire.array(trajectory.mask, "uint8").view(np.bool_)
    _check_logprobs(logprobs, sampled, lowest=-math.inf if rules is None else MIN_LOGPROB)


def values_hold(trajectories: Sequence[Trajectory], vocab_size: int) -> bool:
    """Whether all trajectories pass `check_values`, computed in a few passes over their joined columns.

    False does not mean that one of them is wrong: `check_values` decides.
    """
    if not all(_is_silent_between(item) for item in trajectories):
        return False
    # As unsigned numbers, negative ids are the largest.
    ids = np.frombuffer(b"".join([item.token_ids for item in trajectories]), dtype=_UINT32)
    if np.maximum.reduce(ids) >= (vocab_size or _NO_VOCAB):
        return False
    logprobs = np.frombuffer(b"".join([item.behavior_logprobs for item in trajectories]), dtype=_FLOAT32)
    # The largest is NaN if any is, and comparisons with NaN are false.
    return bool(np.maximum.reduce(logprobs) <= MAX_LOGPROB and np.minimum.reduce(logprobs) >= MIN_LOGPROB)


def num_sampled_in(mask: bytes, start: int, end: int) -> int:
    """Number of sampled tokens in `[start, end)`."""
    # Most turns consist only of sampled tokens, and searching for a byte is much faster than counting it.
    return end - start - (mask.count(0, start, end) if mask.find(0, start, end) >= 0 else 0)


def _check_trainable(trajectory: Trajectory, num_tokens: int, rules: SampleRules) -> None:
    if num_tokens < 2:
        raise WireError(
            "a trajectory of one token cannot be trained, because nothing predicts its first token; include "
            "the context, with mask 0"
        )
    if trajectory.mask.startswith(b"\1"):
        raise WireError(
            "token 0 has mask 1, but nothing predicts the first token; include the context, with mask 0"
        )
    if not 0 < trajectory.temperature < math.inf:
        raise WireError(
            f"sampled at temperature {trajectory.temperature}, which is not above 0; greedy data cannot train"
        )
    if rules.max_tokens and num_tokens > rules.max_tokens:
        raise WireError(f"{num_tokens} tokens; the policy's model has only {rules.max_tokens} positions")
    for rule in rules.streams:
        _check_stream(trajectory, rule)
    for stream in trajectory.streams:
        if stream.name in rules.refused_streams:
            raise WireError(
                f"stream {stream.name!r} cannot be used by the policy's trainer{_HINTS.get(stream.name, '')}"
            )
    if trajectory.media and rules.images is not msgspec.UNSET:
        _check_images(trajectory, rules.images)


def _check_stream(trajectory: Trajectory, rule: StreamRule) -> None:
    """Checks the type of a stream that the trainer reads, and the bounds of its trained entries."""
    what = f"stream {rule.name!r}"
    stream = next((s for s in trajectory.streams if s.name == rule.name), None)
    if stream is None:
        if rule.is_needed:
            raise WireError(
                f"{what} is missing, but train.loss reads it; record it in the workflow (Rewards.add_stream) "
                "or in the engine (Generation.streams)"
            )
        return
    if (stream.dtype, stream.width) != (rule.dtype, rule.width):
        raise WireError(
            f"{what} has {stream.width} {stream.dtype} values per token; the policy's trainer reads "
            f"{rule.width} {rule.dtype} values"
        )
    entries = wire.array(stream.data, stream.dtype)
    if rule.low <= entries.min() and entries.max() <= rule.high:
        return
    sampled = entries.reshape(-1, stream.width)[wire.array(trajectory.mask, "uint8") == 1]
    is_beyond = (sampled < rule.low) | (sampled > rule.high)
    if is_beyond.any():
        raise WireError(
            f"{what} has {sampled[is_beyond][0]:g} at a trained token; expected {rule.low:g} to {rule.high:g}"
        )


def _check_images(trajectory: Trajectory, images: ImageTokens | None) -> None:
    """Decodes every image, which takes milliseconds each."""
    first = trajectory.media[0]
    if images is None:
        raise WireError(
            f"media of kind {first.kind!r} at token {first.start}, but the policy's model reads only text; "
            "leave out the media"
        )
    rules = _image_rules(images)
    tokens = wire.array(trajectory.token_ids, "int32").tolist()
    try:
        check_media(rules, tokens, trajectory.media)
        ends = [media.start + rules.num_tokens(media.uri) for media in trajectory.media]
    except ImageError as err:
        raise WireError(str(err)) from err
    for media, end in zip(trajectory.media, ends, strict=True):
        if 1 in trajectory.mask[media.start : end]:
            raise WireError(f"tokens {media.start} to {end} stand for an image, but some of them have mask 1")


@lru_cache(16)
def _image_rules(images: ImageTokens) -> ImageRules:
    """Rules for counting tokens only; the trainer has the rules for scaling pixels."""
    return ImageRules(
        token_id=images.token_id,
        patch=images.patch,
        merge=images.merge,
        frames=1,
        min_pixels=images.min_pixels,
        max_pixels=images.max_pixels,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )


def _check_lengths(trajectory: Trajectory) -> int:
    """The number of tokens."""
    num_tokens = _length(trajectory.token_ids, "int32", "token_ids")
    if num_tokens == 0:
        raise WireError("no tokens")
    num_entries = len(trajectory.mask)
    if num_entries != num_tokens:
        raise WireError(f"{num_entries} mask entries for {num_tokens} tokens")
    num_entries = _length(trajectory.behavior_logprobs, "float32", "behavior_logprobs")
    if num_entries != num_tokens:
        raise WireError(f"{num_entries} logprobs for {num_tokens} tokens")
    _check_columns(trajectory.streams, num_tokens)
    for media in trajectory.media:
        if not 0 <= media.start < num_tokens:
            raise WireError(f"media at {media.start}, beyond {num_tokens} tokens")
    for before, media in pairwise(trajectory.media):
        if media.start <= before.start:
            raise WireError(
                f"media at {media.start} after media at {before.start}; expected ascending positions"
            )
    return num_tokens


def _check_columns(streams: tuple[Stream, ...], num_tokens: int) -> None:
    names: set[str] = set()
    for stream in streams:
        what = f"stream {stream.name!r}"
        if stream.name in names:
            raise WireError(f"{what} comes twice")
        names.add(stream.name)
        num_entries = _length(stream.data, stream.dtype, what)
        if num_entries != num_tokens * stream.width:
            per_token = f" of {stream.width} values each" if stream.width > 1 else ""
            raise WireError(f"{what} has {num_entries} entries for {num_tokens} tokens{per_token}")
        is_bad = ~np.isfinite(wire.array(stream.data, stream.dtype))
        if is_bad.any():
            token = int(is_bad.argmax()) // stream.width
            raise WireError(f"{what} has an entry that is not finite, at token {token}")


def _length(data: bytes, kind: wire.ColumnType, name: str) -> int:
    """The number of entries of a column."""
    size = _ENTRY_BYTES[kind]
    if len(data) % size:
        raise WireError(f"{name}: {kind} column of {len(data)} bytes; expected a multiple of {size}")
    return len(data) // size


def _num_in_spans(spans: tuple[VersionSpan, ...], mask: bytes) -> int:
    """The number of sampled tokens if these are exactly those of the spans, in order; else 0."""
    num_sampled = end = 0
    for span in spans:
        start = span.start
        length = span.length
        if not (end <= start < start + length <= len(mask)):
            return 0
        if not (mask.startswith(bytes(start - end), end) and mask.startswith(b"\1" * length, start)):
            return 0
        end = start + length
        num_sampled += length
    return num_sampled if mask.startswith(bytes(len(mask) - end), end) else 0


def _check_mask(mask: bytes) -> int:
    """The number of sampled tokens."""
    if others := mask.translate(None, b"\0\1"):
        raise WireError(f"mask has an entry {max(others)}; entries are 0 or 1")
    num_sampled = len(mask) - mask.count(0)
    if num_sampled == 0:
        raise WireError("no token has mask 1; leave the trajectory out")
    return num_sampled


def _check_spans(spans: tuple[VersionSpan, ...], mask: bytes, num_sampled: int) -> None:
    """Raises: WireError, naming the problem that `_num_in_spans` found."""
    covered = end = 0
    for span in spans:
        start = span.start
        length = span.length
        if not (start >= end and length > 0 and start + length <= len(mask)):
            raise WireError(f"version span {start}+{length} is out of order or beyond {len(mask)} tokens")
        end = start + length
        covered += length
        if mask.find(0, start, end) >= 0:
            raise WireError(f"version span {start}+{length} covers tokens with mask 0")
    if covered != num_sampled:
        raise WireError(f"versions for {covered} of {num_sampled} sampled tokens")


def _is_silent_between(trajectory: Trajectory) -> bool:
    """Whether all logprobs outside the version spans, where the mask is 0, are zero bytes."""
    logprobs = trajectory.behavior_logprobs
    end = 0
    for span in trajectory.versions:
        if not logprobs.startswith(bytes(4 * (span.start - end)), 4 * end):
            return False
        end = span.start + span.length
    return logprobs.startswith(bytes(len(logprobs) - 4 * end), 4 * end)


def _check_ids(ids: NDArray[Any], vocab_size: int) -> None:
    lowest = int(ids.min())
    highest = int(ids.max())
    if lowest < 0:
        raise WireError(f"token id {lowest} is negative")
    if vocab_size and highest >= vocab_size:
        raise WireError(
            f"token id {highest} is outside the vocabulary of {vocab_size}; is it the policy's tokenizer?"
        )


def _check_logprobs(logprobs: NDArray[Any], sampled: NDArray[np.bool_], *, lowest: float) -> None:
    is_bad = ~np.isfinite(logprobs)
    if is_bad.any():
        idx = int(is_bad.argmax())
        raise WireError(f"logprob of token {idx} is {float(logprobs[idx])}; it must be finite")
    idx = int(logprobs.argmax())
    if logprobs[idx] > MAX_LOGPROB:
        raise WireError(f"logprob of token {idx} is {float(logprobs[idx])}; it is at most 0")
    idx = int(logprobs.argmin())
    if logprobs[idx] < lowest:
        raise WireError(
            f"logprob of token {idx} is {float(logprobs[idx]):g}; a sampled token has at least {lowest:g}. "
            "Are these the logprobs of the sampled tokens, in nats?"
        )
    is_stray = (logprobs != 0) & ~sampled
    if is_stray.any():
        idx = int(is_stray.argmax())
        raise WireError(f"token {idx} has mask 0 and logprob {float(logprobs[idx])}; it must be 0")
