"""The trainer without a model: it changes what it should, and goes on from a checkpoint."""

from pathlib import Path

import numpy as np
import pytest

from astraflow.errors import ConfigError, DataError, TrainingError, WireError
from astraflow.losses.config import AuxiliaryConfig
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.config import TrainConfig
from astraflow_paced.backend import PacedBackend
from astraflow_paced.config import PacedBackendConfig
from drivers.trainer_builders import make_batch, make_sample, make_samples


def backend_of(**changes: float) -> PacedBackend:
    fields = {"step_s": 1.0, "million_tokens_s": 2.0, "weights_bytes": 2000, "time_scale": 1e6}
    config = PacedBackendConfig(**{**fields, **changes})  # pyright: ignore[reportArgumentType]
    backend = make_learner(TrainConfig(backend=config), model_dir="nothing is read", seed=5)
    assert isinstance(backend, PacedBackend)
    return backend


def weights_of(backend: PacedBackend) -> np.ndarray:
    (tensor,) = backend.export()
    assert (tensor.dtype, tensor.shape, tensor.data.dtype) == ("bfloat16", (1000,), np.uint8)
    return tensor.data.view("<u2")


def test_a_step_changes_the_share_that_the_recipe_says() -> None:
    backend = backend_of(changed_frac=0.03)
    before = weights_of(backend)
    backend.train_step(make_batch(make_samples()))
    assert int((weights_of(backend) != before).sum()) == 30
    assert np.array_equal(weights_of(backend) & 0xFFFE, before)


def test_a_step_takes_its_time_and_its_tokens_time() -> None:
    samples = make_samples()
    num_tokens = sum(len(sample.trajectory.mask) for sample in samples)
    result = backend_of().train_step(make_batch(samples))
    values = {item.name: item.value for item in result.metrics}
    assert values["emulated_s"] == pytest.approx(1.0 + 2.0 * num_tokens / 1e6)
    assert values["num_tokens"] == num_tokens
    assert values["token_staleness"] == 0.0


def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    backend, restored = backend_of(), backend_of()
    for step in range(2):
        backend.train_step(make_batch(make_samples(step), step=step))
    backend.save(tmp_path)
    restored.load(tmp_path)
    for one in (backend, restored):
        one.train_step(make_batch(make_samples(), step=2))
    assert np.array_equal(weights_of(backend), weights_of(restored))


def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    backend = backend_of()
    with pytest.raises(TrainingError, match="batch of step 2 given, step 1 is due"):
        backend.train_step(make_batch(make_samples(), step=1))
    with pytest.raises(WireError, match="finite"):
        backend.train_step(make_batch([make_sample(behavior=(-1.0, float("nan")))]))
    with pytest.raises(DataError, match="does not load"):
        backend.load(tmp_path)
    backend_of(weights_bytes=4000).save(tmp_path)
    with pytest.raises(DataError, match=r"expected train.backend.weights_bytes = 2000"):
        backend.load(tmp_path)
    with pytest.raises(ConfigError, match="needs models that score"):
        PacedBackend(
            TrainConfig(backend=PacedBackendConfig(), auxiliary=AuxiliaryConfig(teacher="models/teacher"))
        )
