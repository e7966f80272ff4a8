"""Checks the results of rollout services before anything is stored.

The rules for trainable trajectories are in `trajectory_rules`, which trainers use too. So a trajectory that
is accepted here can be trained. This module adds the rules that only the dataflow can check: policies,
published versions, sampling settings, turns and rewards. A violation raises a `WireError` that names the
trajectory, the value and what was expected. A valid episode becomes the core's `EpisodeFacts`, and its token
columns go to the journal's segments unchanged.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from astraflow import wire
from astraflow.dataflow.core.commands import EpisodeFacts, PayloadRef, TrajectoryMeta
from astraflow.errors import WeightsError, WireError
from astraflow.trajectory_rules import ANY_TRAINER, check_shape, check_values, num_sampled_in, values_hold
from astraflow.types import (
    Episode,
    EpisodeResult,
    LeaseKind,
    Manifest,
    MetricItem,
    PolicyInfo,
    SampleRules,
    Trajectory,
    Turn,
    VersionSpan,
    lease_kind,
)
from astraflow.types.bounds import MAX_METRIC, MAX_REWARD
from astraflow.weights.manifest import check_manifest, check_tensors

__all__ = [
    "PolicyLimits",
    "ResultKind",
    "check_metrics",
    "check_publication",
    "check_results",
    "facts_of",
    "vocab_size",
]

_TEMPERATURE_TOLERANCE = 1e-6
_UNLIMITED = 2**31
"""Token limit of a turn that may have any length."""
_MAX_PARTS = 65_536
"""Most turns, version spans and media of one episode together. Checking each of them takes time."""
_MAX_SHOWN = 80
"""Most characters of a name that a message repeats."""
_NGRAM = 8
"""Length of a token sequence that counts as repeated."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")


ResultKind = LeaseKind | Literal["part"]
"""`part`: completions of an episode that is still running, without their context."""


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """Limits for the trajectories of one policy."""

    info: PolicyInfo
    newest_version: int
    """-1 for a policy without versions (frozen)."""
    vocab_size: int = 0
    """0: unknown, not checked."""
    max_tokens: int = 0
    """Most tokens of a trajectory; 0: unknown, not checked."""
    rules: SampleRules = ANY_TRAINER
    """What the policy's trainer requires of trajectories, as far as it has reported it."""

    def rules_for(self, kind: ResultKind) -> SampleRules | None:
        """The rules for a trajectory that will be trained; None for one that won't, or that is incomplete."""
        return self.rules if self.info.is_trained and kind == "train" else None

    @property
    def num_ids(self) -> int:
        """Size of the vocabulary; 0: unknown."""
        return self.rules.vocab_size or self.vocab_size


def vocab_size(manifest: Manifest) -> int:
    """Rows of a version's embedding table; 0 if it has none with a known name."""
    sizes = [tensor.shape[0] for tensor in manifest.tensors if tensor.name.endswith(_EMBEDDINGS)]
    return sizes[0] if sizes else 0


def check_results(
    results: Sequence[EpisodeResult],
    *,
    policies: Mapping[str, PolicyLimits],
    hosts: Collection[str],
    are_parts: bool = False,
) -> dict[int, WireError]:
    """Maps the position of each invalid result to the first rule that it violates.

    `hosts`: the sender's policies; empty if the sender is unknown. `are_parts`: the episodes are still
    running, and their trajectories are completions without their context.
    """
    problems: dict[int, WireError] = {}
    whole: list[tuple[int, ResultKind, Episode]] = []
    for idx, result in enumerate(results):
        if not isinstance(result.outcome, Episode):
            continue
        kind: ResultKind = "part" if are_parts else lease_kind(result.lease_id)
        try:
            _check_structure(result.outcome, kind, policies, hosts)
        except WireError as err:
            problems[idx] = err
        else:
            whole.append((idx, kind, result.outcome))
    by_policy: dict[str, list[Trajectory]] = {}
    for item in [item for _, _, episode in whole for item in episode.trajectories]:
        by_policy.setdefault(item.policy, []).append(item)
    # If some values are invalid, `_check_values` must find them one by one.
    if not all(values_hold(items, policies[policy].num_ids) for policy, items in by_policy.items()):
        for idx, kind, episode in whole:
            try:
                _check_values(episode, kind, policies)
            except WireError as err:
                problems[idx] = err
    return {i: WireError(f"{_format_place(results[i].lease_id)}{err}") for i, err in problems.items()}


def check_metrics(metrics: Sequence[MetricItem]) -> None:
    """Raises: WireError that names the metric that cannot be stored or shown."""
    for metric in metrics:
        if not -MAX_METRIC <= metric.value <= MAX_METRIC:
            raise WireError(
                f"metric {metric.name[:_MAX_SHOWN]!r} is {metric.value}; it must be within +-{MAX_METRIC:g}"
            )
        if not metric.name.isprintable():
            raise WireError(f"metric {metric.name[:_MAX_SHOWN]!r} has unprintable characters")


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
    """What the core stores of a valid episode; payloads of trained policies go through `store`.

    `repetition_of`: policies for whose trajectories repetition is measured.
    """
    metas: list[TrajectoryMeta] = []
    for item in episode.trajectories:
        if item.policy in trained:
            repeated = _repeated_frac(item) if item.policy in repetition_of else 0.0
            metas.append(_make_meta(item, store(wire.encode(item)), repeated))
    return EpisodeFacts(
        trajectories=tuple(metas),
        score=episode.score,
        metrics=episode.metrics,
        duration_s=episode.duration_s,
    )


