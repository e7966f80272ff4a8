"""Checks what a rollout service sends before anything of it is kept.

Every rule that a trajectory must keep is here; a broken one is a `WireError` that names the trajectory, the
value and what was expected. What passes becomes the core's `EpisodeFacts`, and its token columns go to the
journal's segments unchanged.

Short trajectories come many in one request, and numpy costs microseconds a call whatever the length: so masks
are compared as bytes with what the version spans say, and ids and logprobs of a whole request are checked at
once. Only where these are found wrong are they looked at one by one, to name what is.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from astraflow import wire
from astraflow.bounds import MAX_METRIC, MAX_REWARD
from astraflow.dataflow.core.commands import EpisodeFacts, PayloadRef, TrajectoryMeta
from astraflow.errors import WeightsError, WireError
from astraflow.types import (
    Episode,
    EpisodeResult,
    LeaseKind,
    Manifest,
    MetricItem,
    PolicyInfo,
    Stream,
    Trajectory,
    Turn,
    VersionSpan,
)
from astraflow.weights.manifest import check_manifest, check_tensors

__all__ = [
    "PolicyLimits",
    "check_metrics",
    "check_publication",
    "check_results",
    "facts_of",
    "lease_kind",
    "vocab_size",
]

_MAX_LOGPROB = 1e-3
"""A logprob is at most 0; float32 sums of a full vocabulary exceed it by a few 1e-6."""
_TEMPERATURE_TOLERANCE = 1e-6
_UNLIMITED = 2**31
"""Tokens of a turn, where it may have any number."""
_NO_VOCAB = 2**31
"""Bound of ids where the vocabulary is unknown."""
_MAX_PARTS = 65_536
"""Largest number of turns, version spans and media of one episode together; each is checked by itself."""
_MAX_SHOWN = 80
"""Characters of a name that a message repeats."""
_NGRAM = 8
"""Tokens of a run that counts as repeated."""
_UINT32 = np.dtype("<u4")
_FLOAT32 = np.dtype("<f4")
_ENTRY_BYTES: dict[wire.ColumnType, int] = {"int32": 4, "float32": 4, "uint8": 1}
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """What the trajectories of one policy must keep to."""

    info: PolicyInfo
    newest_version: int
    """-1 for a policy without versions (frozen)."""
    vocab_size: int = 0
    """0: unknown, not checked."""
    max_tokens: int = 0
    """Largest number of tokens of a trajectory; 0: unknown, not checked."""


def lease_kind(lease_id: str) -> LeaseKind:
    """`GROUP.EPISODE.ATTEMPT` is a training lease, `eROUND.EPISODE.ATTEMPT` one of evaluation."""
    return "eval" if lease_id.startswith("e") else "train"


def vocab_size(manifest: Manifest) -> int:
    """Rows of the embedding table of a version, or 0 if it has none by a known name."""
    sizes = [tensor.shape[0] for tensor in manifest.tensors if tensor.name.endswith(_EMBEDDINGS)]
    return sizes[0] if sizes else 0


def check_results(
    results: Sequence[EpisodeResult], *, policies: Mapping[str, PolicyLimits], hosts: Collection[str]
) -> dict[int, WireError]:
    """Position -> the first rule that the result breaks, of those that break one.

    `hosts` are the sender's policies, empty if the sender is not known.
    """
    broken: dict[int, WireError] = {}
    whole: list[tuple[int, Episode]] = []
    for idx, result in enumerate(results):
        if not isinstance(result.outcome, Episode):
            continue
        try:
            _check_structure(result.outcome, lease_kind(result.lease_id), policies, hosts)
        except WireError as err:
            broken[idx] = err
        else:
            whole.append((idx, result.outcome))
    trajectories = [item for _, episode in whole for item in episode.trajectories]
    if not _all_values_hold(trajectories, policies):
        for idx, episode in whole:
            try:
                _check_values(episode, policies)
            except WireError as err:
                broken[idx] = err
    return {idx: WireError(f"{_where(results[idx].lease_id)}{err}") for idx, err in broken.items()}


def check_metrics(metrics: Sequence[MetricItem]) -> None:
    """Raises: WireError naming the metric that cannot be kept or shown."""
    for metric in metrics:
        if not -MAX_METRIC <= metric.value <= MAX_METRIC:
            raise WireError(
                f"metric {metric.name[:_MAX_SHOWN]!r} is {metric.value}, not within +-{MAX_METRIC:g}"
            )
        if not metric.name.isprintable():
            raise WireError(f"metric {metric.name[:_MAX_SHOWN]!r} has characters that cannot be shown")


def check_publication(manifest: Manifest, newest: Manifest | None) -> None:
    """A manifest agrees with itself, and its tensors are those of the policy's `newest` version.

    One that lists no chunks offers nothing that could be fetched: receivers refuse it by themselves.
    Raises: WeightsError.
    """
    where = f"manifest of {manifest.policy!r} version {manifest.version}"
    if manifest.chunks:
        check_manifest(manifest)
    else:
        check_tensors(manifest.tensors)
    if newest is not None and manifest.tensors != newest.tensors:
        raise WeightsError(
            f"{where}: its tensors are not those of version {newest.version}: all versions of a policy have "
            "the same names, shapes and dtypes"
        )


def facts_of(
    episode: Episode,
    trained: Collection[str],
    store: Callable[[bytes], PayloadRef],
    *,
    repetition_of: Collection[str] = (),
) -> EpisodeFacts:
    """What the core keeps of a checked episode; payloads of trained policies go through `store`.

    `repetition_of`: policies whose trajectories' repetition is measured.
    """
    metas: list[TrajectoryMeta] = []
    for item in episode.trajectories:
        if item.policy in trained:
            repeated = _repeated_frac(item) if item.policy in repetition_of else 0.0
            metas.append(_meta(item, store(wire.encode(item)), repeated))
    return EpisodeFacts(
        trajectories=tuple(metas),
        score=episode.score,
        metrics=episode.metrics,
        duration_s=episode.duration_s,
    )


# --- one episode ----------------------------------------------------------------------------------


def _where(lease_id: str) -> str:
    group = lease_id.partition(".")[0]
    return f"evaluation round {group[1:]}" if lease_kind(lease_id) == "eval" else f"group {group}"


def _check_structure(
    episode: Episode, kind: LeaseKind, policies: Mapping[str, PolicyLimits], hosts: Collection[str]
) -> None:
    """Everything but the values of ids and logprobs. Raises: WireError."""
    _check_reward(episode.score, f": score {episode.score}")
    if not (math.isfinite(episode.duration_s) and episode.duration_s >= 0):
        raise WireError(f": duration_s {episode.duration_s} is no length of time")
    try:
        check_metrics(episode.metrics)
    except WireError as err:
        raise WireError(f": {err}") from err
    num_parts = sum(len(t.turns) + len(t.versions) + len(t.media) for t in episode.trajectories)
    if num_parts > _MAX_PARTS:
        raise WireError(f": {num_parts} turns, version spans and media; an episode has at most {_MAX_PARTS}")
    for idx, trajectory in enumerate(episode.trajectories):
        try:
            _check_trajectory(trajectory, kind, policies, hosts)
        except WireError as err:
            raise WireError(f"/trajectory {idx}: {err}") from err


def _check_values(episode: Episode, policies: Mapping[str, PolicyLimits]) -> None:
    """Ids and logprobs of an episode of sound structure. Raises: WireError."""
    for idx, trajectory in enumerate(episode.trajectories):
        try:
            _check_ids(wire.array(trajectory.token_ids, "int32"), policies[trajectory.policy])
            logprobs = wire.array(trajectory.behavior_logprobs, "float32")
            _check_logprobs(logprobs, wire.array(trajectory.mask, "uint8").view(np.bool_))
        except WireError as err:
            raise WireError(f"/trajectory {idx}: {err}") from err


def _all_values_hold(trajectories: Sequence[Trajectory], policies: Mapping[str, PolicyLimits]) -> bool:
    """Whether `_check_values` passes all of these, found with a few passes over all their columns."""
    by_policy: dict[str, list[Trajectory]] = {}
    for item in trajectories:
        if not _is_silent_between(item):
            return False
        by_policy.setdefault(item.policy, []).append(item)
    for policy, items in by_policy.items():
        # As unsigned numbers, negative ids are the largest.
        ids = np.frombuffer(b"".join([item.token_ids for item in items]), dtype=_UINT32)
        if np.maximum.reduce(ids) >= (policies[policy].vocab_size or _NO_VOCAB):
            return False
        logprobs = np.frombuffer(b"".join([item.behavior_logprobs for item in items]), dtype=_FLOAT32)
        # The largest is nan if any is; comparisons with nan are false.
        if not (np.maximum.reduce(logprobs) <= _MAX_LOGPROB and np.minimum.reduce(logprobs) > -math.inf):
            return False
    return True


def _is_silent_between(trajectory: Trajectory) -> bool:
    """Whether all logprobs outside of the version spans, where the mask is 0, are zero bytes."""
    logprobs = trajectory.behavior_logprobs
    end = 0
    for span in trajectory.versions:
        if not logprobs.startswith(bytes(4 * (span.start - end)), 4 * end):
            return False
        end = span.start + span.length
    return logprobs.startswith(bytes(len(logprobs) - 4 * end), 4 * end)


# --- one trajectory -------------------------------------------------------------------------------


def _check_trajectory(
    trajectory: Trajectory, kind: LeaseKind, policies: Mapping[str, PolicyLimits], hosts: Collection[str]
) -> None:
    limits = policies.get(trajectory.policy)
    if limits is None:
        known = ", ".join(policies)
        raise WireError(f"policy {trajectory.policy!r} is not in this run (policies: {known})")
    if hosts and trajectory.policy not in hosts:
        raise WireError(
            f"the service did not register as hosting policy {trajectory.policy!r} (hosts: "
            f"{', '.join(sorted(hosts))})"
        )
    if kind == "train":
        _check_temperature(trajectory, limits)
    _check_lengths(trajectory, limits)
    num_sampled = _num_in_spans(trajectory.versions, trajectory.mask)
    if num_sampled == 0:
        num_sampled = _check_mask(trajectory.mask)
        _check_spans(trajectory.versions, trajectory.mask, num_sampled)
    _check_versions(trajectory.versions, limits)
    max_sampled = limits.info.sampling.max_tokens if kind == "train" else _UNLIMITED
    _check_turns(trajectory.turns, trajectory.mask, num_sampled, max_sampled)
    _check_reward(trajectory.reward, f"reward {trajectory.reward}")
    if not trajectory.role.isprintable():
        raise WireError(f"role {trajectory.role!r} has characters that cannot be shown")


def _check_reward(value: float, what: str) -> None:
    if not math.isfinite(value):
        raise WireError(f"{what} is not finite")
    if not -MAX_REWARD <= value <= MAX_REWARD:
        raise WireError(f"{what} is not within +-{MAX_REWARD:g}; divide it by a constant")


def _check_temperature(trajectory: Trajectory, limits: PolicyLimits) -> None:
    wanted = limits.info.sampling.temperature
    if limits.info.is_trained and not abs(trajectory.temperature - wanted) <= _TEMPERATURE_TOLERANCE:
        raise WireError(
            f"sampled at temperature {trajectory.temperature}, the recipe says {wanted} for policy "
            f"{trajectory.policy!r}; logprobs would not match the trainer's"
        )


def _check_lengths(trajectory: Trajectory, limits: PolicyLimits) -> None:
    num_tokens = _length(trajectory.token_ids, "int32", "token_ids")
    if num_tokens == 0:
        raise WireError("no tokens")
    if limits.max_tokens and num_tokens > limits.max_tokens:
        raise WireError(
            f"{num_tokens} tokens; the context of policy {limits.info.name!r} holds {limits.max_tokens}"
        )
    num_entries = len(trajectory.mask)
    if num_entries != num_tokens:
        raise WireError(f"{num_entries} mask entries for {num_tokens} tokens")
    num_entries = _length(trajectory.behavior_logprobs, "float32", "behavior_logprobs")
    if num_entries != num_tokens:
        raise WireError(f"{num_entries} logprobs for {num_tokens} tokens")
    _check_streams(trajectory.streams, num_tokens)
    for media in trajectory.media:
        if not 0 <= media.start < num_tokens:
            raise WireError(f"media at {media.start}, beyond {num_tokens} tokens")
    for before, media in pairwise(trajectory.media):
        if media.start <= before.start:
            raise WireError(f"media at {media.start} behind media at {before.start}; expected them in order")


def _check_streams(streams: tuple[Stream, ...], num_tokens: int) -> None:
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
            raise WireError(f"{what} holds an entry that is not finite, at token {token}")


def _num_in_spans(spans: tuple[VersionSpan, ...], mask: bytes) -> int:
    """The number of sampled tokens if they are those of the spans, which are in order; 0 if not."""
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
        raise WireError(f"mask holds {max(others)}; entries are 0 or 1")
    num_sampled = len(mask) - mask.count(0)
    if num_sampled == 0:
        raise WireError("no token has mask 1; leave the trajectory out")
    return num_sampled


def _length(data: bytes, kind: wire.ColumnType, name: str) -> int:
    """Entries of a column."""
    size = _ENTRY_BYTES[kind]
    if len(data) % size:
        raise WireError(f"{name}: {kind} column of {len(data)} bytes is no multiple of {size}")
    return len(data) // size


def _check_ids(ids: NDArray[Any], limits: PolicyLimits) -> None:
    lowest = int(ids.min())
    highest = int(ids.max())
    if lowest < 0:
        raise WireError(f"token id {lowest} is negative")
    if limits.vocab_size and highest >= limits.vocab_size:
        raise WireError(
            f"token id {highest} is outside the vocabulary of {limits.vocab_size}; is it the policy's "
            "tokenizer?"
        )


def _check_logprobs(logprobs: NDArray[Any], sampled: NDArray[np.bool_]) -> None:
    is_bad = ~np.isfinite(logprobs)
    if is_bad.any():
        idx = int(is_bad.argmax())
        raise WireError(f"logprob of token {idx} is {float(logprobs[idx])}; it must be finite")
    highest = int(logprobs.argmax())
    if logprobs[highest] > _MAX_LOGPROB:
        raise WireError(f"logprob of token {highest} is {float(logprobs[highest])}; it is at most 0")
    is_stray = (logprobs != 0) & ~sampled
    if is_stray.any():
        idx = int(is_stray.argmax())
        raise WireError(f"token {idx} has mask 0 and logprob {float(logprobs[idx])}; it must be 0")


def _check_spans(spans: tuple[VersionSpan, ...], mask: bytes, num_sampled: int) -> None:
    """Names what `_num_in_spans` found wrong with the spans."""
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


def _check_versions(spans: tuple[VersionSpan, ...], limits: PolicyLimits) -> None:
    newest = max(limits.newest_version, 0)
    for span in spans:
        if not 0 <= span.version <= newest:
            raise WireError(
                f"version {span.version} of policy {limits.info.name!r}; the newest is "
                f"{limits.newest_version}"
            )


def _check_turns(turns: tuple[Turn, ...], mask: bytes, num_sampled: int, max_sampled: int) -> None:
    end = covered = 0
    for idx, turn in enumerate(turns):
        if not end <= turn.start <= turn.end <= len(mask):
            raise WireError(
                f"turn {idx} [{turn.start}, {turn.end}) is out of order or beyond {len(mask)} tokens"
            )
        if not -MAX_REWARD <= turn.reward <= MAX_REWARD:
            _check_reward(turn.reward, f"reward {turn.reward} of turn {idx}")
        num_in_turn = _num_sampled(mask, turn)
        if num_in_turn > max_sampled:
            raise WireError(
                f"turn {idx} holds {num_in_turn} sampled tokens; the policy's sampling.max_tokens is "
                f"{max_sampled}"
            )
        covered += num_in_turn
        end = turn.end
    if covered != num_sampled:
        raise WireError(f"turns hold {covered} of {num_sampled} sampled tokens")


def _num_sampled(mask: bytes, turn: Turn) -> int:
    start = turn.start
    end = turn.end
    # Most turns are sampled tokens alone, and to find none of a byte is much faster than to count it.
    return end - start - (mask.count(0, start, end) if mask.find(0, start, end) >= 0 else 0)


def _meta(trajectory: Trajectory, payload: PayloadRef, repeated_frac: float) -> TrajectoryMeta:
    mask = trajectory.mask
    turns = trajectory.turns
    versions = [span.version for span in trajectory.versions]
    num_by_turn = tuple([_num_sampled(mask, turn) for turn in turns])
    return TrajectoryMeta(
        policy=trajectory.policy,
        role=trajectory.role,
        reward=trajectory.reward,
        num_tokens=len(mask),
        num_trained_tokens=sum(num_by_turn),
        oldest_version=min(versions),
        newest_version=max(versions),
        finish_reason=trajectory.finish_reason,
        turn_spans=tuple([(turn.start, turn.end) for turn in turns]),
        turn_rewards=tuple([turn.reward for turn in turns]),
        num_trained_by_turn=num_by_turn,
        payload=payload,
        state_keys=_state_keys(trajectory),
        repeated_frac=repeated_frac,
    )


def _state_keys(trajectory: Trajectory) -> tuple[int, ...]:
    """One key per turn: a hash of the workflow's own key, or else of the tokens shown since the previous
    turn."""
    keys: list[int] = []
    end = 0
    for turn in trajectory.turns:
        shown = turn.state_key.encode() or trajectory.token_ids[4 * end : 4 * turn.start]
        keys.append(xxhash.xxh3_64_intdigest(shown))
        end = turn.end
    return tuple(keys)


def _repeated_frac(trajectory: Trajectory) -> float:
    """Share of the 8-grams of its sampled tokens that came before in it; 0 if it has none."""
    ids = wire.array(trajectory.token_ids, "int32")[wire.array(trajectory.mask, "uint8") == 1]
    num = len(ids) - _NGRAM + 1
    if num < 1:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(ids, _NGRAM)
    return 1.0 - len(np.unique(grams, axis=0)) / num
