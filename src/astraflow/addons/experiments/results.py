"""Reads what one run of an experiment reached: its recipe, its final figures, and its curves.

Everything comes from three files of the run folder: `recipe.yaml`, `run.json`, and `metrics.jsonl`.
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from astraflow.addons.experiments.group_file import GROUP_FILE, failure_of, load_group
from astraflow.addons.experiments.recipe_lines import recipe_lines
from astraflow.errors import DataError, Error
from astraflow.recipe.run_folder import RunFolder
from astraflow.user_input.user_files import read_part

__all__ = ["Curve", "Final", "RunResult", "metric_rows", "read_result", "read_results"]

Row = dict[str, Any]
Curve = tuple[tuple[int, float], ...]
"""(step, value) pairs, in order."""
_MAX_METRICS_BYTES = 512 * 2**20
_LAST_PART = 10
"""The final training reward is the mean over the last tenth of the steps."""


@dataclass(frozen=True, slots=True)
class Final:
    """A figure that a run ended with."""

    value: float
    eval_set: str = ""
    """The evaluation set that it was measured on; empty for a training reward."""
    stderr: float | None = None
    """Standard error over the tasks of the evaluation; None for a training reward."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of an experiment. Example: `read_result(Path("runs/quickstart")).finals`."""

    path: Path
    name: str
    state: str
    """`finished`, `running`, `stopped`, `failed`, or `unknown`."""
    reason: str
    """Why the run ended, or why its folder can't be read."""
    recipe: Mapping[str, str]
    """Dotted key -> value."""
    finals: Mapping[str, Final]
    """Figure -> its last value. Figures are `POLICY on EVAL_SET` and `POLICY training reward`."""
    curves: Mapping[str, Curve]
    steps: int = 0
    wall_s: float = 0.0

    @property
    def seed(self) -> str:
        """The recipe's seed; empty if the recipe can't be read."""
        return self.recipe.get("seed", "")


def read_results(places: Sequence[Path]) -> list[RunResult]:
    """Reads the runs among `places` and directly below them. A sweep's members keep their order.

    Raises: DataError if a place neither is nor has a run folder.
    """
    folders = dict.fromkeys(path for place in places for path in _folders_at(place))
    names = [folder.resolve().name for folder in folders]
    return [
        read_result(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def _folders_at(place: Path) -> list[Path]:
    if _is_run(place):
        return [place]
    if (place / GROUP_FILE).is_file():
        return [place / member.name for member in load_group(place).members]
    below = sorted(path for path in place.iterdir() if _is_run(path)) if place.is_dir() else []
    if not below:
        raise DataError(
            f"{place} is not a run folder and has none; pass run folders, or the folder of a sweep"
        )
    return below


def _is_run(path: Path) -> bool:
    return os.path.isdir(path / "journal") or os.path.lexists(path / "run.json")


def metric_rows(folder: RunFolder) -> list[Row]:
    """Returns the complete lines of `metrics.jsonl`; none without the file. Raises: DataError."""
    data = read_part(folder.metrics, "metrics", max_bytes=_MAX_METRICS_BYTES)
    if len(data) == _MAX_METRICS_BYTES:
        raise DataError(f"{folder.metrics} has more than {_MAX_METRICS_BYTES} bytes, which is the limit")
    rows: list[Row] = []
    for line in data.split(b"\n")[:-1]:
        try:
            row: object = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(cast("Row", row))
    return rows


def read_result(path: Path, name: str = "") -> RunResult:
    """Reads a run folder. A folder that can't be read, or was just deleted, gives a result that says so."""
    folder = RunFolder(path)
    failure = failure_of(path)
    try:
        record = folder.load_record()
        recipe = recipe_lines(folder)
        rows = metric_rows(folder)
    except (Error, OSError) as err:
        state = "failed" if failure else "unknown"
        return RunResult(path, name or path.name, state, failure or str(err), {}, {}, {})
    # The record of a launcher that was killed still says that the run continues.
    is_failed = bool(failure) and record.state != "finished"
    finals: dict[str, Final] = {}
    curves: dict[str, Curve] = {}
    for figure, own in _by_figure(rows).items():
        column = "score_mean" if figure.is_eval else "reward_mean"
        points = tuple((int(row["step"]), float(row[column])) for row in own)
        curves[figure.name] = points
        if figure.is_eval:
            stderr = own[-1].get("score_stderr")
            eval_set = str(own[-1]["eval_set"])
            is_known = isinstance(stderr, float | int)
            finals[figure.name] = Final(points[-1][1], eval_set, float(stderr) if is_known else None)
        else:
            last = [value for _, value in points[-max(1, len(points) // _LAST_PART) :]]
            finals[figure.name] = Final(statistics.fmean(last))
    steps = max((point[0] for own in curves.values() for point in own), default=0)
    return RunResult(
        path,
        name or path.name,
        "failed" if is_failed else record.state,
        failure if is_failed else record.reason,
        recipe,
        finals,
        curves,
        steps,
        record.wall_s,
    )


@dataclass(frozen=True, slots=True)
class _Figure:
    name: str
    is_eval: bool


def _by_figure(rows: Sequence[Row]) -> dict[_Figure, list[Row]]:
    """Groups the rows by the figure that they are points of; evaluations come first."""
    evals: dict[_Figure, list[Row]] = {}
    steps: dict[_Figure, list[Row]] = {}
    for row in rows:
        match row:
            case {
                "kind": "eval",
                "policy": policy,
                "eval_set": eval_set,
                "step": int(),
                "score_mean": float() | int(),
            }:
                evals.setdefault(_Figure(f"{policy} on {eval_set}", is_eval=True), []).append(row)
            case {"kind": "step", "policy": policy, "step": int(), "reward_mean": float() | int()}:
                steps.setdefault(_Figure(f"{policy} training reward", is_eval=False), []).append(row)
            case _:
                pass
    return evals | steps
