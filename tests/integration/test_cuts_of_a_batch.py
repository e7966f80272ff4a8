"""A step computes the same however its batch is cut into microbatches and ranks: the seam between a loss, its
statistics, and the trainer that runs both over parts of a minibatch."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from astraflow import wire
from astraflow.losses.factory import LOSSES
from astraflow.types import Sample
from drivers.rank_pool import RankPool
from drivers.rank_runs import OF_COMPUTED, CutStep, train_in_cuts
from drivers.trainer_builders import logprobs_alone, make_samples, make_tiny_model, save_model

BUDGETS = {1: (4000, 150, 20), 2: (4000, 80, 20), 4: (4000, 40, 20)}
"""Tokens per microbatch, by the number of minibatches. They cut each minibatch into one, a few, and many."""
BOUNDED = {"m2po", "m2po_released", "m2po_prototype", "m2po_mask", "m2po_mask_proximal"}
BUDGET = 0.01
"""The mean squared distance of the tests' tokens from the current policy is 0.09."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher"), seed=1)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Sampled by a policy near the current one, so that the bounds of losses cut some tokens and not all."""
    rng = np.random.default_rng(5)
    model = make_tiny_model()
    return [
        with_behavior(sample, (now := logprobs_alone(model, sample).numpy()) + rng.normal(0, 0.3, len(now)))
        for sample in make_samples(seed=5, num_groups=8)
    ] + [masked(sample) for sample in make_samples(seed=6, num_groups=2)]


def masked(sample: Sample) -> Sample:
    """A sample that a filter left out."""
    (span,) = sample.advantages
    zero = (msgspec.structs.replace(span, value=0.0),)
    return msgspec.structs.replace(
        sample, group_id=100 + sample.group_id, advantages=zero, zeroed_by="filter"
    )


def with_behavior(sample: Sample, logprobs: np.ndarray) -> Sample:
    whole = np.zeros(len(sample.trajectory.mask), dtype=np.float32)
    whole[len(whole) - len(logprobs) :] = np.minimum(logprobs, 0)
    trajectory = msgspec.structs.replace(
        sample.trajectory, behavior_logprobs=wire.column(whole.tolist(), "float32")
    )
    return msgspec.structs.replace(sample, trajectory=trajectory)


@pytest.mark.parametrize("num", [1, pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_computes_the_same_in_any_cut(
    pool: RankPool, model_dir: Path, teacher_dir: Path, samples: list[Sample], loss: str, num: int
) -> None:
    teacher = {"auxiliary": {"teacher": str(teacher_dir)}} if loss == "distill" else {}
    given = {"loss": {"name": loss, **({"budget": BUDGET} if loss in BOUNDED else {})}, **teacher}
    cases = [{**given, "minibatches": num, "token_budget": budget} for budget in BUDGETS[num]]
    ((whole, halves, many),) = pool.run(1, train_in_cuts, model_dir, cases, samples)
    both = pool.run(2, train_in_cuts, model_dir, [cases[0], cases[2]], samples)
    assert whole.num_parts == [1] * num
    assert min(halves.num_parts) >= 2
    assert min(many.num_parts) > max(halves.num_parts)
    for found in (halves, many, *(step for rank in both for step in rank)):
        assert_same_step(found, whole)
    if loss in BOUNDED:
        for step in (whole, halves, many):
            assert 0 < step.metrics.get("masked_frac", step.metrics["clip_frac"]) < 1
            assert step.metrics["unbounded_frac"] == 0


def assert_same_step(found: CutStep, expected: CutStep) -> None:
    assert len(found.gradients) == len(expected.gradients)
    for mine, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert np.abs(theirs).max() > 1e-3
        assert np.abs(mine - theirs).max() < 1e-5 * np.abs(theirs).max()
    assert len(found.statistics) == len(expected.statistics)
    for own, other in zip(found.statistics, expected.statistics, strict=True):
        assert own == pytest.approx(other, rel=1e-5, abs=1e-5)
    assert found.metrics.keys() == expected.metrics.keys()
    for name in found.metrics.keys() - OF_COMPUTED:
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5, abs=1e-6), name
