"""Rules about what is learned: rewards, gradients, entropy, logprobs. They look at the newest steps."""

import statistics
from collections.abc import Iterable, Sequence

from astraflow.report.watch.rule import Finding, Rule
from astraflow.report.watch.sight import Sight, newest_values
from astraflow.types import StepRecord

__all__ = ["LEARNING_RULES"]

_STEPS = 5
"""Steps after which a number that does not move is worth a word."""
_UNTOLD_STEPS = 20
"""The same, where the trainer does not tell how many tokens have a gradient."""
_NO_GRADIENT_FRAC = 0.05
_GRADIENT_STEPS = 8
"""More than `_STEPS`: a reward that no longer moves is named first."""
_TRUNCATED_FRAC = 0.5
_COLLAPSED = 0.1
_MISMATCH = 0.05
"""Nats. Rounding in bfloat16 on both sides stays below 0.02 in the mean."""
_GAP = 0.5
"""Nats, in the mean over all tokens, however stale: a ratio is then off by a factor of 1.6."""
_GAP_STEPS = 3


def _reward_constant(sight: Sight) -> Iterable[Finding]:
    for policy, records in sight.steps.items():
        same = _with_the_newest_reward(records)
        if not _teach_nothing(same):
            continue
        steps = f"all {len(same)} steps" if same[0].step == 0 else f"the last {len(same)} steps"
        yield Finding(
            f"policy {policy}",
            f"{policy}: the mean reward was always {same[0].reward_mean:g}, in {steps}, so there is nothing "
            "to learn",
            same[0].at_s,
        )


def _teach_nothing(same: Sequence[StepRecord]) -> bool:
    """Whether steps with the same mean reward had nothing to learn from.

    Small batches of few different rewards have the same mean by chance; tokens with a gradient tell that.
    """
    told = [record.num_gradient_tokens for record in same]
    if None in told:
        return len(same) >= _UNTOLD_STEPS
    return len(same) >= _STEPS and not any(told)


def _with_the_newest_reward(records: Sequence[StepRecord]) -> list[StepRecord]:
    """The newest steps in a row whose mean reward is the same, oldest first."""
    same: list[StepRecord] = []
    for record in reversed(records):
        follows = not same or (record.reward_mean, record.step) == (same[-1].reward_mean, same[-1].step - 1)
        if not follows:
            break
        same.append(record)
    return same[::-1]


def _no_gradient(sight: Sight) -> Iterable[Finding]:
    for policy, records in sight.steps.items():
        newest = [r for r in records[-_GRADIENT_STEPS:] if r.num_gradient_tokens is not None]
        shares = [(r.num_gradient_tokens or 0) / max(1, r.num_trained_tokens) for r in newest]
        if len(shares) < _GRADIENT_STEPS or max(shares) >= _NO_GRADIENT_FRAC:
            continue
        if _teach_nothing(_with_the_newest_reward(records)):
            continue  # which is said already
        reward = statistics.fmean(record.reward_mean for record in newest)
        yield Finding(
            f"policy {policy}",
            f"{policy}: {statistics.fmean(shares):.1%} of the committed tokens had a gradient in the last "
            f"{_GRADIENT_STEPS} steps, for the rewards within a group are equal; the mean reward is "
            f"{reward:.3g}",
            newest[0].at_s,
        )


def _truncated(sight: Sight) -> Iterable[Finding]:
    for policy, records in sight.steps.items():
        shares = newest_values(records, "episode/truncated_frac", _GAP_STEPS)
        if len(shares) == _GAP_STEPS and min(shares) >= _TRUNCATED_FRAC:
            yield Finding(
                f"policy {policy}",
                f"{policy}: {statistics.fmean(shares):.0%} of the trajectories met max_tokens in the last "
                f"{_GAP_STEPS} steps",
                records[-_GAP_STEPS].at_s,
            )


def _entropy(sight: Sight) -> Iterable[Finding]:
    for policy, records in sight.steps.items():
        if len(records) < 2 * _STEPS or records[0].step != 0:
            continue  # what it was in the first steps is not known
        first = records[:_STEPS]
        newest = records[-_STEPS:]
        before = newest_values(first, "entropy", _STEPS)
        now = newest_values(newest, "entropy", _STEPS)
        if len(before) < _STEPS or len(now) < _STEPS or statistics.fmean(now) >= _COLLAPSED * _mean(before):
            continue
        reward_before = _reward(first)
        reward = _reward(newest)
        if reward > reward_before:
            continue
        yield Finding(
            f"policy {policy}",
            f"{policy}: the entropy fell from {_mean(before):.3g} to {_mean(now):.3g} nats per token, and "
            f"the mean reward is {reward:.3g} (it was {reward_before:.3g} at first)",
            newest[0].at_s,
        )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _reward(records: Sequence[StepRecord]) -> float:
    return statistics.fmean(record.reward_mean for record in records)


def _logprob_gap(sight: Sight) -> Iterable[Finding]:
    for policy, records in sight.steps.items():
        fresh = newest_values(records, "logprob_mismatch", _STEPS)
        gaps = newest_values(records, "behavior_gap", _GAP_STEPS)
        if fresh and max(fresh) >= _MISMATCH:
            told = f"{max(fresh):.2g} nats apart for tokens of the newest version, in the mean"
        elif len(gaps) == _GAP_STEPS and min(gaps) >= _GAP:
            told = f"{min(gaps):.2g} nats apart or more in each of the last {_GAP_STEPS} steps, in the mean"
        else:
            continue
        yield Finding(
            f"policy {policy}",
            f"{policy}: the logprobs of engine and trainer are {told}; rounding explains 0.02",
            records[-1].at_s,
        )


LEARNING_RULES = (
    Rule(
        "reward_constant",
        "The mean reward was the same in the last 5 steps or more, and no token had a gradient; if the "
        "trainer does not tell, in 20 steps.",
        "look at an episode and its reward with `astraflow try` or `astraflow episodes RUN`",
        _reward_constant,
        is_cause=False,
    ),
    Rule(
        "no_gradient",
        "Fewer than 5 % of the committed tokens had a gradient, in each of the last 8 steps.",
        "choose harder tasks if the reward is near its best, easier ones if it is near its worst; a curator "
        "or a filter saves the time",
        _no_gradient,
        is_cause=False,
    ),
    Rule(
        "truncation",
        "At least half of the trajectories met max_tokens, in each of the last 3 steps.",
        "raise sampling.max_tokens, or reward short answers; what is cut off is seldom right",
        _truncated,
        is_cause=False,
    ),
    Rule(
        "entropy_collapse",
        "The entropy of the last 5 steps is below a tenth of that of the first 5, and the mean reward is no "
        "higher.",
        "lower the learning rate, raise clip_high or the temperature, or add an entropy bonus or a KL "
        "penalty; go back to an earlier checkpoint",
        _entropy,
        is_cause=False,
    ),
    Rule(
        "logprob_gap",
        "Engine and trainer differ by 0.05 nats or more for tokens of the newest version in one of the last "
        "5 steps, or by 0.5 for all tokens in each of the last 3; means over a step.",
        "`astraflow doctor RECIPE --drift` compares them without training: temperature, template, dtype, "
        "weights",
        _logprob_gap,
        is_cause=False,
    ),
)
