"""The files of a torch backend's state in a checkpoint folder: weights as safetensors, the rest as tensors.

Reading executes no code: safetensors, and `torch.load` with `weights_only=True`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from astraflow.errors import DataError, WeightsError
from astraflow.models.loading import export_tensors, host_tensor, install_tensors, torch_tensor

__all__ = ["MODEL_FILE", "STATE_FILE", "TrainerState", "load_state", "save_state"]

MODEL_FILE = "model.safetensors"
"""The name that a Hugging Face folder gives its weights: with config and tokenizer, a checkpoint is one."""

STATE_FILE = "trainer.pt"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Everything but the weights. The learning rate's schedule follows from the number of steps."""

    optimizer: dict[str, Any]
    """As torch's optimizer gives it."""
    num_steps_done: int
    rng_state: Tensor
    config_json: str
    """The `TrainConfig` in force, for readers of a checkpoint."""
    frozen: dict[str, str]
    """Role -> digest of each frozen model's weights, which never change: the digest stands for them."""


def save_state(folder: Path, model: nn.Module, state: TrainerState) -> None:
    """Writes both files into an existing folder; making them durable is the caller's."""
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] (PathLike without its argument)

    weights = {tensor.name: torch_tensor(tensor) for tensor in export_tensors(model)}
    save_file(weights, folder / MODEL_FILE, metadata={"format": "pt"})
    content = {
        "optimizer": state.optimizer,
        "num_steps_done": state.num_steps_done,
        "rng_state": state.rng_state,
        "config_json": state.config_json,
        "frozen": state.frozen,
    }
    torch.save(content, folder / STATE_FILE)


def load_state(folder: Path, model: nn.Module, *, device: str) -> TrainerState:
    """Overwrites the model's weights and returns the rest. Raises: DataError naming what does not fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] (PathLike without its argument)

    try:
        weights = load_file(folder / MODEL_FILE)
        content = cast(
            "dict[str, Any]", torch.load(folder / STATE_FILE, map_location=device, weights_only=True)
        )
        install_tensors(model, [host_tensor(name, tensor) for name, tensor in weights.items()])
        return TrainerState(
            optimizer=content["optimizer"],
            num_steps_done=int(content["num_steps_done"]),
            rng_state=content["rng_state"].cpu(),
            config_json=str(content["config_json"]),
            frozen=content["frozen"],
        )
    except (OSError, RuntimeError, KeyError, SafetensorError, WeightsError) as err:
        raise DataError(f"checkpoint {folder} does not load: {err}") from err
