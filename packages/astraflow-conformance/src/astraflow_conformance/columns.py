"""Checks trajectories against the rules C1 to C10 of the token columns.

The dataflow has its own checks of these rules. The checks here share no code with the dataflow, so they don't
repeat its mistakes.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from astraflow import wire
from astraflow.errors import WireError
from astraflow.types import Episode, PolicyInfo, Trajectory
from astraflow.types.bounds import MAX_METRIC, MAX_REWARD

__all__ = ["COLUMN_RULES", "Limits", "flaws_of"]

COLUMN_RULES = ("C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10")
_MAX_LOGPROB = 1e-3
"""Tolerance of rule C3: rounding may raise the logarithm of a probability of 1 slightly above 0."""

_MIN_LOGPROB = -88.0
"""Lowest logprob of rule C3. Below it, the ratio of two probabilities overflows float32."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the kit knows about a policy when one of its trajectories arrives."""

    info: PolicyInfo
    newest: int
    vocab_size: int


def flaws_of(
    episode: Episode, limits: dict[str, Limits], hosts: Collection[str], *, is_training: bool
) -> Iterator[tuple[str, str]]:
    """Yields each broken rule with what was seen.

    If the columns of a trajectory differ in length, nothing else about it can be checked.
    """
    if not math.isfinite(episode.score):
        yield "C5", f"score {episode.score}"
    elif abs(episode.score) > MAX_REWARD:
        yield "C9", f"score {episode.score}"
    for metric in episode.metrics:
        if not abs(metric.value) <= MAX_METRIC:
            yield "C9", f"metric {metric.name!r} {metric.value}"
    for idx, item in enumerate(episode.trajectories):
        for rule, detail in _flaws(item, limits, hosts, is_training):
            yield rule, f"trajectory {idx}: {detail}"


def _flaws(
    item: Trajectory, limits: dict[str, Limits], hosts: Collection[str], is_training: bool
) -> Iterator[tuple[str, str]]:
    known = limits.get(item.policy)
    if known is None or item.policy not in hosts:
        yield "C8", f"policy {item.policy!r}; registered as hosting {sorted(hosts)}"
        return
    try:
        ids = wire.array(item.token_ids, "int32")
        mask = wire.array(item.mask, "uint8")
        logprobs = wire.array(item.behavior_logprobs, "float32")
        lengths = {len(ids), len(mask), len(logprobs)}
        lengths |= {len(wire.array(stream.data, stream.dtype)) / stream.width for stream in item.streams}
    except WireError as err:
        yield "C1", str(err)
        return
    if len(lengths) != 1 or 0 in lengths:
        yield "C1", f"columns of {sorted(lengths)} entries"
        return
    if mask.max() != 1:
        yield "C2", f"mask of {sorted(set(mask.tolist()))}"
        return
    is_trained = is_training and known.info.is_trained
    if is_trained and mask[0]:
        yield "C2", "the first token has mask 1"
    lowest = _MIN_LOGPROB if is_trained else -math.inf
    is_good = np.isfinite(logprobs) & (lowest <= logprobs) & (logprobs <= _MAX_LOGPROB)
    is_good &= (mask == 1) | (logprobs == 0)
    if not is_good.all():
        idx = int((~is_good).argmax())
        yield "C3", f"logprob {logprobs[idx]} of token {idx}, whose mask is {mask[idx]}"
    yield from _span_flaws(item, mask.view(bool), known)
    yield from _reward_flaws(item)
    longest = max((int(mask[turn.start : turn.end].sum()) for turn in item.turns), default=0)
    if is_training and longest > known.info.sampling.max_tokens:
        yield "C10", f"a turn of {longest} sampled tokens, max_tokens is {known.info.sampling.max_tokens}"
    if not 0 <= ids.min() <= ids.max() < known.vocab_size:
        yield "C6", f"ids from {ids.min()} to {ids.max()}; the vocabulary has {known.vocab_size}"
    wanted = known.info.sampling.temperature
    if is_trained and abs(item.temperature - wanted) > 1e-6:
        yield "C7", f"temperature {item.temperature}, the policy's is {wanted}"


def _span_flaws(
    item: Trajectory, mask: "np.ndarray[tuple[int], np.dtype[np.bool]]", limits: Limits
) -> Iterator[tuple[str, str]]:
    covered = np.zeros(len(mask), bool)
    end = 0
    for span in item.versions:
        in_order = end <= span.start < span.start + span.length <= len(mask)
        if not (in_order and 0 <= span.version <= max(0, limits.newest)):
            yield "C4", f"run {tuple(item.versions)}, newest version {limits.newest}"
            break
        end = span.start + span.length
        covered[span.start : end] = True
    else:
        if (covered != mask).any():
            yield "C4", f"runs cover {int(covered.sum())} tokens, {int(mask.sum())} have mask 1"
    end = 0
    num_held = 0
    for turn in item.turns:
        if not end <= turn.start <= turn.end <= len(mask):
            yield "C5", f"turn [{turn.start}, {turn.end}) after {end}, of {len(mask)} tokens"
            return
        end = turn.end
        num_held += int(mask[turn.start : turn.end].sum())
    if num_held != int(mask.sum()):
        yield "C5", f"turns hold {num_held} of {int(mask.sum())} tokens with mask 1"


def _reward_flaws(item: Trajectory) -> Iterator[tuple[str, str]]:
    rewards = (item.reward, *(turn.reward for turn in item.turns))
    if not all(math.isfinite(value) for value in rewards):
        yield "C5", "a reward is not finite"
    elif max(rewards) > MAX_REWARD or min(rewards) < -MAX_REWARD:
        yield "C9", f"rewards from {min(rewards)} to {max(rewards)}"
