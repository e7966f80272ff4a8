"""The trainer leaves out what a rule set to zero, and gives a loss what it declares."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from astraflow.errors import ConfigError
from astraflow.losses.factory import LOSSES
from astraflow.losses.policy import LossInputs, LossOutput, require_column, with_traits
from astraflow.protocols import StepResult
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import Sample
from drivers.trainer_builders import make_batch, make_sample, make_samples, save_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def step(model_dir: Path, samples: list[Sample], **settings: Any) -> tuple[StepResult, dict[str, bytes]]:
    """One step's result, and the weights after it."""
    given = {"lr": 1e-2, "steps": 10, **settings}
    config = TrainConfig.model_validate_json(msgspec.json.encode(given))
    learner = LossLearner(config, TorchBackend(config, model_dir=model_dir, seed=3), seed=3)
    result = learner.train_step(make_batch(samples, trainer_version=1))
    return result, {tensor.name: tensor.data.tobytes() for tensor in learner.export()}


def values(result: StepResult) -> dict[str, float]:
    return {item.name: item.value for item in result.metrics if not item.name.endswith("_s")}


def zeroed(by: str, *, group_id: int = 9, **settings: Any) -> Sample:
    """A long sample that would change every mean."""
    sample = make_sample([2, 3], [7] * 30, group_id=group_id, advantage=0.0, **settings)
    return msgspec.structs.replace(sample, zeroed_by=by)


OTHER_TERMS: dict[str, dict[str, Any]] = {
    "KL in the loss": {"auxiliary": {"kl": {"coef": 0.1}}},
    "KL in the reward": {"auxiliary": {"kl": {"coef": 0.1, "place": "reward"}}},
    "entropy bonus": {"auxiliary": {"entropy_coef": 0.1}},
    "critic": {"auxiliary": {"critic": {"name": "value_model", "lr": 1e-2}}},
    "episode means": {"denominator": "episode_means"},
}


def cases(model_dir: Path) -> dict[str, dict[str, Any]]:
    teacher = {"auxiliary": {"teacher": str(model_dir)}}
    losses = {name: {"loss": {"name": name}, **(teacher if name == "distill" else {})} for name in LOSSES}
    return {**losses, **OTHER_TERMS}


@pytest.mark.parametrize("case", [*LOSSES, *OTHER_TERMS])
def test_a_masked_sample_changes_no_weight_and_no_metric(model_dir: Path, case: str) -> None:
    settings = {"minibatches": 2, **cases(model_dir)[case]}
    samples = make_samples(seed=1)
    alone, expected = step(model_dir, samples, **settings)
    with_masked, found = step(model_dir, [*samples, zeroed("filter"), zeroed("filter")], **settings)
    assert found == expected
    assert values(with_masked) == {**values(alone), "untrained_frac": pytest.approx(2 / 18)}


@pytest.mark.parametrize(("loss", "is_trained"), [("grpo", False), ("m2po", False), ("sft", True)])
def test_a_sample_without_a_counterpart_is_trained_only_by_losses_without_advantages(
    model_dir: Path, loss: str, is_trained: bool
) -> None:
    samples = make_samples(seed=1)
    settings = {"loss": {"name": loss}, "auxiliary": {"entropy_coef": 0.1}}
    _, expected = step(model_dir, samples, **settings)
    _, found = step(model_dir, [*samples, zeroed("credit")], **settings)
    assert (found != expected) == is_trained


def test_a_batch_of_nothing_but_zeroed_samples_changes_nothing(model_dir: Path) -> None:
    samples = [zeroed("credit", group_id=idx) for idx in range(4)]
    result, found = step(model_dir, samples, minibatches=2, auxiliary={"entropy_coef": 0.1})
    metrics = values(result)
    assert (metrics["grad_norm"], metrics["untrained_frac"], metrics["num_gradient_tokens"]) == (0, 1, 0)
    _, before = step(model_dir, samples, lr=0.0)
    assert found == before


