"""Loop and torch backend together: a killed trainer ends with the same bits, and the model learns."""

from pathlib import Path

import pytest

from astraflow.models.loading import load_causal_lm
from astraflow.trainer.checkpoint import CheckpointStore
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from drivers.trainer_builders import logprobs_alone, make_sample, save_model
from drivers.trainer_fakes import MemoryPublisher, MemoryTrainerLink, train_until

CONFIG = TrainConfig(lr=1e-2, steps=6, minibatches=1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


async def train(
    folder: Path, model_dir: Path, dataflow: MemoryTrainerLink, *, stop_at: int | None = None
) -> MemoryPublisher:
    """A trainer from its latest checkpoint on; with `stop_at`, only until that version is published."""
    learner = LossLearner(CONFIG, TorchBackend(CONFIG, model_dir=model_dir))
    files = {"config.json": model_dir / "config.json"}
    return await train_until(learner, folder, dataflow, files=files, stop_at=stop_at)


async def test_a_killed_and_resumed_run_ends_with_the_same_bits(tmp_path: Path, model_dir: Path) -> None:
    straight = await train(tmp_path / "straight", model_dir, MemoryTrainerLink(num_steps=6))
    dataflow = MemoryTrainerLink(num_steps=6)
    await train(tmp_path / "killed", model_dir, dataflow, stop_at=3)
    resumed = await train(tmp_path / "killed", model_dir, dataflow)
    assert dataflow.sessions[-1].durable_step == 2
    assert resumed.versions[dataflow.newest] == straight.versions[6]


async def test_a_checkpoint_is_a_model_folder_that_has_learned(tmp_path: Path, model_dir: Path) -> None:
    await train(tmp_path, model_dir, MemoryTrainerLink(num_steps=6))
    latest = CheckpointStore(tmp_path, policy="actor", keep=2).latest()
    assert latest is not None
    rewarded = make_sample([2, 3], [4, 5])
    before = logprobs_alone(load_causal_lm(model_dir), rewarded).sum()
    after = logprobs_alone(load_causal_lm(latest.path), rewarded).sum()
    assert after > before + 0.5
