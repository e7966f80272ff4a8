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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from astraflow.errors import DataError
from astraflow.trainer.ranks import Ranks
from astraflow.trainer.torch.parallel.sharding import TrainedPart

__all__ = ["OptimizerPart", "read_optimizer"]

_AVERAGES = ("exp_avg", "exp_avg_sq")
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
            for average in _AVERAGES:
                tensors[f"{name}.{average}"] = state[average].detach().to("cpu", copy=True).contiguous()
        return cls(
            tensors, rows, columns, steps, f"{prefix}-{ranks.rank + 1:05d}-of-{ranks.world:05d}.safetensors"
        )

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
    with ExitStack() as opened:
        files = _open_files(folder, prefix, opened)
        steps: dict[str, float] = {}
        for file in files:
            steps.update(json.loads(file.metadata()["steps"]))
        if unknown := sorted(steps.keys() - parts.keys()):
            raise DataError(
                f"checkpoint {folder}: the optimizer state does not fit the model: it has {unknown[0]}, "
                "which this recipe does not train"
            )
        optimizer.state.clear()
        for name, part in parts.items():
            own = part.own
            if name not in steps or not own.numel():
                continue
            state: dict[str, Tensor] = {"step": torch.tensor(steps[name], device=own.device)}
            for average in _AVERAGES:
                state[average] = zeros(own)
                num_read = _read(state[average], part, _pieces(files, name, average))
                if num_read != own.numel():
                    raise DataError(
                        f"checkpoint {folder}: the optimizer state does not fit the model: {num_read} of "
                        f"{own.numel()} values of {name} have the expected shape"
                    )
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
    found: list[tuple[int, int, Any]] = []
    for file in files:
        about = file.metadata()
        rows = json.loads(about["rows"])
        if name in rows:
            column = json.loads(about["columns"]).get(name, 0)
            found.append((rows[name], column, file.get_slice(f"{name}.{average}")))
    return found


def _read(into: Tensor, part: TrainedPart, pieces: list[tuple[int, int, Any]]) -> int:
    """Fills a part from pieces. Returns the number of values found."""
    num_read = 0
    for row, column, piece in pieces:
        shape = piece.get_shape()
        if len(shape) != into.ndim or shape[2:] != list(into.shape[2:]):
            continue
        low = max(part.row, row)
        high = min(part.row + len(into), row + shape[0])
        if low >= high:
            continue
        target = into[low - part.row : high - part.row]
        if into.ndim == 1:
            target.copy_(piece[low - row : high - row])
            num_read += target.numel()
            continue
        left = max(part.column, column)
        right = min(part.column + into.shape[1], column + shape[1])
        if left < right:
            target = target[:, left - part.column : right - part.column]
            target.copy_(piece[low - row : high - row, left - column : right - column])
            num_read += target.numel()
    return num_read