def _format_place(lease_id: str) -> str:
    group = lease_id.partition(".")[0]
    return f"evaluation round {group[1:]}" if lease_kind(lease_id) == "eval" else f"group {group}"


def _check_structure(
    episode: Episode, kind: ResultKind, policies: Mapping[str, PolicyLimits], hosts: Collection[str]
) -> None:
    """Checks everything except the values of ids and logprobs. Raises: WireError."""
    _check_reward(episode.score, f": score {episode.score}")
    if not (math.isfinite(episode.duration_s) and episode.duration_s >= 0):
        raise WireError(f": duration_s {episode.duration_s} must be finite and at least 0")
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


def _check_values(episode: Episode, kind: ResultKind, policies: Mapping[str, PolicyLimits]) -> None:
    """Checks ids and logprobs of an episode whose structure is valid. Raises: WireError."""
    for idx, trajectory in enumerate(episode.trajectories):
        limits = policies[trajectory.policy]
        try:
            check_values(trajectory, limits.rules_for(kind), vocab_size=limits.num_ids)
        except WireError as err:
            raise WireError(f"/trajectory {idx}: {err}") from err


def _check_trajectory(
    trajectory: Trajectory, kind: ResultKind, policies: Mapping[str, PolicyLimits], hosts: Collection[str]
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
    if kind != "eval":
        _check_temperature(trajectory, limits)
    num_tokens = len(trajectory.mask)
    if limits.max_tokens and num_tokens > limits.max_tokens:
        raise WireError(
            f"{num_tokens} tokens, but the context of policy {limits.info.name!r} holds {limits.max_tokens}"
        )
    num_sampled = check_shape(trajectory, limits.rules_for(kind))
    _check_versions(trajectory.versions, limits)
    max_sampled = limits.info.sampling.max_tokens if kind != "eval" else _UNLIMITED
    _check_turns(trajectory.turns, trajectory.mask, num_sampled, max_sampled)
    _check_reward(trajectory.reward, f"reward {trajectory.reward}")
    if not trajectory.role.isprintable():
        raise WireError(f"role {trajectory.role!r} has unprintable characters")


def _check_reward(value: float, what: str) -> None:
    if not math.isfinite(value):
        raise WireError(f"{what} is not finite")
    if not -MAX_REWARD <= value <= MAX_REWARD:
        raise WireError(f"{what} is not within +-{MAX_REWARD:g}; divide it by a constant")


def _check_temperature(trajectory: Trajectory, limits: PolicyLimits) -> None:
    wanted = limits.info.sampling.temperature
    if limits.info.is_trained and not abs(trajectory.temperature - wanted) <= _TEMPERATURE_TOLERANCE:
        raise WireError(
            f"sampled at temperature {trajectory.temperature}, but the recipe sets {wanted} for policy "
            f"{trajectory.policy!r}; the logprobs would not match the trainer's"
        )


def _check_versions(spans: tuple[VersionSpan, ...], limits: PolicyLimits) -> None:
    newest = max(limits.newest_version, 0)
    for span in spans:
        if not 0 <= span.version <= newest:
            raise WireError(
                f"version {span.version} of policy {limits.info.name!r} does not exist; the newest is "
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
        num_in_turn = num_sampled_in(mask, turn.start, turn.end)
        if num_in_turn > max_sampled:
            raise WireError(
                f"turn {idx} has {num_in_turn} sampled tokens; the policy's sampling.max_tokens is "
                f"{max_sampled}"
            )
        covered += num_in_turn
        end = turn.end
    if covered != num_sampled:
        raise WireError(f"the turns cover {covered} of {num_sampled} sampled tokens; they must cover all")


def _make_meta(trajectory: Trajectory, payload: PayloadRef, repeated_frac: float) -> TrajectoryMeta:
    mask = trajectory.mask
    versions = [span.version for span in trajectory.versions]
    spans: list[tuple[int, int]] = []
    rewards: list[float] = []
    num_by_turn: list[int] = []
    for turn in trajectory.turns:
        spans.append((turn.start, turn.end))
        rewards.append(turn.reward)
        num_by_turn.append(num_sampled_in(mask, turn.start, turn.end))
    return TrajectoryMeta(
        policy=trajectory.policy,
        role=trajectory.role,
        reward=trajectory.reward,
        num_tokens=len(mask),
        num_trained_tokens=sum(num_by_turn),
        oldest_version=min(versions),
        newest_version=max(versions),
        finish_reason=trajectory.finish_reason,
        turn_spans=tuple(spans),
        turn_rewards=tuple(rewards),
        num_trained_by_turn=tuple(num_by_turn),
        payload=payload,
        state_keys=_state_keys(trajectory),
        repeated_frac=repeated_frac,
    )


def _state_keys(trajectory: Trajectory) -> tuple[int, ...]:
    """One key per turn: a hash of the workflow's own key, or of the prompt tokens since the previous turn."""
    keys: list[int] = []
    end = 0
    for turn in trajectory.turns:
        context = turn.state_key.encode() or trajectory.token_ids[4 * end : 4 * turn.start]
        keys.append(xxhash.xxh3_64_intdigest(context))
        end = turn.end
    return tuple(keys)


def _repeated_frac(trajectory: Trajectory) -> float:
    """Share of the sampled tokens' 8-grams that occurred earlier in the trajectory; 0 without 8-grams."""
    ids = wire.array(trajectory.token_ids, "int32")[wire.array(trajectory.mask, "uint8") == 1]
    num = len(ids) - _NGRAM + 1
    if num < 1:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(ids, _NGRAM)
    return 1.0 - len(np.unique(grams, axis=0)) / num
