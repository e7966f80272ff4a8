"""Generalised advantage estimation and the critic's loss against numbers worked by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.losses.auxiliary import value_loss
from astraflow.trainer.step import (
    advantages_and_returns,
    explained_frac,
    rewards_at_ends,
    sums_to_end,
    whiten,
)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def starts(*lengths: int) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(lengths, np.int64))])


def test_an_advantage_is_the_decayed_sum_of_what_the_critic_did_not_expect() -> None:
    # discount 1/2, decay 1/2. Deltas from the end: 1 - 0.4 = 0.6; 0.5 * 0.4 - 0.2 = 0; 0.1 - 0.5 = -0.4.
    # Advantages: 0.6; 0 + 0.25 * 0.6 = 0.15; -0.4 + 0.25 * 0.15 = -0.3625. Another sequence starts afresh.
    advantages, returns = advantages_and_returns(
        floats(0, 0, 1, 2), floats(0.5, 0.2, 0.4, 1.5), starts(3, 1), discount=0.5, decay=0.5
    )
    assert advantages.tolist() == pytest.approx([-0.3625, 0.15, 0.6, 0.5])
    assert returns.tolist() == pytest.approx([0.1375, 0.35, 1.0, 2.0])


def test_without_decay_only_the_next_step_counts() -> None:
    # deltas alone: 0.9 * 0.5 - 0.25 = 0.2; 1 - 0.5
    advantages, _ = advantages_and_returns(
        floats(0, 1), floats(0.25, 0.5), starts(2), discount=0.9, decay=0.0
    )
    assert advantages.tolist() == pytest.approx([0.2, 0.5])


def test_a_turns_reward_is_given_once_at_its_end() -> None:
    is_end = np.array([False, True, True, False, True])
    assert rewards_at_ends(floats(3, 3, 5, 7, 7), is_end).tolist() == [0, 3, 5, 0, 7]


def test_whitening_and_the_explained_share() -> None:
    # Mean 1, deviation 2.
    assert whiten(floats(3, -1), among=floats(3, -1)).tolist() == pytest.approx([1, -1], rel=1e-5)
    assert whiten(floats(3), among=floats(3, -1)).tolist() == pytest.approx([1], rel=1e-5)
    # Returns vary by 4 (0 and 4 around 2), what is missed by 1 (0 and 2 around 1).
    assert explained_frac(floats(0, 2), floats(0, 4)) == pytest.approx(1 - 1 / 4)
    assert explained_frac(floats(1, 2), floats(3, 3)) == 0.0


NUMBER = st.floats(-2, 2, width=32)
SEQUENCES = st.lists(st.lists(st.tuples(NUMBER, NUMBER), min_size=0, max_size=6), min_size=1, max_size=6)


@settings(deadline=None)
@given(SEQUENCES)
def test_with_full_trust_in_rewards_the_return_is_their_sum(drawn: list[list[tuple[float, float]]]) -> None:
    rewards, values = (floats(*(pair[k] for row in drawn for pair in row)) for k in (0, 1))
    cuts = starts(*(len(row) for row in drawn))
    advantages, returns = advantages_and_returns(rewards, values, cuts, discount=1.0, decay=1.0)
    np.testing.assert_allclose(returns, sums_to_end(rewards, cuts), atol=1e-5)
    np.testing.assert_allclose(advantages, returns - values, atol=1e-5)


@settings(deadline=None)
@given(SEQUENCES, st.floats(0.5, 1), st.floats(0, 1))
def test_sequences_do_not_see_each_other(
    drawn: list[list[tuple[float, float]]], discount: float, decay: float
) -> None:
    together, _ = advantages_and_returns(
        *(floats(*(pair[k] for row in drawn for pair in row)) for k in (0, 1)),
        starts(*(len(row) for row in drawn)),
        discount=discount,
        decay=decay,
    )
    alone = [
        advantages_and_returns(
            *(floats(*(pair[k] for pair in row)) for k in (0, 1)),
            starts(len(row)),
            discount=discount,
            decay=decay,
        )[0]
        for row in drawn
    ]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-6, atol=1e-6)


def test_the_value_loss_and_its_gradient() -> None:
    values = torch.tensor([1.0, 0.5, 0.1, 2.0], requires_grad=True)
    stale, returns = torch.tensor([0.0, 0.5, 0.0, 0.0]), torch.tensor([0.0, 1.5, 1.0, 2.0])
    loss = value_loss(values, stale, returns, clip=0.2)
    # 1 / 2 (the clipped 0.04 is smaller); 1 / 2; 0.81 / 2; clipped to 0.2 it still lacks 1.8: 3.24 / 2
    assert loss.tolist() == pytest.approx([0.5, 0.5, 0.405, 1.62])
    torch.autograd.backward(loss.sum())
    assert values.grad is not None
    # value - return where the plain error counts; none where the clipped one does
    assert values.grad.tolist() == pytest.approx([1.0, -1.0, -0.9, 0.0])
    plain = value_loss(values, stale, returns, clip=0.0)
    assert plain.tolist() == pytest.approx([0.5, 0.5, 0.405, 0.0])
