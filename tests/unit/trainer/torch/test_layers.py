"""Activation checkpointing: the same gradient from less memory, in eval mode."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from astraflow.addons.tinker.losses import SummedLoss, cross_entropy
from astraflow.errors import ConfigError
from astraflow.protocols import AdamStep
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.torch.layers import recompute_layers
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types.host_tensors import HostTensor
from drivers.trainer_builders import VOCAB_SIZE, make_samples, save_model

STEP = AdamStep(lr=1.0, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0, max_grad_norm=1e9)
"""With an epsilon as large as this, the first step is in proportion to the gradient."""


@dataclass
class Kept:
    """What the forward pass keeps for the backward pass, the weights aside."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    num_bytes: int = 0

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            self.tensors[tensor.untyped_storage().data_ptr()] = tensor
        return tensor


@dataclass
class Measured:
    """An objective that measures when it is called: the forward pass is over then."""

    inner: SummedLoss
    kept: Kept
    entropy: Any = "none"
    alternatives: str = ""

    def __call__(self, trained: Any, predicted: torch.Tensor, entropies: torch.Tensor | None) -> torch.Tensor:
        self.kept.num_bytes = sum(t.untyped_storage().nbytes() for t in self.kept.tensors.values())
        return self.inner(trained, predicted, entropies)


def step(folder: Path, activations: str, **lora: Any) -> tuple[int, tuple[HostTensor, ...]]:
    """Bytes kept in a pass over short sequences, and the weights after a step."""
    settings = {"backend": {"name": "torch", "activations": activations, "lora": lora}}
    backend = TorchBackend(
        TrainConfig.model_validate_json(msgspec.json.encode(settings)), model_dir=folder, seed=1
    )
    columns = columns_from_samples(make_samples(num_groups=8), vocab_size=VOCAB_SIZE)
    parts = backend.cut(columns, np.arange(len(columns.lengths)))
    kept = Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor):
        backend.forward_backward(columns, parts, Measured(SummedLoss(columns, cross_entropy), kept))
    backend.optim_step(STEP)
    return kept.num_bytes, tuple(backend.export())


@pytest.mark.parametrize("lora", [{}, {"rank": 2}])
def test_the_step_is_the_same_from_a_quarter_of_the_activations(tmp_path: Path, lora: dict[str, Any]) -> None:
    folder = save_model(tmp_path / "deep", num_hidden_layers=8)
    all_bytes, expected = step(folder, "keep", **lora)
    num_bytes, found = step(folder, "recompute", **lora)
    assert num_bytes < 0.25 * all_bytes
    assert [t.data.tobytes() for t in found] == [t.data.tobytes() for t in expected]


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'activations = "recompute": Linear has no layers'):
        recompute_layers(nn.Linear(2, 2))
