"""Picking tokens from logits."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from astraflow.errors import RolloutError
from astraflow.rollout.engines.requests import check_sampling
from astraflow.rollout.engines.sampling import (
    Restriction,
    SamplingRows,
    pick_tokens,
    token_logprobs,
    uniforms,
)
from astraflow.types import Sampling

VOCAB = 8


def numbers_of(seed: int, count: int) -> NDArray[np.float64]:
    return uniforms(np.full(count, seed, np.uint64), np.arange(count))


def rows(count: int, *, seed: int = 0, **columns: object) -> SamplingRows:
    base: dict[str, object] = {"inverse_temperatures": None, "is_greedy": None, "restriction": None}
    numbers = torch.from_numpy(numbers_of(seed, count))
    return SamplingRows(uniforms=numbers, **{**base, **columns})  # type: ignore[arg-type]


def restriction(count: int, *, top_p: float = 1.0, top_k: int = VOCAB) -> Restriction:
    return Restriction(torch.full((count,), top_p, dtype=torch.float64), torch.full((count,), top_k))


def test_uniform_numbers_are_those_of_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # of seed 1234567
    expected = [(number >> 16) / 2**48 for number in published]
    assert numbers_of(1234567, 3).tolist() == expected


def test_uniform_numbers_depend_on_seed_and_place_alone() -> None:
    together = uniforms(np.array([7, 8, 7], np.uint64), np.array([0, 0, 5]))
    assert together.tolist() == [numbers_of(7, 1)[0], numbers_of(8, 1)[0], numbers_of(7, 6)[5]]
    assert len(set(together)) == 3


@pytest.mark.parametrize("by", ["place", "seed"])
def test_uniform_numbers_are_uniform_over_places_and_over_neighbouring_seeds(by: str) -> None:
    count = 10_000
    numbers = (
        numbers_of(0, count)
        if by == "place"
        else uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64))
    )
    assert numbers.min() >= 0
    assert numbers.max() < 1
    observed = np.bincount((numbers * 8).astype(np.int64), minlength=8)
    assert ((observed - count / 8) ** 2 / (count / 8)).sum() < 24.3  # 0.999 quantile, 7 degrees of freedom
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.04


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    count = 20_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.5, -2.0, 0.25])
    inverse = torch.full((count,), 1 / temperature)
    picked, logprobs = pick_tokens(logits.expand(count, -1), rows(count, inverse_temperatures=inverse))
    expected = torch.softmax(logits / temperature, -1)
    observed = torch.bincount(picked, minlength=VOCAB)
    chi_square = float(((observed - count * expected) ** 2 / (count * expected)).sum())
    assert chi_square < 24.3  # 0.999 quantile, 7 degrees of freedom
    assert torch.allclose(logprobs, expected.log()[picked], atol=1e-6)


def test_a_greedy_row_takes_the_likeliest_token_and_reports_its_logprob_at_temperature_1() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    greedy = torch.tensor([True, True])
    picked, logprobs = pick_tokens(logits, rows(2, is_greedy=greedy))
    assert picked.tolist() == [1, 0]
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1).amax(-1))


def test_top_k_keeps_the_k_likeliest_tokens() -> None:
    logits = torch.tensor([0.0, 5.0, 4.9, 1.0, 4.8, 0.5, 0.2, 0.1]).expand(500, -1)
    picked, _ = pick_tokens(logits, rows(500, restriction=restriction(500, top_k=3)))
    assert set(picked.tolist()) == {1, 2, 4}


def test_top_p_keeps_the_fewest_tokens_that_reach_the_share() -> None:
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.02, 0.01, 0.01, 0.01])
    for top_p, kept in ((0.39, {0}), (0.41, {0, 1}), (0.7001, {0, 1, 2})):
        picked, _ = pick_tokens(
            probs.log().expand(500, -1), rows(500, restriction=restriction(500, top_p=top_p))
        )
        assert set(picked.tolist()) == kept


def test_top_p_counts_the_share_among_the_top_k() -> None:
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.02, 0.01, 0.01, 0.01])
    limits = restriction(500, top_p=0.55, top_k=2)
    picked, _ = pick_tokens(probs.log().expand(500, -1), rows(500, restriction=limits))
    assert set(picked.tolist()) == {0}  # 0.4 of the 0.7 that top_k leaves is 0.57


@pytest.mark.parametrize("vocab", [64, 1000, 2048])
def test_a_large_vocabulary_is_searched_as_if_it_were_accumulated_token_by_token(vocab: int) -> None:
    logits = 3 * torch.randn(2_000, vocab, generator=torch.Generator().manual_seed(0))
    columns = rows(2_000)
    picked, _ = pick_tokens(logits, columns)
    cumulative = torch.softmax(logits, -1, dtype=torch.float64).cumsum(-1)
    expected = torch.searchsorted(cumulative, columns.uniforms[:, None])[:, 0]
    assert (picked == expected).float().mean() > 0.999  # float32 moves the border between two tokens


def test_tokens_that_may_not_be_picked_are_not_picked_at_the_end_of_a_block() -> None:
    logits = torch.zeros(1, 512)
    almost_one = torch.tensor([1 - 2.0**-48], dtype=torch.float64)
    limits = Restriction(torch.ones(1, dtype=torch.float64), torch.tensor([300]))
    picked, _ = pick_tokens(logits, SamplingRows(almost_one, None, None, limits))
    assert picked.tolist() == [299]


def test_tokens_that_may_not_be_picked_are_not_picked_at_the_start_of_a_block() -> None:
    is_allowed = torch.arange(2048) % 256 >= 10
    logits = torch.randn(1, 2048, generator=torch.Generator().manual_seed(0)) + 40 * is_allowed
    probs = torch.softmax(logits[0, is_allowed].double(), -1)
    ends = probs.cumsum(-1)[245:-1:246]  # of the blocks
    near = torch.linspace(-1e-6, 1e-6, 2001, dtype=torch.float64)  # where rounding decides on the block
    borders = (ends[:, None] + near).flatten()
    limits = Restriction(torch.ones(1, dtype=torch.float64), is_allowed.sum()[None])
    picked, _ = pick_tokens(logits.expand(len(borders), -1), SamplingRows(borders, None, None, limits))
    assert is_allowed[picked].all()


def test_restricted_rows_report_logprobs_over_the_full_vocabulary() -> None:
    logits = torch.randn(50, VOCAB)
    picked, logprobs = pick_tokens(logits, rows(50, restriction=restriction(50, top_k=2)))
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1).gather(1, picked[:, None])[:, 0])


def test_a_row_picks_the_same_token_whatever_its_neighbours_need() -> None:
    logits = torch.randn(64, VOCAB)
    alone, _ = pick_tokens(logits, rows(64))
    limits = restriction(64)
    limits.top_k[::2] = 1
    beside, _ = pick_tokens(
        logits,
        rows(64, restriction=limits, inverse_temperatures=torch.ones(64), is_greedy=torch.zeros(64).bool()),
    )
    assert beside[1::2].tolist() == alone[1::2].tolist()


def test_token_logprobs_are_those_of_the_targets() -> None:
    logits, targets = torch.randn(5, VOCAB), torch.tensor([0, 3, 7, 1, 1])
    expected = torch.log_softmax(logits, -1)[np.arange(5), targets]
    assert torch.equal(token_logprobs(logits, targets), expected)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(temperature=-0.1), "temperature = -0.1"),
        (Sampling(temperature=float("nan")), "temperature = nan"),
        (Sampling(top_p=0.0), "top_p = 0.0"),
        (Sampling(top_p=1.5), "top_p = 1.5"),
        (Sampling(top_k=-1), "top_k = -1"),
        (Sampling(max_tokens=0), "max_tokens = 0"),
        (Sampling(stop=("x", "")), "stop holds an empty text"),
        (Sampling(stop=("x" * 257,)), "stop holds a text of 257 characters; expected at most 256"),
        (Sampling(stop=("x",) * 65), "stop holds 65 texts; expected at most 64"),
    ],
)
def test_settings_out_of_range_are_named_and_not_retried(sampling: Sampling, message: str) -> None:
    with pytest.raises(RolloutError, match=message) as caught:
        check_sampling(sampling)
    assert not caught.value.is_retryable
