"""How much each episode, sequence and token weighs in the gradient of a step, and how large a step may be."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow import wire
from astraflow.trainer.columns import columns_from_samples, reward_mean
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import AdvantageSpan, Sample, VersionSpan
from drivers.trainer_builders import (
    VOCAB_SIZE,
    first_moments,
    fit_critic,
    make_batch,
    make_sample,
    make_samples,
    save_model,
    values_of,
)

FIRST_DECAY = 0.9


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make(model_dir: Path, **fields: Any) -> LossLearner:
    config = TrainConfig.model_validate_json(msgspec.json.encode({"lr": 1e-2, "steps": 10, **fields}))
    return LossLearner(config, TorchBackend(config, model_dir=model_dir, seed=3), seed=3)


def gradient(model_dir: Path, samples: list[Sample], *, max_grad_norm: float = 1e9, **fields: Any) -> Any:
    """The gradient that the optimizer got in the first step: AdamW's first moment over 1 - its decay."""
    backend = make(model_dir, optimizer={"max_grad_norm": max_grad_norm}, **fields)
    backend.train_step(make_batch(samples))
    folder = model_dir / "moments"
    folder.mkdir(exist_ok=True)
    backend.save(folder)()
    return first_moments(folder) / (1 - FIRST_DECAY)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def forked(sample: Sample, *cuts: int) -> list[Sample]:
    """The sample as trajectories of one episode: each trains the sampled tokens between two cuts, and has
    all that came before as context."""
    trajectory = sample.trajectory
    mask = wire.array(trajectory.mask, "uint8")
    trained = np.flatnonzero(mask)
    ends = [0, *cuts, len(trained)]
    forks: list[Sample] = []
    for first, last in pairwise(ends):
        own, end = trained[first:last], int(trained[last - 1]) + 1
        only = np.zeros(end, dtype=np.uint8)
        only[own] = 1
        logprobs = np.where(only, wire.array(trajectory.behavior_logprobs, "float32")[:end], 0.0)
        fork = msgspec.structs.replace(
            trajectory,
            token_ids=trajectory.token_ids[: 4 * end],
            mask=wire.column(only, "uint8"),
            behavior_logprobs=wire.column(logprobs, "float32"),
            versions=(VersionSpan(int(own[0]), len(own), 0),),
            is_fork=first > 0,
        )
        (span,) = sample.advantages
        advantages = (AdvantageSpan(span.start, end, span.value),)
        forks.append(msgspec.structs.replace(sample, trajectory=fork, advantages=advantages))
    return forks


def three_episodes() -> list[Sample]:
    return [
        make_sample([2, 3], [4, 5, 6, 7, 8, 9], advantage=1.5),
        make_sample([2, 3], [9, 5], advantage=-0.5, episode_idx=1),
        make_sample([2, 3], [7, 7, 6], advantage=-1.0, episode_idx=2),
    ]


@pytest.mark.parametrize("denominator", ["tokens", "episodes", "episode_means", "fixed"])
@settings(deadline=None, max_examples=5)
@given(st.sets(st.integers(1, 5)), st.integers(1, 64))
def test_forks_change_no_gradient(
    model_dir: Path, denominator: str, cuts: set[int], token_budget: int
) -> None:
    whole = three_episodes()
    split = [*forked(whole[0], *sorted(cuts)), *whole[1:]]
    loss = {"name": "grpo"}
    expected = gradient(model_dir, whole, loss=loss, denominator=denominator)
    found = gradient(model_dir, split, loss=loss, denominator=denominator, token_budget=token_budget)
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("denominator", ["sequences", "sequence_means"])
def test_denominators_over_sequences_promise_no_such_thing(model_dir: Path, denominator: str) -> None:
    whole = three_episodes()
    split = [*forked(whole[0], 2, 4), *whole[1:]]
    expected = gradient(model_dir, whole, denominator=denominator)
    assert distance(gradient(model_dir, split, denominator=denominator), expected) > 0.01


@pytest.mark.parametrize(("means", "sums"), [("episode_means", "sequence_means"), ("episodes", "sequences")])
def test_where_nothing_forks_episodes_are_sequences(model_dir: Path, means: str, sums: str) -> None:
    samples = make_samples(seed=1)
    expected = gradient(model_dir, samples, denominator=sums)
    assert distance(gradient(model_dir, samples, denominator=means), expected) < 1e-6


def test_the_episodes_of_minibatches_add_up_wherever_they_are_cut() -> None:
    whole = make_sample([2, 3], [4, 5, 6, 7], group_id=1)
    verifier = msgspec.structs.replace(whole.trajectory, role="verifier")
    samples = [*forked(whole, 1, 2), msgspec.structs.replace(whole, trajectory=verifier), make_sample()]
    columns = columns_from_samples(samples, vocab_size=VOCAB_SIZE)
    assert columns.episode_tokens.tolist() == [4, 4, 4, 4, 2]
    # Three forks of one episode, another role of the same one, and another group's.
    assert columns.num_episodes(np.arange(5)) == 3.0
    parts = [columns.num_episodes(np.array(part)) for part in ([0], [1, 3], [2, 4])]
    assert parts == [0.25, 1.25, 1.5]


def test_the_mean_reward_of_a_batch_is_over_episodes() -> None:
    right = make_sample([2, 3], [4, 5, 6, 7])
    right = msgspec.structs.replace(right, trajectory=msgspec.structs.replace(right.trajectory, reward=1.0))
    wrong = [make_sample(episode_idx=idx) for idx in (1, 2, 3)]
    assert reward_mean([*forked(right, 1, 2, 3), *wrong]) == 0.25
    assert reward_mean([]) == 0.0


def test_the_gradient_is_scaled_down_to_its_largest_norm(model_dir: Path) -> None:
    samples = make_samples(seed=1)
    free = gradient(model_dir, samples)
    norm = float(free.norm())
    clipped = gradient(model_dir, samples, max_grad_norm=norm / 4)
    assert distance(clipped, free / 4) < 1e-4
    within = gradient(model_dir, samples, max_grad_norm=norm * 4)
    assert distance(within, free) < 1e-6


def test_the_critics_gradient_is_scaled_down_too(model_dir: Path) -> None:
    samples = make_samples(seed=1)
    columns = columns_from_samples(samples, vocab_size=VOCAB_SIZE)
    returns = np.full(len(columns.advantages), 100.0, dtype=np.float32)
    moved: list[float] = []
    for max_grad_norm in (1e9, 1e-3):
        # With an epsilon as large as this, the first step is in proportion to the gradient.
        fields = {
            "auxiliary": {"critic": {"name": "value_model", "lr": 1e-2, "clip": 0.0}},
            "optimizer": {"eps": 1e6, "max_grad_norm": max_grad_norm},
        }
        config = TrainConfig.model_validate_json(msgspec.json.encode(fields))
        backend = TorchBackend(config, model_dir=model_dir)
        before = values_of(backend, columns)
        fit_critic(backend, config, columns, returns)
        moved.append(float(np.abs(values_of(backend, columns) - before).max()))
    assert moved[1] < moved[0] / 1000
