"""Losses against numbers worked by hand, and their gradients."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from astraflow.errors import ConfigError, ShapeError
from astraflow.losses.auxiliary import (
    apply_correction,
    divergence_rejection,
    geometric_rejection,
    masked_weights,
    truncated_weights,
    with_entropy_bonus,
    with_kl_penalty,
)
from astraflow.losses.m2po import (
    m2po,
    m2po_bound,
    m2po_mask,
    m2po_mask_bound,
    m2po_mask_proximal,
    m2po_mask_proximal_bound,
    m2po_prototype,
    m2po_prototype_bound,
    m2po_released,
    m2po_released_bound,
)
from astraflow.losses.policy import (
    LossInputs,
    LossOutput,
    cispo,
    decoupled_ppo,
    decoupled_ppo_approx,
    distill,
    dppo_kl,
    dppo_tv,
    gmpo,
    grpo,
    gspo,
    ppo,
    reinforce,
    sapo,
    sft,
)
from astraflow.losses.ratio import importance_ratio, kl_k1, kl_k2, kl_k3


def make_inputs(deltas: list[float], advantages: list[float], **statistics: Tensor) -> LossInputs:
    """Inputs whose log ratio to the proximal and to the behavior policy is `deltas`."""
    base = torch.full((len(deltas),), -2.0)
    return LossInputs(
        logprobs=(base + torch.tensor(deltas)).requires_grad_(),
        proximal_logprobs=base,
        behavior_logprobs=base,
        advantages=torch.tensor(advantages),
        statistics=statistics,
    )


def gradient(inputs: LossInputs, output: LossOutput) -> list[float]:
    torch.autograd.backward(output.per_token.sum())
    assert inputs.logprobs.grad is not None
    return inputs.logprobs.grad.tolist()


def test_grpo_clips_each_side_at_its_own_bound() -> None:
    ratios = [1.5, 0.5, 1.1, 0.5]
    inputs = make_inputs([math.log(r) for r in ratios], [1.0, 1.0, -1.0, -2.0])
    output = grpo(inputs, clip_low=0.2, clip_high=0.28)
    # min(1.5, 1.28), min(0.5, 0.8), min(-1.1, -1.1), min(-1.0, -1.6), each negated
    assert output.per_token.tolist() == pytest.approx([-1.28, -0.5, 1.1, 1.6], rel=1e-5)
    assert output.metrics["clip_frac"].tolist() == [True, False, False, True]
    # unclipped: d(-ratio * A)/d logprob = -ratio * A; clipped: nothing
    assert gradient(inputs, output) == pytest.approx([0.0, -0.5, 1.1, 0.0], rel=1e-5)


def test_grpo_without_a_difference_is_plain_policy_gradient() -> None:
    inputs = make_inputs([0.0, 0.0], [0.5, -2.0])
    output = grpo(inputs, clip_low=0.2, clip_high=0.28)
    assert output.per_token.tolist() == pytest.approx([-0.5, 2.0])
    assert gradient(inputs, output) == pytest.approx([-0.5, 2.0])


DELTAS = [0.1, 0.3, -0.5, -0.4, 0.9]
ADVANTAGES = [1.0, 1.0, 1.0, -1.0, -1.0]
TAU = math.sqrt(0.055)
"""Harmful: 0.1, 0.3 (A > 0, ratio > 1) and -0.4 (A < 0, ratio < 1). (0.01 + tau^2 + tau^2) / 3 = 0.04."""


def test_m2po_bound_solves_the_budget_over_harmful_tokens() -> None:
    tau = m2po_bound(make_inputs(DELTAS, ADVANTAGES), budget=0.04)["tau"]
    assert float(tau) == pytest.approx(TAU, rel=1e-6)


def test_m2po_bound_is_infinite_within_the_budget() -> None:
    # (0.01 + 0.09 + 0.16) / 3 = 0.08667
    assert float(m2po_bound(make_inputs(DELTAS, ADVANTAGES), budget=0.087)["tau"]) == math.inf
    assert float(m2po_bound(make_inputs([-1.0], [1.0]), budget=0.04)["tau"]) == math.inf


def test_m2po_bound_of_one_harmful_token_is_the_root_of_the_budget() -> None:
    assert float(m2po_bound(make_inputs([0.5, 9.0], [1.0, -1.0]), budget=0.04)["tau"]) == pytest.approx(0.2)


def test_m2po_clips_harmful_tokens_beyond_tau_only() -> None:
    inputs = make_inputs(DELTAS, ADVANTAGES, tau=torch.tensor(TAU))
    output = m2po(inputs, budget=0.04)
    e = math.exp
    expected = [-e(0.1), -e(TAU), -e(-0.5), e(-TAU), e(0.9)]
    assert output.per_token.tolist() == pytest.approx(expected, rel=1e-5)
    assert gradient(inputs, output) == pytest.approx([-e(0.1), 0.0, -e(-0.5), 0.0, e(0.9)], rel=1e-5)
    assert output.metrics["clip_frac"].tolist() == [False, True, False, True, False]


def test_m2po_with_an_infinite_tau_clips_nothing() -> None:
    inputs = make_inputs([0.1, -3.0], [1.0, -1.0], tau=torch.tensor(math.inf))
    output = m2po(inputs, budget=0.04)
    assert gradient(inputs, output) == pytest.approx([-math.exp(0.1), math.exp(-3.0)], rel=1e-5)


def test_m2po_mask_drops_the_largest_squares_over_all_tokens() -> None:
    # squares sorted: 0.01, 0.09, 0.16, 0.25, 0.81; their running means: 0.01, 0.05, 0.0867, ...
    bound = m2po_mask_bound(make_inputs(DELTAS, ADVANTAGES), budget=0.06)
    assert float(bound["max_square"]) == pytest.approx(0.09, rel=1e-5)
    inputs = make_inputs(DELTAS, ADVANTAGES, **bound)
    output = m2po_mask(inputs, budget=0.06)
    expected = [-math.exp(0.1), -math.exp(0.3), 0.0, 0.0, 0.0]
    assert output.per_token.tolist() == pytest.approx(expected, rel=1e-5)
    assert gradient(inputs, output) == pytest.approx(expected, rel=1e-5)
    assert output.metrics["clip_frac"].tolist() == [False, False, True, True, True]


def test_m2po_mask_may_drop_everything() -> None:
    inputs = make_inputs([1.0], [1.0])
    bound = m2po_mask_bound(inputs, budget=0.04)
    inputs = make_inputs([1.0], [1.0], **bound)
    assert gradient(inputs, m2po_mask(inputs, budget=0.04)) == [0.0]


def test_m2po_as_released_clips_at_the_largest_square_below_the_exact_solution() -> None:
    # Harmful squares 0.01, 0.09, 0.16; capped at 0.01 their mean is 0.01, at 0.09 it is 0.063 > 0.04. The
    # exact solution is 0.055, between them: the released code takes 0.01, a ratio bound of 1.105 for 1.264.
    found = m2po_released_bound(make_inputs(DELTAS, ADVANTAGES), budget=0.04)
    assert float(found["tau"]) == pytest.approx(0.1, rel=1e-5)
    inputs = make_inputs(DELTAS, ADVANTAGES, **found)
    output = m2po_released(inputs, budget=0.04)
    e = math.exp
    expected = [-e(0.1), -e(0.1), -e(-0.5), e(-0.1), e(0.9)]
    assert output.per_token.tolist() == pytest.approx(expected, rel=1e-5)
    # Squares 0.0025, 0.01, 0.0135, 0.25: tau^2 = 4 * 0.012 - 0.026 = 0.022 lies above 0.0135.
    inputs = make_inputs([0.05, 0.1, 0.116, 0.5], [1.0] * 4)
    exact, released = m2po_bound(inputs, budget=0.012), m2po_released_bound(inputs, budget=0.012)
    assert math.exp(float(exact["tau"])) == pytest.approx(1.160, abs=1e-3)
    assert math.exp(float(released["tau"])) == pytest.approx(1.123, abs=1e-3)


def test_m2po_as_released_knows_no_bound_within_the_budget_and_clips_all_where_no_square_is_below() -> None:
    assert float(m2po_released_bound(make_inputs(DELTAS, ADVANTAGES), budget=0.087)["tau"]) == math.inf
    assert float(m2po_released_bound(make_inputs([-1.0], [1.0]), budget=0.04)["tau"]) == math.inf
    assert float(m2po_released_bound(make_inputs([0.5, 0.6], [1.0, 1.0]), budget=0.04)["tau"]) == 0.0


# The harmful tokens of DELTAS have the squares 0.01, 0.09, 0.16, whose running means are 0.01, 0.05, 0.0867.
@pytest.mark.parametrize(
    ("deltas", "advantages", "budget", "tau"),
    [
        (DELTAS, ADVANTAGES, 0.06, 0.3),
        (DELTAS, ADVANTAGES, 0.049, 0.1),
        (DELTAS, ADVANTAGES, 0.087, math.inf),  # the mean of all is within the budget
        (DELTAS, ADVANTAGES, 0.009, 0.1),  # no mean is below: the smallest square is kept
        (DELTAS, ADVANTAGES, 0.0, 0.1),
        ([-1.0, 2.0, 0.0], [1.0, -1.0, 1.0], 0.01, math.inf),  # no token is harmful
        ([5.0, 0.5], [0.0, 0.0], 0.01, math.inf),
        ([0.5, 1.0, 1.5], [1.0] * 3, 0.7, 1.0),  # all are; means 0.25, 0.625, 1.167
        ([0.5], [1.0], 0.01, 0.5),
        ([-0.5], [-2.0], 0.25, math.inf),  # a mean of all that equals the budget is within it
        ([0.5, 0.5, 2.0], [1.0] * 3, 0.25, 0.5),  # a mean of some must be below it
        ([0.5, -0.5, 0.5, 1.0], [1.0, -1.0, 1.0, 1.0], 0.3, 0.5),  # equal squares: 0.25, 0.25, 0.25, 0.4375
        ([0.25, 1.0, -1.0], [1.0, 1.0, -1.0], 0.6, 1.0),  # 0.0625, 0.53, 0.69: one of two equal squares
        ([0.25, math.inf], [1.0, 1.0], 0.01, 0.25),
        ([0.25, math.nan], [1.0, 1.0], 0.0625, math.inf),  # compares as no harm, as in all variants
    ],
)
def test_m2po_of_the_prototype_clips_at_the_largest_square_that_the_budget_keeps(
    deltas: list[float], advantages: list[float], budget: float, tau: float
) -> None:
    bound = m2po_prototype_bound(make_inputs(deltas, advantages), budget=budget)
    assert float(bound["tau"]) == pytest.approx(tau, rel=1e-6)


def test_m2po_of_the_prototype_clips_harmful_tokens_beyond_its_square_only() -> None:
    bound = m2po_prototype_bound(make_inputs(DELTAS, ADVANTAGES), budget=0.06)
    inputs = make_inputs(DELTAS, ADVANTAGES, **bound)
    output = m2po_prototype(inputs, budget=0.06)
    e = math.exp
    # The token at the bound itself, 0.3, keeps its gradient; -0.4 with A < 0 is clipped.
    assert output.per_token.tolist() == pytest.approx([-e(0.1), -e(0.3), -e(-0.5), e(-0.3), e(0.9)], rel=1e-5)
    assert gradient(inputs, output) == pytest.approx([-e(0.1), -e(0.3), -e(-0.5), 0.0, e(0.9)], rel=1e-5)
    assert output.metrics["clip_frac"].tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("tau", [math.inf, 5.0])
def test_m2po_of_the_prototype_clips_at_0_05_and_21_whatever_its_square(tau: float) -> None:
    deltas = [math.log(r) for r in (20.9, 21.1, 0.051, 0.049, 30.0, 0.01)]
    inputs = make_inputs(deltas, [1.0, 1.0, -1.0, -1.0, -1.0, 1.0], tau=torch.tensor(tau))
    output = m2po_prototype(inputs, budget=0.01)
    assert output.per_token.tolist() == pytest.approx([-20.9, -21.0, 0.051, 0.05, 30.0, -0.01], rel=1e-4)
    assert output.metrics["clip_frac"].tolist() == [False, True, False, True, False, False]


def test_m2po_of_the_prototype_bounds_a_minibatch_and_not_its_microbatches() -> None:
    """The prototype bounds each microbatch by itself: the two halves would have tau 0.1 and 0.3."""
    whole = m2po_prototype_bound(make_inputs([0.1, 0.5, 0.3, 0.4], [1.0] * 4), budget=0.06)
    halves = [m2po_prototype_bound(make_inputs(d, [1.0] * 2), budget=0.06) for d in ([0.1, 0.5], [0.3, 0.4])]
    assert [float(half["tau"]) for half in halves] == pytest.approx([0.1, 0.3])
    assert float(whole["tau"]) == pytest.approx(0.3)


def stale_inputs(behind: list[float], ahead: list[float], **statistics: Tensor) -> LossInputs:
    """Advantages 1; `behind`: proximal minus behavior logprobs, `ahead`: current minus proximal ones."""
    behavior = torch.full((len(behind),), -2.0)
    proximal = behavior + torch.tensor(behind)
    return LossInputs(
        logprobs=(proximal + torch.tensor(ahead)).requires_grad_(),
        proximal_logprobs=proximal,
        behavior_logprobs=behavior,
        advantages=torch.ones(len(behind)),
        statistics=statistics,
    )


BOUNDS = {"clip_low": 0.2, "clip_high": 0.2, "max_behavior_ratio": 5.0}


def test_m2po_mask_against_the_proximal_policy_drops_the_stalest_tokens_and_clips_the_rest() -> None:
    # Squares 0.01, 0.09, 1.0: means 0.01, 0.05, 0.367. The second is clipped at 1.2.
    inputs = stale_inputs([0.1, -0.3, 1.0], [0.0, math.log(1.5), 0.0])
    bound = m2po_mask_proximal_bound(inputs, budget=0.06, **BOUNDS)
    assert float(bound["max_square"]) == pytest.approx(0.09, rel=1e-5)
    inputs = replace(inputs, statistics=bound)
    output = m2po_mask_proximal(inputs, budget=0.06, **BOUNDS)
    expected = [-math.exp(0.1), -1.2 * math.exp(-0.3), 0.0]
    assert output.per_token.tolist() == pytest.approx(expected, rel=1e-5)
    assert output.metrics["masked_frac"].tolist() == [False, False, True]
    assert gradient(inputs, output) == pytest.approx([-math.exp(0.1), 0.0, 0.0], rel=1e-5)


def test_m2po_mask_against_the_proximal_policy_keeps_at_least_one_token() -> None:
    inputs = stale_inputs([1.0, 0.5], [0.0, 0.0])
    bound = m2po_mask_proximal_bound(inputs, budget=0.04, **BOUNDS)
    output = m2po_mask_proximal(replace(inputs, statistics=bound), budget=0.04, **BOUNDS)
    assert output.metrics["masked_frac"].tolist() == [True, False]


def test_a_statistic_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tau.*m2po_bound"):
        m2po(make_inputs([0.0], [1.0]), budget=0.04)


def test_columns_of_different_lengths_are_refused() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ShapeError, match=r"\(2,\)"):
        LossInputs(logprobs=two, proximal_logprobs=two, behavior_logprobs=one, advantages=two)


def test_kl_estimators_of_a_ratio_of_two() -> None:
    logprobs, reference = torch.tensor([-2.0]), torch.tensor([-2.0 + math.log(2)])
    assert float(kl_k1(logprobs, reference)) == pytest.approx(-math.log(2))
    assert float(kl_k2(logprobs, reference)) == pytest.approx(math.log(2) ** 2 / 2)
    assert float(kl_k3(logprobs, reference)) == pytest.approx(2 - 1 - math.log(2))
    assert float(importance_ratio(reference, logprobs)) == pytest.approx(2.0)


# --- losses against the proximal policy; ratios are chosen, so that results are plain numbers -------


def columns(**values: list[float]) -> dict[str, Tensor]:
    return {name: torch.tensor(column) for name, column in values.items()}


def test_reinforce_weighs_logprobs_by_advantages() -> None:
    inputs = make_inputs([0.5, -1.0], [2.0, -0.5])
    output = reinforce(inputs)
    # -2 * (-2 + 0.5), 0.5 * (-2 - 1)
    assert output.per_token.tolist() == pytest.approx([3.0, -1.5])
    assert gradient(inputs, output) == pytest.approx([-2.0, 0.5])


def test_ppo_bounds_the_loss_of_bad_tokens_that_became_likely() -> None:
    inputs = make_inputs([math.log(r) for r in (5.0, 2.0, 0.5, 5.0)], [-2.0, -2.0, -2.0, 1.0])
    output = ppo(inputs, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    # A < 0: max(r, clip r) * 2 is 10, 4, 1.6, and at most 3 * 2; A > 0: -min(5, 1.2)
    assert output.per_token.tolist() == pytest.approx([6.0, 4.0, 1.6, -1.2], rel=1e-5)
    assert gradient(inputs, output) == pytest.approx([0.0, 4.0, 0.0, 0.0], rel=1e-5)
    assert output.metrics["dual_clip_frac"].tolist() == [True, False, False, False]


@pytest.mark.parametrize("dual_clip", [0.5, 1.0])
def test_a_dual_clip_that_would_cut_fresh_tokens_is_refused_however_it_comes(dual_clip: float) -> None:
    with pytest.raises(ConfigError, match="dual_clip must be above 1, or 0"):
        ppo(make_inputs([0.0], [-1.0]), clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)


def test_ppo_without_a_dual_clip_is_grpo() -> None:
    inputs = make_inputs([math.log(5.0)], [-2.0])
    output = ppo(inputs, clip_low=0.2, clip_high=0.2, dual_clip=0.0)
    assert output.per_token.tolist() == pytest.approx([10.0], rel=1e-5)
    assert gradient(inputs, output) == pytest.approx([10.0], rel=1e-5)


def test_gspo_clips_whole_sequences_by_their_mean_ratio() -> None:
    inputs = replace(
        make_inputs([0.1, 0.3, -0.1, 0.1], [1.0, 1.0, 2.0, 2.0]), sequence_idx=torch.tensor([0, 0, 1, 1])
    )
    output = gspo(inputs, clip_low=0.1, clip_high=0.1)
    # mean log ratios 0.2 (ratio 1.2214, clipped at 1.1) and 0 (ratio 1)
    assert output.per_token.tolist() == pytest.approx([-1.1, -1.1, -2.0, -2.0], rel=1e-5)
    assert gradient(inputs, output) == pytest.approx([0.0, 0.0, -2.0, -2.0], rel=1e-5)
    assert output.metrics["clip_frac"].tolist() == [True, True, False, False]


def test_gspo_has_the_gradient_of_the_sequence_form() -> None:
    # -A * exp(mean delta) over 2 tokens: each token's derivative is -A * s / 2; `sequence_means` divides by 2
    inputs = replace(make_inputs([0.1, 0.3], [1.5, 1.5]), sequence_idx=torch.tensor([0, 0]))
    found = gradient(inputs, gspo(inputs, clip_low=1.0, clip_high=1.0))
    sequence = make_inputs([0.1, 0.3], [1.5, 1.5])
    ratio = torch.exp((sequence.logprobs - sequence.proximal_logprobs).mean())
    torch.autograd.backward(-1.5 * ratio)
    assert sequence.logprobs.grad is not None
    assert [g / 2 for g in found] == pytest.approx(sequence.logprobs.grad.tolist(), rel=1e-6)
    assert found[0] / 2 == pytest.approx(-1.5 * math.exp(0.2) / 2, rel=1e-6)


def test_cispo_truncates_the_weight_and_keeps_every_gradient() -> None:
    inputs = make_inputs([math.log(8.0), math.log(0.5)], [1.0, -2.0])
    output = cispo(inputs, max_ratio=5.0)
    # -5 * 1 * (ln 8 - 2), 0.5 * 2 * (ln 0.5 - 2)
    assert output.per_token.tolist() == pytest.approx([-5 * (math.log(8) - 2), math.log(0.5) - 2], rel=1e-5)
    assert gradient(inputs, output) == pytest.approx([-5.0, 1.0], rel=1e-5)
    assert output.metrics["clip_frac"].tolist() == [True, False]


def test_sapo_gates_softly_with_weight_one_on_policy() -> None:
    inputs = make_inputs([0.0, math.log(2.0), math.log(2.0)], [3.0, 1.0, -1.0])
    output = sapo(inputs, temperature_positive=1.0, temperature_negative=2.0)
    gate = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    # 4 / tau * sigmoid(tau * (ratio - 1)): 2 at ratio 1; its slope in the logprob is 4 * s * (1 - s) * ratio
    assert output.per_token.tolist() == pytest.approx([-6.0, -4 * gate[0], 2 * gate[1]], rel=1e-5)
    slopes = [8 * s * (1 - s) for s in gate]
    assert gradient(inputs, output) == pytest.approx([-3.0, -slopes[0], slopes[1]], rel=1e-5)


# --- behavior, proximal and current policy differ -------------------------------------------------


def three_policies(staleness: list[float] | None = None) -> LossInputs:
    """Behavior to proximal ratios 2, 8, 0.5; proximal to current 1.5, 1.0, 1.1; advantages 1."""
    behavior = torch.full((3,), -3.0)
    proximal = behavior + torch.tensor([2.0, 8.0, 0.5]).log()
    return LossInputs(
        logprobs=(proximal + torch.tensor([1.5, 1.0, 1.1]).log()).requires_grad_(),
        proximal_logprobs=proximal, behavior_logprobs=behavior, advantages=torch.ones(3),
        sequence_idx=torch.tensor([0, 0, 1]),
        staleness=None if staleness is None else torch.tensor(staleness),
    )  # fmt: skip


PROBABILITIES = ([0.9, 0.52, 0.1, 0.7], [0.5] * 4, [1.0, 1.0, -1.0, -1.0])
"""Current, behavior, advantages: too far, near, too far, and on its way back."""


def of_probabilities() -> LossInputs:
    now, behavior, advantages = (torch.tensor(column) for column in PROBABILITIES)
    return LossInputs(
        logprobs=now.log().requires_grad_(), proximal_logprobs=behavior.log(),
        behavior_logprobs=behavior.log(), advantages=advantages,
    )  # fmt: skip


def test_dppo_leaves_out_tokens_that_would_leave_the_trust_region() -> None:
    # Distances 0.4, 0.02, 0.4, 0.2; divergences 0.511, 0.001, 0.511, 0.087 nats.
    expected = [0.0, -1.04, 0.0, 1.4]
    for function in (partial(dppo_tv, max_distance=0.15), partial(dppo_kl, max_divergence=0.05)):
        inputs = of_probabilities()
        output = function(inputs, max_ratio=20.0)
        assert output.metrics["clip_frac"].tolist() == [True, False, True, False]
        assert gradient(inputs, output) == pytest.approx(expected, rel=1e-5)
    inputs = of_probabilities()
    wide = dppo_tv(inputs, max_distance=0.5, max_ratio=1.5)
    assert gradient(inputs, wide) == pytest.approx([-1.5, -1.04, 0.2, 1.4], rel=1e-5)
    wide = dppo_kl(of_probabilities(), max_divergence=0.52, max_ratio=20.0)
    assert not wide.metrics["clip_frac"].any()
    near = dppo_kl(of_probabilities(), max_divergence=0.5, max_ratio=20.0)
    assert near.metrics["clip_frac"].tolist() == [True, False, True, False]


def test_gmpo_clips_each_token_on_its_own_side() -> None:
    inputs = make_inputs([0.6, -0.6, 0.6, -0.6], [1.0, 1.0, -1.0, -1.0])
    inputs = replace(inputs, sequence_idx=torch.tensor([0, 0, 1, 1]))
    output = gmpo(inputs, clip_low=0.4, clip_high=0.4)
    # A > 0: 0.4 and -0.6; A < 0: 0.6 and -0.4.
    low, high = math.exp(-0.1), math.exp(0.1)
    assert output.per_token.tolist() == pytest.approx([-low, -low, high, high], rel=1e-5)
    assert output.metrics["clip_frac"].tolist() == [True, False, False, True]
    assert gradient(inputs, output) == pytest.approx([0.0, -low, high, 0.0], rel=1e-5)


def test_gmpo_has_separate_bounds_below_and_above() -> None:
    inputs = make_inputs([0.6, -0.6], [1.0, -1.0])
    inputs = replace(inputs, sequence_idx=torch.tensor([0, 1]))
    output = gmpo(inputs, clip_low=0.3, clip_high=0.5)
    # A > 0 is bounded above by 0.5, A < 0 below by -0.3.
    assert output.per_token.tolist() == pytest.approx([-math.exp(0.5), math.exp(-0.3)], rel=1e-5)


def test_sequences_are_rejected_by_their_geometric_mean_or_their_divergence() -> None:
    # Log weights 0.2 and -0.2: geometric mean 1, k2 0.02, k3 0.0201. Then 0.1 and 0.1: e^0.1, 0.005, 0.0052.
    inputs = stale_inputs([0.2, -0.2, 0.1, 0.1], [0.0] * 4)
    inputs = replace(inputs, sequence_idx=torch.tensor([0, 0, 1, 1]))
    assert geometric_rejection(inputs, min_weight=0.9, max_weight=1.1).tolist() == [1, 1, 0, 0]
    assert geometric_rejection(inputs, min_weight=1.05, max_weight=1.11).tolist() == [0, 0, 1, 1]
    for estimator in ("k2", "k3"):
        kept = divergence_rejection(inputs, estimator=estimator, max_divergence=0.01)
        assert kept.tolist() == [0, 0, 1, 1]
    # k3 of 0.1 is 0.00517, k2 is 0.005.
    assert divergence_rejection(inputs, estimator="k2", max_divergence=0.0051).tolist() == [0, 0, 1, 1]
    assert divergence_rejection(inputs, estimator="k3", max_divergence=0.0051).tolist() == [0, 0, 0, 0]


def test_decoupled_ppo_clips_by_one_ratio_and_weighs_by_the_other() -> None:
    inputs = three_policies()
    output = decoupled_ppo(inputs, clip_low=0.2, clip_high=0.2, max_behavior_ratio=5.0)
    # 2 * -1.2 (clipped), left out (8 > 5), 0.5 * -1.1
    assert output.per_token.tolist() == pytest.approx([-2.4, 0.0, -0.55], rel=1e-5)
    assert gradient(inputs, output) == pytest.approx([0.0, 0.0, -0.55], rel=1e-5)
    assert output.metrics["masked_frac"].tolist() == [False, True, False]


def test_approximate_proximal_logprobs_lie_between_behavior_and_current() -> None:
    inputs = three_policies([0.0, 1.0, 2.0])
    output = decoupled_ppo_approx(inputs, clip_low=0.2, clip_high=0.2, max_behavior_ratio=5.0)
    # fresh: proximal is current, ratio 1, weight 3; one stale: proximal is behavior, ratio 8 clipped to 1.2,
    # weight 1; two: half way in logprobs, so ratio and weight are both sqrt(0.55), unclipped since A > 0
    assert output.per_token.tolist() == pytest.approx([-3.0, -1.2, -0.55], rel=1e-5)
    assert gradient(inputs, output) == pytest.approx([-3.0, 0.0, -0.55], rel=1e-5)


def test_truncated_weights_are_cut_off_above() -> None:
    inputs = three_policies()
    assert truncated_weights(inputs, level="token", max_weight=2.5).tolist() == pytest.approx([2.0, 2.5, 0.5])
    assert truncated_weights(inputs, level="sequence", max_weight=20.0).tolist() == pytest.approx(
        [16, 16, 0.5]
    )


def test_masked_weights_are_zero_outside_of_their_bounds() -> None:
    inputs = three_policies()
    token = masked_weights(inputs, level="token", min_weight=1.0, max_weight=5.0)
    assert token.tolist() == pytest.approx([2.0, 0.0, 0.0])
    sequence = masked_weights(inputs, level="sequence", min_weight=0.4, max_weight=5.0)
    assert sequence.tolist() == pytest.approx([0.0, 0.0, 0.5])


def test_a_correction_multiplies_any_loss_and_its_gradient() -> None:
    inputs = three_policies()
    output = apply_correction(reinforce(inputs), truncated_weights(inputs, level="token", max_weight=2.5))
    assert gradient(inputs, output) == pytest.approx([-2.0, -2.5, -0.5])
    assert output.metrics["masked_frac"].tolist() == [False, False, False]


# --- reference, teacher, demonstrations -----------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", -math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, -math.log(2)), ("k3", 1 - math.log(2), -1.0)],
)
def test_the_penalty_adds_the_estimate_and_its_slope(estimator: str, value: float, slope: float) -> None:
    # reference / current = 2; slopes in the logprob: 1, log(current / reference), 1 - 2
    inputs = make_inputs([0.0], [0.0])
    inputs = replace(inputs, reference_logprobs=inputs.proximal_logprobs + math.log(2))
    output = with_kl_penalty(grpo(inputs, clip_low=0.2, clip_high=0.2), inputs, estimator=estimator, coef=0.1)  # type: ignore[arg-type]
    assert output.per_token.tolist() == pytest.approx([0.1 * value], rel=1e-5)
    assert gradient(inputs, output) == pytest.approx([0.1 * slope], rel=1e-5)


def test_the_entropy_bonus_raises_the_entropy() -> None:
    entropies = torch.tensor([0.5, 1.5], requires_grad=True)
    inputs = replace(make_inputs([0.0, 0.0], [0.0, 0.0]), entropies=entropies)
    output = with_entropy_bonus(reinforce(inputs), inputs, coef=0.2)
    assert output.per_token.tolist() == pytest.approx([-0.1, -0.3])
    torch.autograd.backward(output.per_token.sum())
    assert entropies.grad is not None
    assert entropies.grad.tolist() == pytest.approx([-0.2, -0.2])


def test_distillation_follows_the_gap_to_the_teacher() -> None:
    inputs = make_inputs([0.0, math.log(2.0)], [1.0, 1.0])
    inputs = replace(inputs, **columns(teacher_logprobs=[-1.5, -2.0]))
    output = distill(inputs, advantage_coef=0.5)
    # gaps: -1.5 + 2, -2 - (-2 + ln 2); plus half of the advantage; times the ratios 1 and 2, negated
    expected = [-1.0, -2 * (0.5 - math.log(2))]
    assert output.per_token.tolist() == pytest.approx(expected, rel=1e-5)
    assert gradient(inputs, output) == pytest.approx(expected, rel=1e-5)
    assert output.metrics["teacher_kl"].tolist() == pytest.approx([-0.5, math.log(2)], rel=1e-5)


def test_fine_tuning_ignores_how_large_advantages_are() -> None:
    inputs = make_inputs([0.5, 0.0], [-9.0, 7.0])
    output = sft(inputs, positive_only=False)
    assert output.per_token.tolist() == pytest.approx([1.5, 2.0])
    assert gradient(inputs, output) == pytest.approx([-1.0, -1.0])
    inputs = make_inputs([0.5, 0.0, 0.0], [-9.0, 7.0, 0.0])
    output = sft(inputs, positive_only=True)
    assert gradient(inputs, output) == pytest.approx([0.0, -1.0, 0.0])
    assert output.metrics["masked_frac"].tolist() == [True, False, True]


def test_a_column_that_is_missing_is_named() -> None:
    inputs = make_inputs([0.0], [1.0])
    with pytest.raises(ConfigError, match=r"teacher_logprobs.*train\.auxiliary\.teacher"):
        distill(inputs, advantage_coef=0.0)
    with pytest.raises(ConfigError, match="sequence_idx"):
        gspo(inputs, clip_low=0.1, clip_high=0.1)
