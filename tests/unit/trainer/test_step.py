"""Arithmetic of a step."""

import math

import pytest
import torch

from astraflow.errors import ConfigError
from astraflow.trainer.config import OptimizerConfig, TrainConfig
from astraflow.trainer.step import (
    TokenSums,
    combine_sums,
    denominator,
    entropies,
    learning_rate,
    shuffle_seed,
    token_logprobs,
)


def rates(config: OptimizerConfig, num_updates: int) -> list[float]:
    return [learning_rate(config, 1.0, update=u, num_updates=num_updates) for u in range(num_updates)]


def test_a_constant_schedule_warms_up_in_even_steps() -> None:
    assert rates(OptimizerConfig(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_linear_schedule_falls_towards_zero() -> None:
    assert rates(OptimizerConfig(schedule="linear"), 4) == [1.0, 0.75, 0.5, 0.25]


def test_a_cosine_schedule_ends_near_a_tenth() -> None:
    found = rates(OptimizerConfig(schedule="cosine", warmup_steps=2), 102)
    assert found[0] == 0.5
    assert found[2] == pytest.approx(1.0)
    assert found[52] == pytest.approx(0.55)
    assert found[-1] == pytest.approx(0.1, abs=1e-3)
    past_the_end = learning_rate(OptimizerConfig(schedule="cosine"), 1.0, update=500, num_updates=100)
    assert past_the_end == pytest.approx(0.1)


@pytest.mark.parametrize(("name", "expected"), [("tokens", 12.0), ("sequences", 3.0), ("fixed", 7.5)])
def test_the_denominator_is_the_one_that_the_recipe_names(name: str, expected: float) -> None:
    config = TrainConfig.model_validate({"denominator": name, "fixed_denominator": 7.5})
    assert denominator(config, num_tokens=12, num_samples=3) == expected


@pytest.mark.parametrize("name", ["episodes", "episode_means"])
def test_episodes_are_counted_whatever_they_forked_into(name: str) -> None:
    config = TrainConfig.model_validate({"denominator": name})
    assert denominator(config, num_tokens=12, num_samples=3, num_episodes=2.0) == 2.0


def test_steps_and_seeds_give_different_shuffles() -> None:
    assert len({shuffle_seed(seed, step) for seed in range(10) for step in range(100)}) == 1000


def test_logprobs_and_entropies_of_a_known_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [1.0, 1.0, 1.0]]))
    assert token_logprobs(logits, torch.tensor([0, 2])).exp().tolist() == pytest.approx([0.5, 1 / 3])
    assert entropies(logits).tolist() == pytest.approx([1.5 * math.log(2), math.log(3)])


def test_means_are_over_all_tokens_whatever_the_parts() -> None:
    sums = TokenSums()
    sums.add({"clip_frac": torch.tensor([True, False, True])})
    sums.add({"clip_frac": torch.tensor([False])})
    sums.add_max("largest", torch.tensor([1.0, 3.0]))
    sums.add_max("largest", torch.tensor([2.0]))
    assert combine_sums([sums.plain()]) == {"clip_frac": 0.5, "largest": 3.0}


def test_means_are_over_the_tokens_of_all_ranks_even_of_one_without_any() -> None:
    ranks = [TokenSums(), TokenSums(), TokenSums()]
    ranks[0].add({"clip_frac": torch.tensor([True, False, True])})
    ranks[0].add_max("largest", torch.tensor([-1.0]))
    ranks[2].add({"clip_frac": torch.tensor([False])})
    ranks[2].add_max("largest", torch.tensor([-2.0]))
    assert combine_sums([sums.plain() for sums in ranks]) == {"clip_frac": 0.5, "largest": -1.0}


def test_a_metric_that_is_no_column_is_refused() -> None:
    with pytest.raises(ConfigError, match="mine"):
        TokenSums().add({"entropy": torch.zeros(3), "mine": torch.tensor(1.0)})
