"""The state of AdamW in a checkpoint: one file per rank, readable by any number of ranks.

    optimizer-00001-of-00004.safetensors    `NAME.exp_avg` and `NAME.exp_avg_sq`, this rank's part
        metadata: rows    {NAME: first row of the part}
                  columns {NAME: first column of the part}, if not 0
                  steps   {NAME: steps done}

A part consists of some rows and columns of a weight (its first and second dimension). A loading rank reads
what it needs from the files that have it. If several ranks have the same part, only one writes it. Ranks
write without communicating, so that writing overlaps with the next steps. (torch.distributed.checkpoint
stores its index as a pickle, and reading that may execute code.)
"""

import json
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from astraflow.errors import DataError
from astraflow.trainer.ranks import Ranks
from astraflow.trainer.torch.parallel.sharding import TrainedPart

__all__ = ["AVERAGES", "OptimizerPart", "SavedOptimizer", "open_optimizer", "read_optimizer"]

AVERAGES = ("exp_avg", "exp_avg_sq")
"""The two moving averages of AdamW."""
Parts = Mapping[str, TrainedPart]
"""Parts by parameter name."""


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """A copy of one rank's state in host memory. Example: `OptimizerPart.of(optimizer, parts, ranks)`."""

    tensors: Mapping[str, Tensor]
    rows: Mapping[str, int]
    columns: Mapping[str, int]
    steps: Mapping[str, float]
    file: str

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, parts: Parts, ranks: Ranks, *, prefix: str
    ) -> "OptimizerPart":
        """Copies the state of an optimizer over a rank's parts. `prefix`: start of the file's name."""
        tensors: dict[str, Tensor] = {}
        rows: dict[str, int] = {}
        columns: dict[str, int] = {}
        steps: dict[str, float] = {}
        for name, part in parts.items():
            state = cast("dict[str, Tensor]", optimizer.state.get(part.own, {}))
            if not state or not part.is_first:
                continue
            rows[name] = part.row
            if part.column:
                columns[name] = part.column
            steps[name] = float(state["step"])
            for average in AVERAGES:
                tensors[f"{name}.{average}"] = state[average].detach().to("cpu", copy=True).contiguous()
        return cls(tensors, rows, columns, steps, cls.name_of(prefix, ranks))

    @staticmethod
    def name_of(prefix: str, ranks: Ranks) -> str:
        """The name of a rank's file."""
        return f"{prefix}-{ranks.rank + 1:05d}-of-{ranks.world:05d}.safetensors"

    def write(self, folder: Path) -> None:
        """Writes the file into an existing folder."""
        from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] (PathLike without its argument)

        metadata = {
            "format": "pt",
            "rows": json.dumps(self.rows),
            "columns": json.dumps(self.columns),
            "steps": json.dumps(self.steps),
        }
        save_file(dict(self.tensors), folder / self.file, metadata=metadata)


class SavedOptimizer:
    """The state in a checkpoint, written by any number of ranks; see `open_optimizer`."""

    def __init__(self, folder: Path, files: Sequence[Any]) -> None:
        self.steps: dict[str, float] = {}
        """Name of each weight -> number of its steps."""
        self._folder = folder
        self._files = files
        for file in files:
            self.steps.update(json.loads(file.metadata()["steps"]))

    def check_names(self, known: Collection[str]) -> None:
        """Raises: DataError if there is a weight that the recipe does not train."""
        if unknown := sorted(self.steps.keys() - set(known)):
            raise DataError(
                f"checkpoint {self._folder}: the optimizer state does not fit the model: it has "
                f"{unknown[0]}, which this recipe does not train"
            )

    def read(self, name: str, average: str, into: Tensor, *, offset: tuple[int, int]) -> None:
        """Fills a part of a weight's average that begins with a row and a column of the weight.

        Raises: DataError if the files lack some of its values.
        """
        num_read = _read(into, offset, _pieces(self._files, name, average))
        if num_read != into.numel():
            raise DataError(
                f"checkpoint {self._folder}: the optimizer state does not fit the model: {num_read} of "
                f"{into.numel()} values of {name} have the expected shape"
            )


@contextmanager
def open_optimizer(folder: Path, prefix: str) -> Generator[SavedOptimizer, None, None]:
    """Opens the files of a checkpoint. Raises: DataError if some are missing or broken."""
    with ExitStack() as opened:
        yield SavedOptimizer(folder, _open_files(folder, prefix, opened))


def read_optimizer(
    folder: Path,
    optimizer: torch.optim.Optimizer,
    parts: Parts,
    *,
    prefix: str,
    zeros: Callable[[nn.Parameter], Tensor],
) -> None:
    """Loads this rank's parts into an optimizer. `zeros` makes an empty average for a part.

    Raises: DataError if files are missing, or their state does not belong to these parameters.
    """
    with open_optimizer(folder, prefix) as saved:
        saved.check_names(parts.keys())
        optimizer.state.clear()
        for name, part in parts.items():
            own = part.own
            if name not in saved.steps or not own.numel():
                continue
            state: dict[str, Tensor] = {"step": torch.tensor(saved.steps[name], device=own.device)}
            for average in AVERAGES:
                state[average] = zeros(own)
                saved.read(name, average, state[average], offset=(part.row, part.column))
            optimizer.state[own] = state


def _open_files(folder: Path, prefix: str, opened: ExitStack) -> list[Any]:
    from safetensors import SafetensorError, safe_open

    paths = sorted(folder.glob(f"{prefix}-*-of-*.safetensors"))
    wanted = int(paths[0].stem.rpartition("-")[2]) if paths else 1
    if len(paths) != wanted:
        raise DataError(f"checkpoint {folder}: found {len(paths)} of {wanted} files {prefix}-*.safetensors")
    try:
        return [opened.enter_context(cast("Any", safe_open)(path, framework="pt")) for path in paths]
    except SafetensorError as err:
        raise DataError(f"checkpoint {folder} does not load: {err}") from err


def _pieces(files: Sequence[Any], name: str, average: str) -> list[tuple[int, int, Any]]:
    """First row, first column and content of each piece of a weight's average."""
    pieces: list[tuple[int, int, Any]] = []
    for file in files:
        about = file.metadata()
        rows = json.loads(about["rows"])
        if name in rows:
            column = json.loads(about["columns"]).get(name, 0)
            pieces.append((rows[name], column, file.get_slice(f"{name}.{average}")))
    return pieces


def _read(into: Tensor, offset: tuple[int, int], pieces: list[tuple[int, int, Any]]) -> int:
    """Fills a part from pieces. Returns the number of values found."""
    own_row, own_column = offset
    num_read = 0
    for row, column, piece in pieces:
        shape = piece.get_shape()
        if len(shape) != into.ndim or shape[2:] != list(into.shape[2:]):
            continue
        low = max(own_row, row)
        high = min(own_row + len(into), row + shape[0])
        if low >= high:
            continue
        target = into[low - own_row : high - own_row]
        if into.ndim == 1:
            target.copy_(piece[low - row : high - row])
            num_read += target.numel()
            continue
        left = max(own_column, column)
        right = min(own_column + into.shape[1], column + shape[1])
        if left < right:
            target = target[:, left - own_column : right - own_column]
            target.copy_(piece[low - row : high - row, left - column : right - column])
            num_read += target.numel()
    return num_read
