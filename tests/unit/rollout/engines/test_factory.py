"""The engine that a recipe names."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from astraflow.config import Use
from astraflow.errors import ConfigError, DataError, WeightsError
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.factory import make_engine
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types.host_tensors import WeightSnapshot
from drivers.engine_models import make_model_folder, make_random_model, snapshot_of


def build(snapshot: WeightSnapshot, *, speed: float = 1.0) -> SimpleNamespace:
    """A user's engine."""
    return SimpleNamespace(snapshot=snapshot, speed=speed)


@pytest.fixture
def snapshot(tmp_path: Path) -> WeightSnapshot:
    return snapshot_of(make_random_model(), make_model_folder(tmp_path))


async def test_the_torch_engine_is_built_by_name(snapshot: WeightSnapshot) -> None:
    engine = make_engine(TorchEngineConfig(num_slots=2, max_context=16), snapshot)
    assert isinstance(engine, TorchEngine)
    assert engine.capacity().num_slots == 2
    await engine.close()


def test_a_users_engine_gets_the_snapshot_and_its_arguments(snapshot: WeightSnapshot) -> None:
    engine = make_engine(Use(use=f"{__name__}:build", args={"speed": 2.0}), snapshot)
    assert isinstance(engine, SimpleNamespace)
    assert engine.snapshot is snapshot
    assert engine.speed == 2.0


def test_a_users_engine_with_a_wrong_argument_is_refused(snapshot: WeightSnapshot) -> None:
    with pytest.raises(ConfigError, match=r"rollout.engine.args.sped is not an argument; did you mean"):
        make_engine(Use(use=f"{__name__}:build", args={"sped": 2.0}), snapshot)


@pytest.mark.parametrize(
    ("device", "message"), [("gpu", "is not a device"), ("cuda:99", "CUDA devices here; use cpu")]
)
def test_a_device_that_is_not_here_is_named(snapshot: WeightSnapshot, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(TorchEngineConfig(device=device), snapshot)


def test_weights_of_another_model_are_refused(snapshot: WeightSnapshot) -> None:
    with pytest.raises(WeightsError, match="do not fit the model"):
        make_engine(TorchEngineConfig(), snapshot_of(make_random_model("llama"), snapshot.model_dir))


def test_a_missing_model_folder_is_named(snapshot: WeightSnapshot, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone does not exist"):
        make_engine(TorchEngineConfig(), WeightSnapshot("actor", 0, snapshot.tensors, tmp_path / "gone"))
