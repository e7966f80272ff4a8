"""The critic on a tiny random model: it learns returns, whatever the microbatches, and changes advantages."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from astraflow.errors import ConfigError, DataError
from astraflow.protocols import StepResult
from astraflow.recipe.recipe import PolicyConfig
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import AdvantageSpan, Sample
from drivers.trainer_builders import (
    VOCAB_SIZE,
    fit_critic,
    make_batch,
    make_sample,
    make_samples,
    save_model,
    values_of,
)

CRITIC = {"name": "value_model", "lr": 1e-2}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_config(critic: dict[str, Any] = CRITIC, **settings: Any) -> TrainConfig:
    given = {"lr": 1e-2, "auxiliary": {"critic": critic}, **settings}
    return TrainConfig.model_validate_json(msgspec.json.encode(given))


def make(model_dir: Path, **settings: Any) -> LossLearner:
    config = make_config(**settings)
    return LossLearner(config, TorchBackend(config, model_dir=model_dir, seed=3), seed=3)


def metric(result: StepResult, name: str) -> float:
    return next(m.value for m in result.metrics if m.name == name)


def test_it_starts_without_expectations_and_learns_the_returns(model_dir: Path) -> None:
    samples = [make_sample((2, 3, 4), (5, 6), advantage=2.0), make_sample((7, 8), (9,), advantage=-1.0)]
    backend = make(model_dir, lr=0.0, critic={**CRITIC, "clip": 0.0})
    results = [backend.train_step(make_batch(samples, step=step)) for step in range(40)]
    assert metric(results[0], "value_mean") == 0.0
    # Returns at first: 2 and 2 (decay 0.95 of it for the first token) and -1.
    first = (2.0**2 + (2 * 0.95) ** 2 + 1) / 3 / 2
    assert metric(results[0], "value_loss") == pytest.approx(first, rel=1e-5)
    assert metric(results[-1], "value_loss") < 0.1 * first
    assert metric(results[-1], "value_explained_frac") > 0.9


def test_microbatches_change_nothing(model_dir: Path) -> None:
    values: list[np.ndarray] = []
    samples = make_samples()
    columns = columns_from_samples(samples, vocab_size=VOCAB_SIZE)
    returns = np.linspace(-1, 1, len(columns.advantages), dtype=np.float32)
    for budget in (10_000, 16):
        # As large an epsilon as the gradient: AdamW's first step would else only see its signs.
        config = make_config(token_budget=budget, optimizer={"eps": 1.0, "max_grad_norm": 1e9})
        backend = TorchBackend(config, model_dir=model_dir)
        for _ in range(3):
            fit_critic(backend, config, columns, returns)
        values.append(values_of(backend, columns))
    assert np.abs(values[0]).max() > 1e-4
    np.testing.assert_allclose(values[0], values[1], rtol=1e-4, atol=1e-7)


def test_advantages_of_the_policy_come_from_the_critic(model_dir: Path) -> None:
    """With full trust in rewards, no expectations yet and no whitening, it is the reward that follows."""
    sample = make_sample((2, 3), (4, 5, 6, 7))
    turns = msgspec.structs.replace(sample, advantages=(AdvantageSpan(2, 4, 1.0), AdvantageSpan(4, 6, 0.5)))
    known = msgspec.structs.replace(sample, advantages=(AdvantageSpan(2, 4, 1.5), AdvantageSpan(4, 6, 0.5)))

    def weights(samples: list[Sample], **settings: Any) -> dict[str, bytes]:
        backend = make(model_dir, **settings)
        backend.train_step(make_batch(samples))
        return {t.name: t.data.tobytes() for t in backend.export()}

    by_critic = weights([turns], critic={**CRITIC, "decay": 1.0, "whiten": False})
    assert by_critic == weights([known], critic={"name": "none"})


def test_a_checkpoint_without_the_critic_is_refused(model_dir: Path, tmp_path: Path) -> None:
    make(model_dir, critic={"name": "none"}).save(tmp_path)()
    with pytest.raises(DataError, match=r"does not load.*critic"):
        make(model_dir).load(tmp_path)


def test_a_critic_of_another_vocabulary_is_refused(model_dir: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path, vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(
        ConfigError, match=r"train\.auxiliary\.critic\.model.*25 tokens, but the policy has 24"
    ):
        make(model_dir, critic={**CRITIC, "model": str(other)})


@pytest.mark.parametrize(
    "settings",
    [
        {"train": {"auxiliary": {"critic": {"name": "value_model"}}}},
        {"table": {"credit": {"name": "gae"}}},
        {
            "table": {"credit": {"name": "gae"}, "normalize": "whiten"},
            "train": {"auxiliary": {"critic": {"name": "value_model"}}},
        },
    ],
)
def test_a_recipe_has_both_parts_or_none(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="critic"):
        PolicyConfig.model_validate_json(msgspec.json.encode({"model": "m", **settings}))


def test_a_recipe_with_both_parts_is_accepted() -> None:
    both = {"table": {"credit": {"name": "gae"}}, "train": {"auxiliary": {"critic": {"name": "value_model"}}}}
    config = PolicyConfig.model_validate_json(msgspec.json.encode({"model": "m", **both}))
    assert config.train.auxiliary.critic.name == "value_model"
