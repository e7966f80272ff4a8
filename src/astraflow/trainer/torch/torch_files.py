"""The files of a checkpoint of the torch backend.

    model.safetensors                       weights under Hugging Face names, with LoRA merged into them; with
                                            config and tokenizer, the folder is a model folder
    adapter/                                the LoRA factors as trained, in PEFT's format; the frozen weights
                                            are those of the model folder with which training began, and
                                            trainer.pt has their digest
    optimizer-00001-of-00004.safetensors    one per rank (see `optimizer_files`)
    critic.safetensors, critic-optimizer-*  the same for a critic
    trainer.pt                              everything else, as tensors

Reading executes no code: `torch.load` is restricted to weights.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from astraflow.errors import DataError, WeightsError
from astraflow.protocols import Write
from astraflow.trainer.torch.lora import Lora
from astraflow.trainer.torch.trained_model import TrainedModel

__all__ = ["TrainerState", "copy_model", "load_model", "load_state", "save_state"]

_STATE_FILE = "trainer.pt"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Everything except models and optimizers. The learning rate follows from the number of steps."""

    num_steps_done: int
    rng_state: Tensor
    config_json: str
    """The `TrainConfig` in effect, for people who inspect a checkpoint."""
    frozen: dict[str, str]
    """Role -> digest of each frozen model's weights, which are not saved because they never change."""


def save_state(folder: Path, state: TrainerState) -> None:
    """Writes the state into an existing folder. The caller makes it durable."""
    torch.save(asdict(state), folder / _STATE_FILE)


def load_state(folder: Path) -> TrainerState:
    """Reads what `save_state` wrote. Raises: DataError, naming the problem."""
    try:
        content = cast("dict[str, Any]", torch.load(folder / _STATE_FILE, weights_only=True))
        return TrainerState(
            num_steps_done=int(content["num_steps_done"]),
            rng_state=content["rng_state"],
            config_json=str(content["config_json"]),
            frozen=content["frozen"],
        )
    except (OSError, RuntimeError, KeyError) as err:
        raise DataError(f"checkpoint {folder} does not load: {err}") from err


def copy_model(folder: Path, model: TrainedModel, name: str, lora: Lora | None) -> Write:
    """Copies weights and optimizer to host memory. Returns the function that writes the copy into the folder.

    Every rank calls this, and writes its own part of the optimizer; rank 0 writes the weights.
    """
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] (PathLike without its argument)

    weights: dict[str, Tensor] = {}
    for name_in_folder, weight in model.weights.gather():
        if model.grid.everyone.rank == 0:
            weights[name_in_folder] = weight.detach().to("cpu", copy=True).contiguous()
    part = model.optimizer_part(_prefix(name))

    def write() -> None:
        if weights and lora is not None:
            lora.save(folder, weights)
        if weights:
            save_file(weights, folder / f"{name}.safetensors", metadata={"format": "pt"})
        part.write(folder)

    return write


def load_model(folder: Path, model: TrainedModel, name: str, lora: Lora | None) -> None:
    """Restores weights and optimizer, saved by any number of ranks. Raises: DataError, naming the problem."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] (PathLike without its argument)

    try:
        if lora is not None:
            lora.load(folder, model.weights)
        else:
            model.weights.install(load_file(folder / f"{name}.safetensors"))
    except (OSError, SafetensorError, WeightsError) as err:
        raise DataError(f"checkpoint {folder} does not load: {err}") from err
    model.load_optimizer(folder, _prefix(name))


def _prefix(name: str) -> str:
    """The start of the names of a model's optimizer files."""
    return "optimizer" if name == "model" else f"{name}-optimizer"