@with_traits(needs_entropies=True)
def with_bonus(inputs: LossInputs, *, coef: float) -> LossOutput:
    """Policy gradient with an entropy bonus of its own."""
    bonus = coef * require_column(inputs.entropies, "entropies")
    return LossOutput(per_token=-inputs.advantages * inputs.logprobs - bonus)


def undeclared_bonus(inputs: LossInputs) -> LossOutput:
    return LossOutput(per_token=-inputs.advantages * inputs.logprobs - 0.1 * inputs.entropies)


@with_traits(needs_proximal=False)
def undeclared_ratio(inputs: LossInputs) -> LossOutput:
    return LossOutput(per_token=-torch.exp(inputs.logprobs - inputs.proximal_logprobs))


def own_reference(inputs: LossInputs) -> LossOutput:
    gap = inputs.logprobs - inputs.reference_logprobs
    return LossOutput(per_token=gap.square())


class Everything:
    """A loss whose statistics read all that a statistics function can get."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(per_token=-inputs.advantages * inputs.logprobs * inputs.statistics["scale"])

    def statistics(self, inputs: LossInputs) -> Mapping[str, Tensor]:
        columns = [inputs.proximal_logprobs, inputs.staleness, inputs.reference_logprobs]
        return {"scale": 1 + sum(column.mean().abs() for column in columns)}


everything = Everything()


def own(name: str, **args: Any) -> dict[str, Any]:
    return {"name": "use", "use": f"{__name__}:{name}", "args": args}


def test_an_entropy_bonus_of_an_own_loss_moves_the_weights_as_the_built_in_one(model_dir: Path) -> None:
    samples = make_samples(seed=1)
    _, without = step(model_dir, samples, loss=own("with_bonus", coef=0.0))
    _, found = step(model_dir, samples, loss=own("with_bonus", coef=0.1))
    _, built_in = step(model_dir, samples, loss={"name": "reinforce"}, auxiliary={"entropy_coef": 0.1})
    assert found == built_in != without


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("undeclared_bonus", r"entropies \(declare `with_traits\(needs_entropies=True\)`\)"),
        ("undeclared_ratio", r"proximal_logprobs \(declare `with_traits\(needs_proximal=True\)`\)"),
        ("own_reference", r"reference_logprobs \(.*train\.auxiliary\.reference\)"),
    ],
)
def test_a_column_that_an_own_loss_reads_without_getting_it_is_an_error_that_says_how(
    model_dir: Path, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        step(model_dir, make_samples(seed=1), loss=own(name))


def test_a_named_reference_is_there_without_a_penalty(model_dir: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=5)
    result, _ = step(
        model_dir, make_samples(seed=1), loss=own("own_reference"), auxiliary={"reference": str(other)}
    )
    assert values(result)["reference_kl"] > 0
    assert values(result)["grad_norm"] > 0


@pytest.mark.parametrize("token_budget", [4000, 20])
def test_statistics_of_an_own_loss_read_every_column_in_any_cut(model_dir: Path, token_budget: int) -> None:
    result, _ = step(
        model_dir, make_samples(seed=1), loss=own("everything"), minibatches=2, token_budget=token_budget,
        auxiliary={"reference": str(model_dir)},
    )  # fmt: skip
    assert values(result)["statistics/scale"] > 2


def test_an_infinite_bound_is_counted(model_dir: Path) -> None:
    wide, _ = step(model_dir, make_samples(seed=1), loss={"name": "m2po", "budget": 1e6}, minibatches=2)
    tight, _ = step(model_dir, make_samples(seed=1), loss={"name": "m2po", "budget": 1e-3}, minibatches=2)
    assert values(wide)["unbounded_frac"] == 1
    assert "statistics/tau" not in values(wide)
    assert values(tight)["unbounded_frac"] == 0
    assert values(tight)["statistics/tau"] < 1
