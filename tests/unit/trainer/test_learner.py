"""Whoever trains uses the verbs of a backend and nothing else of it."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from astraflow.addons.tinker.client import TrainingClient
from astraflow.addons.tinker.wire_types import AdamParams, Datum, ModelInput
from astraflow.errors import TrainingError
from astraflow.protocols import AdamStep, ModelRole, Objective, TrainedRole, TrainerBackend, Write
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types.token_columns import Columns
from drivers.trainer_builders import VOCAB_SIZE, make_batch, make_samples, save_model

Parts = Sequence[Any]


@dataclass
class Verbs:
    """A backend that has the verbs alone, and notes which were used."""

    inner: TorchBackend
    used: list[str] = field(default_factory=list[str])

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def cut(self, columns: Columns, samples: Any, *, model: ModelRole = "policy") -> Parts:
        return self.inner.cut(columns, samples, model=model)

    def forward_backward(
        self, columns: Columns, parts: Parts, objective: Objective, *, model: TrainedRole = "policy"
    ) -> int:
        self.used.append(f"forward_backward {model}")
        return self.inner.forward_backward(columns, parts, objective, model=model)

    def optim_step(self, step: AdamStep, *, model: TrainedRole = "policy") -> float:
        self.used.append(f"optim_step {model}")
        return self.inner.optim_step(step, model=model)

    def reset_optimizer(self) -> None:
        self.inner.reset_optimizer()

    def logprobs(self, columns: Columns, parts: Parts, *, model: ModelRole = "policy") -> Any:
        self.used.append(f"logprobs {model}")
        return self.inner.logprobs(columns, parts, model=model)

    def values(self, columns: Columns, parts: Parts) -> Any:
        self.used.append("values")
        return self.inner.values(columns, parts)

    def export(self) -> Any:
        return self.inner.export()

    def save(self, folder: Path, *, num_steps_done: int) -> Write:
        return self.inner.save(folder, num_steps_done=num_steps_done)

    def load(self, folder: Path) -> int:
        return self.inner.load(folder)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make(model_dir: Path, **settings: Any) -> LossLearner:
    given = {"lr": 1e-2, "minibatches": 2, **settings}
    config = TrainConfig.model_validate_json(msgspec.json.encode(given))
    backend: TrainerBackend = Verbs(TorchBackend(config, model_dir=model_dir))
    return LossLearner(config, backend, seed=1)


def test_a_step_is_made_of_verbs(model_dir: Path, tmp_path: Path) -> None:
    auxiliary = {"kl": {"coef": 0.1}, "critic": {"name": "value_model", "lr": 1e-2}}
    learner = make(model_dir, auxiliary=auxiliary)
    learner.train_step(make_batch(make_samples()))
    assert isinstance(learner.backend, Verbs)
    of_a_minibatch = ["forward_backward policy", "optim_step policy"]
    of_a_minibatch += ["forward_backward critic", "optim_step critic"]
    assert learner.backend.used == ["logprobs reference", "values", "logprobs policy", *of_a_minibatch * 2]
    learner.save(tmp_path)()
    other = make(model_dir, auxiliary=auxiliary)
    other.load(tmp_path)
    assert other.num_steps_done == 1


def test_a_loss_without_minibatches_takes_one_pass(model_dir: Path) -> None:
    learner = make(model_dir, minibatches=1, loss={"name": "m2po", "budget": 0.01})
    learner.train_step(make_batch(make_samples()))
    assert isinstance(learner.backend, Verbs)
    assert learner.backend.used == ["forward_backward policy", "optim_step policy"]


class Hungry:
    """An objective for which the device has no memory left."""

    entropy: Any = "none"
    alternatives: str = ""

    def __call__(self, trained: Any, predicted: Any, entropies: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")


def test_a_device_without_memory_says_what_needs_how_much_and_what_helps(model_dir: Path) -> None:
    backend = TorchBackend(TrainConfig(), model_dir=model_dir)
    columns = columns_from_samples(make_samples(), vocab_size=VOCAB_SIZE)
    parts = backend.cut(columns, np.arange(len(columns.lengths)))
    message = (
        r"cpu is out of memory with microbatches of up to \d+ tokens; .*activations of 16384.*to save most"
    )
    with pytest.raises(TrainingError, match=message):
        backend.forward_backward(columns, parts, Hungry())


def test_the_verbs_of_tinker_are_made_of_the_backends(model_dir: Path) -> None:
    backend = Verbs(TorchBackend(TrainConfig(), model_dir=model_dir))
    ids = [2, 3, 4, 5]
    inputs = {"target_tokens": ids[1:], "weights": np.ones(3, dtype=np.float32)}
    with closing(TrainingClient(backend, model_dir=model_dir)) as client:
        datum = Datum(ModelInput.from_ints(ids[:-1]), inputs)
        before = client.forward([datum], "cross_entropy").result().metrics["loss:sum"]
        for _ in range(3):
            client.forward_backward([datum], "cross_entropy")
            client.optim_step(AdamParams(learning_rate=1e-2)).result()
        assert client.forward([datum], "cross_entropy").result().metrics["loss:sum"] < before
    assert set(backend.used) == {"logprobs policy", "forward_backward policy", "optim_step policy"}
