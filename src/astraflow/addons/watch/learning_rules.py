"""Rules about learning: rewards, gradients, entropy, logprobs. They read the newest steps."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from astraflow.report.watch.rule import AlarmFinding, AlarmRule
from astraflow.report.watch.run_snapshot import RunSnapshot, newest_values
from astraflow.types import StepRecord

__all__ = ["LEARNING_RULES"]

_STEPS = 5
"""Steps after which a reward that does not change raises an alarm."""
_STEPS_WITHOUT_COUNTS = 20
"""The same, if the trainer does not report how many tokens have a gradient."""
_NO_GRADIENT_FRAC = 0.05
_GRADIENT_STEPS = 8
"""More than `_STEPS`, so that a constant reward is reported first."""
_TRUNCATED_FRAC = 0.5
_COLLAPSED_FRAC = 0.1
_MAX_MISMATCH = 0.05
"""Nats. If both sides round to bfloat16, the mean of a small model stays below 0.02."""
_MISMATCH_GROWTH = 4.0
"""A deep model in bfloat16 has more from the start: 0.03 to 0.16 nats were measured with 30 layers. Then,
only much growth shows that something is wrong."""
_MOST_MISMATCH = 0.2
"""Nats. More is wrong even from the start."""
_MAX_GAP = 0.5
"""Nats, as the mean over all tokens, stale ones included: such a gap changes a ratio by a factor of 1.6."""
_GAP_STEPS = 3
_ALL_CUT_FRAC = 0.99
_UNBOUNDED_FRAC = 0.5
_UNREAD_FRAC = 0.01
_UNREAD_EPISODES = 8
"""With fewer episodes, unread calls can be the slips of a model that is still learning."""
_FAR_GAP = 0.1
"""Nats, as the mean over all tokens. Its square is the smallest budget of the recipes, 0.01."""


def _find_constant_rewards(run: RunSnapshot) -> Iterable[AlarmFinding]:
    for policy, records in run.steps.items():
        same = _newest_with_equal_reward(records)
        if not _teach_nothing(same):
            continue
        steps = f"all {len(same)} steps" if same[0].step == 0 else f"the last {len(same)} steps"
        yield AlarmFinding(
            f"policy {policy}",
            f"{policy}: the mean reward was always {same[0].reward_mean:g} in {steps}, so there is nothing "
            "to learn",
            same[0].at_s,
        )


def _teach_nothing(same: Sequence[StepRecord]) -> bool:
    """Whether steps with the same mean reward had nothing to learn from.

    With few possible rewards, small batches can have the same mean by chance. The number of tokens with a
    gradient distinguishes the two cases.
    """
    counts = [record.num_gradient_tokens for record in same]
    if None in counts:
        return len(same) >= _STEPS_WITHOUT_COUNTS
    return len(same) >= _STEPS and not any(counts)


def _newest_with_equal_reward(records: Sequence[StepRecord]) -> list[StepRecord]:
    """The newest consecutive steps with the same mean reward, oldest first."""
    same: list[StepRecord] = []
    for record in reversed(records):
        follows = not same or (record.reward_mean, record.step) == (same[-1].reward_mean, same[-1].step - 1)
        if not follows:
            break
        same.append(record)
    return same[::-1]


def _find_missing_gradients(run: RunSnapshot) -> Iterable[AlarmFinding]:
    for policy, records in run.steps.items():
        newest = [r for r in records[-_GRADIENT_STEPS:] if r.num_gradient_tokens is not None]
        shares = [(r.num_gradient_tokens or 0) / max(1, r.num_trained_tokens) for r in newest]
        if len(shares) < _GRADIENT_STEPS or max(shares) >= _NO_GRADIENT_FRAC:
            continue
        if _teach_nothing(_newest_with_equal_reward(records)):
            continue  # `reward_constant` reports it
        reward = fmean(record.reward_mean for record in newest)
        yield AlarmFinding(
            f"policy {policy}",
            f"{policy}: only {fmean(shares):.1%} of the committed tokens had a gradient in the "
            f"last {_GRADIENT_STEPS} steps, because the rewards within most groups are equal; the mean "
            f"reward is {reward:.3g}",
            newest[0].at_s,
        )


def _find_truncation(run: RunSnapshot) -> Iterable[AlarmFinding]:
    for policy, records in run.steps.items():
        shares = newest_values(records, "episode/truncated_frac", _STEPS)
        if len(shares) == _STEPS and min(shares) >= _TRUNCATED_FRAC:
            yield AlarmFinding(
                f"policy {policy}",
                f"{policy}: {fmean(shares):.0%} of the trajectories reached max_tokens in the "
                f"last {_STEPS} steps",
                records[-_STEPS].at_s,
            )


def _find_entropy_collapse(run: RunSnapshot) -> Iterable[AlarmFinding]:
    for policy, records in run.steps.items():
        if len(records) < 2 * _STEPS or records[0].step != 0:
            continue  # the entropy of the first steps is unknown
        first = records[:_STEPS]
        newest = records[-_STEPS:]
        before = newest_values(first, "entropy", _STEPS)
        now = newest_values(newest, "entropy", _STEPS)
        if min(len(before), len(now)) < _STEPS or fmean(now) >= _COLLAPSED_FRAC * fmean(before):
            continue
        reward_before = _reward(first)
        reward = _reward(newest)
        if reward > reward_before:
            continue
        yield AlarmFinding(
            f"policy {policy}",
            f"{policy}: the entropy fell from {fmean(before):.3g} to {fmean(now):.3g} nats per token, and "
            f"the mean reward is {reward:.3g} (at first {reward_before:.3g})",
            newest[0].at_s,
        )


def _reward(records: Sequence[StepRecord]) -> float:
    return fmean(record.reward_mean for record in records)


def _find_logprob_gaps(run: RunSnapshot) -> Iterable[AlarmFinding]:
    for policy, records in run.steps.items():
        first = newest_values(records[:_STEPS], "logprob_mismatch", _STEPS)
        fresh = newest_values(records, "logprob_mismatch", _STEPS)
        gaps = newest_values(records, "behavior_gap", _GAP_STEPS)
        usual = min(max(_MAX_MISMATCH, _MISMATCH_GROWTH * max(first, default=0.0)), _MOST_MISMATCH)
        if fresh and fmean(fresh) >= usual:
            size = f"by {fmean(fresh):.2g} nats on average for tokens of the newest version"
        elif len(gaps) == _GAP_STEPS and min(gaps) >= _MAX_GAP:
            size = f"by at least {min(gaps):.2g} nats on average in each of the last {_GAP_STEPS} steps"
        else:
            continue
        yield AlarmFinding(
            f"policy {policy}",
            f"{policy}: the logprobs of engine and trainer differ {size}; rounding explains 0.02, or up to "
            "0.16 in a deep model in bfloat16",
            records[-1].at_s,
        )


def _find_bad_bounds(run: RunSnapshot) -> Iterable[AlarmFinding]:
    for policy, records in run.steps.items():
        newest = records[-_GAP_STEPS:]
        cuts = [newest_values(newest, name, _GAP_STEPS) for name in ("clip_frac", "masked_frac")]
        if any(len(shares) == _GAP_STEPS and min(shares) >= _ALL_CUT_FRAC for shares in cuts):
            problem = "cut off nearly every token, so that nothing is trained"
        elif _is_unbounded(newest):
            problem = "was infinite in most minibatches, though the tokens are far from the current policy"
        else:
            continue
        yield AlarmFinding(
            f"policy {policy}",
            f"{policy}: in each of the last {_GAP_STEPS} steps, the loss's bound {problem}",
            newest[0].at_s,
        )


def _is_unbounded(newest: Sequence[StepRecord]) -> bool:
    shares = newest_values(newest, "unbounded_frac", _GAP_STEPS)
    gaps = newest_values(newest, "behavior_gap", _GAP_STEPS)
    if min(len(shares), len(gaps)) < _GAP_STEPS:
        return False
    return min(shares) >= _UNBOUNDED_FRAC and min(gaps) >= _FAR_GAP


def _find_unread_calls(run: RunSnapshot) -> Iterable[AlarmFinding]:
    newest = {p.name: p.unread_calls_frac for p in run.policies if p.num_episodes >= _UNREAD_EPISODES}
    for policy in {**newest, **run.steps}:
        records = run.steps.get(policy, ())
        num_turns = newest_values(records, "episode/turns", 1)
        num_unread = newest_values(records, "episode/unread_calls", 1)
        stepped = num_unread[0] / num_turns[0] if num_unread and num_turns and num_turns[0] else 0.0
        share = max(newest.get(policy, 0.0), stepped)
        if share > _UNREAD_FRAC:
            yield AlarmFinding(
                f"policy {policy}",
                f"{policy}: {share:.0%} of the turns look like a tool call, but no call was read from them",
            )


LEARNING_RULES = (
    AlarmRule(
        "reward_constant",
        "The mean reward was the same in at least the last 5 steps, and no token had a gradient. If the "
        "trainer does not report gradients, the rule needs 20 steps.",
        "inspect an episode and its reward with `astraflow try` or `astraflow episodes RUN`",
        _find_constant_rewards,
        is_cause=False,
    ),
    AlarmRule(
        "no_gradient",
        "Fewer than 5% of the committed tokens had a gradient in each of the last 8 steps.",
        "choose harder tasks if the reward is near its best, and easier ones if it is near its worst; a "
        "curator or a filter saves the wasted time",
        _find_missing_gradients,
        is_cause=False,
    ),
    AlarmRule(
        "truncation",
        "At least half of the trajectories reached max_tokens in each of the last 5 steps.",
        "raise sampling.max_tokens, or reward short answers; truncated answers are seldom right",
        _find_truncation,
        is_cause=False,
    ),
    AlarmRule(
        "unread_calls",
        "More than 1% of the turns look like a tool call from which none was read.",
        "look at such a turn with `astraflow view`; `astraflow doctor RECIPE` says in which format the chat "
        "template prints calls, which `workflow.parser: auto` reads",
        _find_unread_calls,
    ),
    AlarmRule(
        "entropy_collapse",
        "The entropy of the last 5 steps is below a tenth of that of the first 5, and the mean reward has "
        "not risen.",
        "lower the learning rate, raise clip_high or the temperature, or add an entropy bonus or a KL "
        "penalty; go back to an earlier checkpoint",
        _find_entropy_collapse,
        is_cause=False,
    ),
    AlarmRule(
        "logprob_gap",
        "Engine and trainer differ by at least 0.05 nats (or four times the most of the first 5 steps, at "
        "most 0.2) on average for tokens of the newest version in the last 5 steps, or by at least 0.5 nats "
        "for all tokens in each of the last 3.",
        "run `astraflow doctor RECIPE --drift`, which compares them without training: temperature, template, "
        "dtype, weights",
        _find_logprob_gaps,
        is_cause=False,
    ),
    AlarmRule(
        "bad_bound",
        "In each of the last 3 steps, the loss clipped or left out at least 99% of the tokens, or its bound "
        "over the minibatch was infinite in at least half of the minibatches, while engine and trainer "
        "differed by at least 0.1 nats per token.",
        "compare statistics/NAME and clip_frac in the metrics with the loss's budget; raise a budget that "
        "cuts everything, and lower one that never binds",
        _find_bad_bounds,
        is_cause=False,
    ),
)
