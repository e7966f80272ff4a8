"""The files of model folders, and of a checkpoint of the torch backend.

    model.safetensors                       weights under Hugging Face names, with LoRA merged into them; with
                                            config and tokenizer, the folder is a model folder
    adapter/                                the LoRA factors as trained, in PEFT's format; the frozen weights
                                            are those of the model folder with which training began, and
                                            trainer.pt has their digest
    optimizer-00001-of-00004.safetensors    one per rank (see `optimizer_files`)
    critic.safetensors, critic-optimizer-*  the same for a critic
    trainer.pt                              everything else, as tensors

Reading executes no code: `torch.load` is restricted to weights. No rank or host reads a whole model: built on
`meta`, it is sharded, and each rank reads its part from files. Rank 0 copies all weights, to save them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from astraflow import added
from astraflow.errors import DataError, WeightsError
from astraflow.models.file_layout import adopt_layout, rest_of
from astraflow.models.loading import empty_causal_lm, file_tensors, load_causal_lm
from astraflow.models.model_folder import check_model_folder
from astraflow.models.weight_files import weight_paths
from astraflow.protocols import Write
from astraflow.trainer.torch.parallel.grid import RankGrid
from astraflow.trainer.torch.trained_model import TrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "TrainerState",
    "check_frozen",
    "copy_model",
    "load_model",
    "load_state",
    "open_model",
    "save_state",
]

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


def check_frozen(folder: Path, saved: Mapping[str, str], models: Mapping[str, tuple[str, Path]]) -> None:
    """Compares the frozen models of a checkpoint with those that are loaded, given by digest and folder.

    Raises: DataError that names the first that differs.
    """
    for role, (digest, model_dir) in models.items():
        if saved.get(role) != digest:
            raise DataError(
                f"checkpoint {folder}: the weights of its {role} differ from those in {model_dir}; "
                "restore that folder, or begin a new run"
            )


def copy_model(folder: Path, model: TrainedModel, name: str, lora: "added.Lora | None") -> Write:
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


def load_model(folder: Path, model: TrainedModel, name: str, lora: "added.Lora | None") -> None:
    """Restores weights and optimizer, saved by any number of ranks. Raises: DataError, naming the problem."""
    try:
        if lora is not None:
            lora.load(folder, model.weights)
        else:
            model.weights.install(file_tensors([folder / f"{name}.safetensors"]))
    except (OSError, DataError, WeightsError) as err:
        raise DataError(f"checkpoint {folder} does not load: {err}") from err
    model.load_optimizer(folder, _prefix(name))


def open_model(folder: str | Path, grid: RankGrid) -> "tuple[PreTrainedModel, dict[str, Tensor] | None]":
    """A folder's model in float32, and the tensors with which `ModelWeights.split` must fill it; None if it
    is complete already.

    Raises: DataError unless the folder's files are exactly the model's weights.
    """
    path = Path(folder)
    is_local = grid.mesh is None and grid.tensor == 1 and grid.device == "cpu"
    if is_local or not (path / "config.json").is_file():
        return load_causal_lm(folder, device=grid.device), None
    try:
        names = check_model_folder(path)
    except DataError as err:
        raise DataError(f"model folder {path}: {err}") from err
    model = empty_causal_lm(path, device="meta")
    source = file_tensors(weight_paths(path), names or ())
    adopt_layout(model, source)
    return model, {name: tensor for name, tensor in source.items() if name not in rest_of(model)}


def _prefix(name: str) -> str:
    """The start of the names of a model's optimizer files."""
    return "optimizer" if name == "model" else f"{name}-optimizer"
