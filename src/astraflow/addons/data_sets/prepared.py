"""The tasks of a prepared data set.

Rows stay on disk, because the test cases of a programming data set can take gigabytes. Only the position of
each row is in memory, and a row is read when its task is requested.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from astraflow.addons.data_sets.catalogue import DataSet, find_data_set
from astraflow.addons.data_sets.config import PreparedSourceConfig
from astraflow.addons.data_sets.manifest import read_manifest, split_file
from astraflow.errors import ConfigError, DataError
from astraflow.tasks.rows import task_from_row
from astraflow.tasks.selection import select_fitting
from astraflow.tasks.variants import RowsConfig
from astraflow.types import Task
from astraflow.user_input.mistakes import hint

__all__ = ["PreparedSource"]


class PreparedSource:
    """The tasks of one split.

    Example: `PreparedSource(PreparedSourceConfig(dataset="aime24"), name="aime24").task(0).answer == "204"`.
    """

    def __init__(self, config: PreparedSourceConfig, *, name: str, tokenizer_dir: Path | None = None) -> None:
        """`name`: the source's name in the recipe. `tokenizer_dir`: see `make_source`.

        Raises: ConfigError for an unknown data set or split; DataError that names the command to run if the
        data set is not prepared.
        """
        data_set = find_data_set(config.dataset)
        folder = Path(config.where).expanduser()
        self._name = name or data_set.name
        self._path, _ = split_file(data_set, folder, _split(data_set, folder, config))
        self._rows = RowsConfig(columns=data_set.columns, system=config.system, template=config.template)
        self._places = select_fitting(
            _lines(self._path),
            config,
            task_of=self._task,
            where=f"{data_set.name} ({self._path})",
            tokenizer_dir=tokenizer_dir,
        )

    def __len__(self) -> int:
        return len(self._places)

    def task(self, idx: int) -> Task:
        """Task number `idx`, from 0."""
        return self._task(self._places[idx])

    def _task(self, place: tuple[int, int]) -> Task:
        offset, size = place
        with self._path.open("rb") as file:
            file.seek(offset)
            line = file.read(size)
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError as err:
            raise DataError(
                f"{self._path} was changed (byte {offset}): {err}; run `astraflow data prepare {self._name} "
                "--verify` to find changed files"
            ) from err
        task = Task(id=f"{self._name}/{row['id']}", source=self._name, prompt="")
        return task_from_row(row, self._rows, task=task, where=f"{self._path}, row {row['id']!r}")


def _split(data_set: DataSet, folder: Path, config: PreparedSourceConfig) -> str:
    """The split that the config names, or the only one.

    Raises: ConfigError if the config must name it, or if the data set has no tasks.
    """
    if data_set.holds != "tasks":
        raise ConfigError(f"{data_set.name} contains {data_set.holds} to search, not tasks")
    if config.split:
        return config.split
    splits = list(read_manifest(data_set, folder).splits)
    if len(splits) > 1:
        raise ConfigError(f"{data_set.name} has several splits; name one in `split`{hint('', splits)}")
    return splits[0]


def _lines(path: Path) -> Iterator[tuple[int, int]]:
    """Yields the offset of each line, and its number of bytes."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            yield offset, len(line)
            offset += len(line)
