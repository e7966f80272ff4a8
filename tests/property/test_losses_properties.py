"""Losses: rules that hold for all inputs."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.config import Config, Use
from astraflow.losses.config import AuxiliaryConfig, LossConfig
from astraflow.losses.factory import LOSSES, HasTraits, Loss, make_loss
from astraflow.losses.m2po import m2po_bound, m2po_mask_bound
from astraflow.losses.policy import LossInputs, grpo
from astraflow.losses.ratio import kl_k2, kl_k3
from astraflow.losses.variant import LossVariant

NUMBERS = st.floats(-2, 2, width=32)
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=40)


def make_inputs(pairs: list[tuple[float, float]], **statistics: torch.Tensor) -> LossInputs:
    logprobs = torch.tensor([p[0] for p in pairs])
    zeros = torch.zeros_like(logprobs)
    return LossInputs(
        logprobs=logprobs, proximal_logprobs=zeros, behavior_logprobs=zeros,
        advantages=torch.tensor([p[1] for p in pairs]), statistics=statistics,
    )  # fmt: skip


@settings(deadline=None)
@given(PAIRS, st.floats(0.001, 1.0))
def test_m2po_bound_meets_the_budget_exactly_or_needs_no_bound(
    pairs: list[tuple[float, float]], budget: float
) -> None:
    inputs = make_inputs(pairs)
    tau = m2po_bound(inputs, budget=budget)["tau"].double()
    squares = inputs.logprobs[inputs.logprobs * inputs.advantages > 0].double().square()
    if torch.isinf(tau):
        assert squares.numel() == 0 or float(squares.mean()) <= budget
    else:
        torch.testing.assert_close(
            torch.minimum(squares, tau**2).mean(), torch.tensor(budget, dtype=torch.double), rtol=1e-5, atol=0
        )


@settings(deadline=None)
@given(PAIRS, st.floats(0.001, 1.0))
def test_m2po_mask_keeps_as_much_as_the_budget_allows(
    pairs: list[tuple[float, float]], budget: float
) -> None:
    inputs = make_inputs(pairs)
    bound = m2po_mask_bound(inputs, budget=budget)["max_square"]
    squares = inputs.logprobs.double().square()
    is_kept = squares <= bound
    assert not is_kept.any() or float(squares[is_kept].mean()) <= budget * (1 + 1e-9)
    left = squares[~is_kept]
    if left.numel():
        assert float(squares[squares <= left.min()].mean()) > budget


SEQUENCE = st.lists(st.tuples(*[st.floats(-1, 1, width=32)] * 5), min_size=1, max_size=6)
SEQUENCES = st.lists(SEQUENCE, min_size=1, max_size=8)
Sequences = list[list[tuple[float, ...]]]
CONFIGS = [c for c in get_args(get_args(LossConfig)[0]) if not issubclass(c, Use | LossVariant)]
EXTRAS = {
    "plain": {},
    "corrected": {
        "correction": {"name": "masked", "level": "sequence", "min_weight": 0.5, "max_weight": 3.0}
    },
    "penalised": {"kl": {"coef": 0.1}, "entropy_coef": 0.01},
}


def sequence_inputs(sequences: Sequences) -> LossInputs:
    """Columns of whole sequences, as a trainer joins them."""
    rows = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.float32)
    logprobs, proximal, behavior, advantages, other = rows.unbind(1)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return LossInputs(
        logprobs=logprobs.clone().requires_grad_(), proximal_logprobs=proximal, behavior_logprobs=behavior,
        advantages=advantages, sequence_idx=torch.repeat_interleave(torch.arange(len(sequences)), lengths),
        staleness=(10 * other).abs().floor(), entropies=other.abs(), reference_logprobs=other,
        teacher_logprobs=other,
    )  # fmt: skip


def gradients(loss: Loss, parts: list[Sequences]) -> torch.Tensor:
    """d(sum over all tokens / number of tokens) by logprob. Each part is a pass of its own: a microbatch of
    one rank or of several."""
    inputs = [sequence_inputs(part) for part in parts if part]
    if loss.statistics is not None:
        statistics = loss.statistics(sequence_inputs([s for part in parts for s in part]))
        inputs = [replace(part, statistics=statistics) for part in inputs]
    num = sum(len(part.logprobs) for part in inputs)
    found: list[torch.Tensor] = []
    for part in inputs:
        torch.autograd.backward(loss.function(part).per_token.sum() / num)
        assert part.logprobs.grad is not None
        found.append(part.logprobs.grad)
    return torch.cat(found)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_fields["name"].default)
@pytest.mark.parametrize("extras", EXTRAS)
@settings(deadline=None, max_examples=25)
@given(SEQUENCES, st.lists(st.integers(0, 8), max_size=4), st.randoms(use_true_random=False))
def test_gradients_do_not_depend_on_cut_ranks_or_order(
    config: type[Config], extras: str, sequences: Sequences, cuts: list[int], random: random.Random
) -> None:
    function = LOSSES[config.model_fields["name"].default]
    is_weighed = isinstance(function, HasTraits) and function.traits.weighs_behavior
    auxiliary = EXTRAS["penalised" if extras == "corrected" and is_weighed else extras]
    loss = make_loss(config(), AuxiliaryConfig.model_validate_json(json.dumps(auxiliary)))
    whole = gradients(loss, [sequences])
    bounds = sorted({0, len(sequences), *(min(cut, len(sequences)) for cut in cuts)})
    parts = [sequences[a:b] for a, b in pairwise(bounds)]
    assert_close(gradients(loss, parts), whole)
    order = random.sample(range(len(sequences)), len(sequences))
    moved = gradients(loss, [[sequences[i] for i in order]])
    by_sequence = torch.split(moved, [len(sequences[i]) for i in order])
    assert_close(torch.cat([by_sequence[order.index(i)] for i in range(len(sequences))]), whole)


@settings(deadline=None)
@given(PAIRS)
def test_grpo_never_gains_from_leaving_the_bounds(pairs: list[tuple[float, float]]) -> None:
    inputs = make_inputs(pairs)
    plain = -torch.exp(inputs.logprobs) * inputs.advantages
    assert bool((grpo(inputs, clip_low=0.2, clip_high=0.28).per_token >= plain - 1e-6).all())


@settings(deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=10))
def test_k2_and_k3_are_never_negative(pairs: list[tuple[float, float]]) -> None:
    a, b = torch.tensor(pairs).unbind(1)
    assert bool((kl_k2(a, b) >= 0).all())
    assert bool((kl_k3(a, b) >= -1e-6).all())
