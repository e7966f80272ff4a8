"""A training loop of the user's own as a backend, and in the trainer around it."""

from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.tinker.client import TrainingClient
from astraflow.addons.tinker.config import OwnLoopBackendConfig
from astraflow.addons.tinker.wire_types import AdamParams
from astraflow.config import Use
from astraflow.errors import ConfigError, TrainingError
from astraflow.losses.config import AuxiliaryConfig
from astraflow.protocols import Learner
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.config import TrainConfig
from astraflow.types import Batch
from drivers.trainer_builders import make_batch, make_sample, save_model
from drivers.trainer_fakes import MemoryPublisher, MemoryTrainerLink, train_until


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


# --- loops ----------------------------------------------------------------------------------------


def learn(client: TrainingClient, *, lr: float = 0.01) -> None:
    for batch in client.batches():
        client.forward_backward(batch.data, "importance_sampling")
        client.optim_step(AdamParams(learning_rate=lr))
        client.save_weights_for_sampler(str(batch.step))
    client.save_state("final").result()


def fail(client: TrainingClient) -> None:
    next(client.batches())
    raise ZeroDivisionError("by the user's own code")


def return_early(client: TrainingClient) -> None:
    next(client.batches())


def save_nothing(client: TrainingClient) -> None:
    for batch in client.batches():
        client.forward_backward(batch.data[:0], "ppo")


def learn_after_the_save(client: TrainingClient) -> None:
    for batch in client.batches():
        client.save_weights_for_sampler("early")
        client.forward_backward(batch.data, "ppo")
        client.optim_step(AdamParams()).result()


# --- tests ----------------------------------------------------------------------------------------


def make(model_dir: Path, loop: str = "learn", *, states: Path | None = None, **settings: Any) -> Learner:
    backend = OwnLoopBackendConfig(loop=Use(use=f"{__name__}:{loop}", **settings))
    return make_learner(TrainConfig(steps=6, backend=backend), model_dir=model_dir, states=states)


def batch_of(step: int) -> Batch:
    return make_batch([make_sample([2, 3], [4 + step, 5], behavior=[-3.0, -3.5])], step=step)


def content(backend: Learner) -> bytes:
    return b"".join(tensor.data.tobytes() for tensor in backend.export())


def test_a_step_gives_the_loops_weights_and_figures(model_dir: Path, tmp_path: Path) -> None:
    backend = make(model_dir, states=tmp_path)
    versions = [content(backend)]
    for step in range(6):
        figures = {item.name: item.value for item in backend.train_step(batch_of(step)).metrics}
        assert set(figures) == {"loss", "grad_norm", "lr", "behavior_gap", "behavior_gap_max"}
        assert figures["lr"] == 0.01
        versions.append(content(backend))
    assert len(set(versions)) == 7
    assert (tmp_path / "final" / "model.safetensors").is_file()  # the last step waits for the loop's end


@pytest.mark.parametrize(
    ("loop", "error", "match"),
    [
        ("fail", ZeroDivisionError, "by the user's own code"),
        ("return_early", TrainingError, r"returned in step 1 of 6: go through client\.batches"),
        ("save_nothing", ConfigError, "step 1 was not ended: call save_weights_for_sampler"),
    ],
)
def test_a_loop_that_breaks_its_step_fails_the_trainer(
    loop: str, error: type[Exception], match: str, model_dir: Path
) -> None:
    with pytest.raises(error, match=match):
        make(model_dir, loop).train_step(batch_of(0))


def test_what_is_published_is_not_changed_until_the_next_batch(model_dir: Path) -> None:
    backend = make(model_dir, "learn_after_the_save")
    before = content(backend)
    backend.train_step(batch_of(0))
    assert content(backend) == before
    with pytest.raises(ConfigError, match="take the next batch first"):
        backend.train_step(batch_of(1))


def test_a_failed_verb_that_nobody_waited_for_is_named_as_the_cause(model_dir: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make(model_dir, "save_nothing").train_step(batch_of(0))
    assert "no data was given" in str(caught.value.__cause__)


def test_what_only_a_recipes_loss_gives_is_refused(model_dir: Path) -> None:
    backend = OwnLoopBackendConfig(loop=Use(use=f"{__name__}:learn"))
    auxiliary = AuxiliaryConfig(entropy_coef=0.1)
    with pytest.raises(ConfigError, match="with own_loop the loop names its losses"):
        make_learner(TrainConfig(backend=backend, auxiliary=auxiliary), model_dir=model_dir)
    with pytest.raises(ConfigError, match="rl is not an argument"):
        make(model_dir, args={"rl": 0.1})


async def train(
    folder: Path, model_dir: Path, dataflow: MemoryTrainerLink, *, stop_at: int | None = None
) -> MemoryPublisher:
    """A trainer around the loop; with `stop_at`, it is killed once that version is published."""
    backend = make(model_dir, states=folder / "states")
    return await train_until(backend, folder, dataflow, stop_at=stop_at, limit_s=30.0)


async def test_a_killed_and_resumed_loop_ends_with_the_same_bits(tmp_path: Path, model_dir: Path) -> None:
    straight = await train(tmp_path / "straight", model_dir, MemoryTrainerLink(num_steps=6))
    dataflow = MemoryTrainerLink(num_steps=6)
    await train(tmp_path / "killed", model_dir, dataflow, stop_at=3)
    resumed = await train(tmp_path / "killed", model_dir, dataflow)
    assert dataflow.sessions[-1].durable_step == 2
    assert resumed.versions[dataflow.newest] == straight.versions[6]
