"""Every loss, correction, penalty and denominator goes on bit for bit from a checkpoint in mid-run.

Cases come from the configs, so that a new one is covered.
"""

from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from astraflow.config import Use
from astraflow.losses.config import CorrectionConfig, KlConfig, LossConfig
from astraflow.losses.variant import LossVariant
from astraflow.protocols import StepResult
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import Batch, Stream
from drivers.trainer_builders import make_batch, make_samples, save_model

NUM_STEPS = 3
SAVED = 2
"""The step after which a checkpoint is saved."""


def variants(union: Any) -> list[str]:
    members = [each for each in get_args(get_args(union)[0]) if not issubclass(each, Use | LossVariant)]
    return [member.model_fields["name"].default for member in members]


def choices(config: Any, field: str) -> tuple[str, ...]:
    return get_args(config.model_fields[field].annotation)


WIDE: dict[str, dict[str, Any]] = {
    "geometric": {"min_weight": 0.0, "max_weight": 1e9},
    "divergence": {"max_divergence": 1e9},
}
"""Random logprobs are far from the model's: with their defaults these would reject every sequence."""

CASES: dict[str, dict[str, Any]] = {
    **{f"loss/{name}": {"loss": {"name": name}} for name in variants(LossConfig)},
    **{
        f"correction/{name}": {"auxiliary": {"correction": {"name": name, **WIDE.get(name, {})}}}
        for name in variants(CorrectionConfig)
    },
    **{
        f"kl/{estimator}/{place}": {
            "auxiliary": {"kl": {"coef": 0.1, "estimator": estimator, "place": place}}
        }
        for estimator in choices(KlConfig, "estimator")
        for place in choices(KlConfig, "place")
        if (estimator, place) != ("k1", "loss")  # refused: only noise
    },
    **{f"denominator/{name}": {"denominator": name} for name in choices(TrainConfig, "denominator")},
    "critic": {"auxiliary": {"critic": {"name": "value_model", "lr": 1e-2}}},
    "critic/kl": {
        "auxiliary": {
            "critic": {"name": "value_model", "lr": 1e-2},
            "kl": {"coef": 0.1, "place": "reward"},
        },
    },
    "entropy": {"auxiliary": {"entropy_coef": 0.01}},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def stale_batch(step: int) -> Batch:
    """Samples up to two versions old, with a teacher's logprobs."""
    rng = np.random.default_rng(step)
    samples = []
    for sample in make_samples(seed=step, num_groups=3, group_size=2, version=max(0, step - 2)):
        teacher = rng.normal(-2, 0.3, len(sample.trajectory.mask)).astype("<f4").tobytes()
        trajectory = msgspec.structs.replace(
            sample.trajectory, streams=(Stream(name="teacher_logprobs", dtype="float32", data=teacher),)
        )
        samples.append(msgspec.structs.replace(sample, trajectory=trajectory))
    return make_batch(samples, step=step)


def numbers(result: StepResult) -> dict[str, float]:
    """All metrics but the times."""
    return {m.name: m.value for m in result.metrics if not m.name.endswith("_s")}


def weights(backend: LossLearner) -> dict[str, bytes]:
    return {tensor.name: tensor.data.tobytes() for tensor in backend.export()}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_resume_changes_neither_metrics_nor_weights(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    common = {"lr": 1e-2, "steps": NUM_STEPS, "minibatches": 2}
    config = TrainConfig.model_validate_json(msgspec.json.encode({**common, **settings}))
    batches = [stale_batch(step) for step in range(NUM_STEPS)]
    straight = LossLearner(config, TorchBackend(config, model_dir=model_dir, seed=3), seed=3)
    at_start = weights(straight)
    for batch in batches[:SAVED]:
        straight.train_step(batch)
    straight.save(tmp_path)()
    expected = [numbers(straight.train_step(batch)) for batch in batches[SAVED:]]
    assert weights(straight) != at_start
    resumed = LossLearner(config, TorchBackend(config, model_dir=model_dir, seed=3), seed=3)
    resumed.load(tmp_path)
    assert [numbers(resumed.train_step(batch)) for batch in batches[SAVED:]] == expected
    assert weights(resumed) == weights(straight)
