"""Rows of a Hugging Face data set: of a local folder or file, or of a name on the hub."""

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from astraflow.addons.data_sets.config import HubSourceConfig
from astraflow.addons.data_sets.narrow_floats import with_own_digits
from astraflow.errors import ConfigError, DataError
from astraflow.models.hub import split_revision
from astraflow.service.progress_bars import progress_bars_off
from astraflow.tasks.rows import shorten, task_from_row
from astraflow.tasks.sources import ListSource, missing_file_error, select_tasks
from astraflow.types import Task
from astraflow.user_input.extras import install_command
from astraflow.user_input.mistakes import hint
from astraflow.user_input.user_files import is_there

__all__ = ["load_rows", "read_split"]


def read_split(config: HubSourceConfig, *, name: str, tokenizer_dir: Path | None) -> ListSource:
    """The tasks of a split, whose ids begin with `name`. Raises: ConfigError or DataError."""
    tasks: list[Task] = []
    for idx, row in enumerate(load_rows(config)):
        task = Task(id=f"{name or Path(config.path).stem}/{idx}", source=name, prompt="")
        tasks.append(task_from_row(row, config, task=task, where=config.row_place(idx)))
    if not tasks:
        raise DataError(f"data set {config.path}, split {config.split!r}, has no rows")
    return select_tasks(tasks, config, where=config.path, tokenizer_dir=tokenizer_dir)


def load_rows(config: HubSourceConfig) -> Iterable[Mapping[str, Any]]:
    """Loads the rows of a split: of a folder of `save_to_disk`, a file, a folder of files, or a name on the
    hub.

    Raises: ConfigError if the library is missing; DataError if the data set cannot be loaded.
    """
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as err:
        raise ConfigError(f"the source `datasets` needs the package: {install_command('tasks')}") from err
    path = Path(config.path).expanduser()
    where = f"data set {config.path}, split {config.split!r}"
    if config.is_local and not is_there(path):
        raise missing_file_error(path)
    try:
        with progress_bars_off():
            if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                data_set: Any = datasets.load_from_disk(str(path))
                return _rows(_split_of(data_set, config))
            if path.is_file() and path.suffix in {".json", ".jsonl"}:
                return _json_rows(path)
            if path.is_file():
                kind, options = _file_kind(path)
                return _rows(_load(kind, "train", data_files=str(path), **options))
            name, revision = (str(path), "") if config.is_local else split_revision(config.path)
            return _rows(_load(name, config.split, name=config.subset or None, revision=revision or None))
    except DataError:
        raise
    except (OSError, ValueError, KeyError, RecursionError, DatasetsError, Warning) as err:
        # Only the cause of the library's error names the line and file that it could not read.
        cause = f": {err.__cause__}" if err.__cause__ else ""
        if isinstance(err.__cause__ or err, UnicodeDecodeError):
            cause += "; save the file as UTF-8"
        raise DataError(f"{where} cannot be loaded: {err}{cause}") from err


def _rows(data_set: Any) -> Iterable[Mapping[str, Any]]:
    """The rows of a `datasets.Dataset`."""
    return with_own_digits(data_set, data_set.features.arrow_schema)


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file with a JSON list, or with a JSON object per line.

    `datasets` would give all values of a column one type: it turns texts into dates, and rounds integers.
    """
    text = path.read_text(encoding="utf-8-sig")
    try:
        content: Any = json.loads(text)
    except ValueError:
        content = [_json_row(line, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    entries = cast("list[object]", content if isinstance(content, list) else [content])
    if wrong := [row for row in entries if not isinstance(row, dict)]:
        raise ValueError(f"it contains {shorten(repr(wrong[0]))}; expected a JSON object for each row")
    rows = cast("list[dict[str, Any]]", entries)
    names = dict.fromkeys(name for row in rows for name in row)
    return [{**names, **row} for row in rows]


def _json_row(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as err:
        raise ValueError(f"line {number} is not valid JSON: {err}; it reads {shorten(line)}") from err


def _load(path: str, split: str, **options: Any) -> Any:
    """Loads a data set. CSV files have only texts, so each column of theirs is one: `0042`, `NA`, `1E5`."""
    import datasets
    import pandas as pd
    from datasets.packaged_modules.csv.csv import Csv

    library = cast("Any", datasets)
    builder = library.load_dataset_builder(path, **options)
    if not isinstance(builder, Csv):
        return library.load_dataset(path, split=split, **options)
    config = cast("Any", builder.config)
    first = next(iter(config.data_files.values()))[0]
    names = cast("Any", pd).read_csv(first, sep=config.sep, nrows=0, index_col=False).columns
    options |= {"features": library.Features({name: library.Value("string") for name in names})}
    # pandas only warns about values that it drops.
    with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
        return library.load_dataset(path, split=split, na_filter=False, index_col=False, **options)


def _split_of(data_set: Any, config: HubSourceConfig) -> Any:
    """The split that the config names; a folder of `save_to_disk` has one split, or several by name."""
    if not isinstance(data_set, dict):
        return data_set
    splits = cast("dict[str, Any]", data_set)
    if config.split not in splits:
        raise DataError(
            f"data set {config.path} has no split {config.split!r}{hint(config.split, list(splits))}"
        )
    return splits[config.split]


def _file_kind(path: Path) -> tuple[str, dict[str, str]]:
    """The name under which `datasets` loads files of this kind, and its options."""
    kinds: dict[str, tuple[str, dict[str, str]]] = {
        ".csv": ("csv", {}),
        ".tsv": ("csv", {"sep": "\t"}),
        ".parquet": ("parquet", {}),
        ".arrow": ("arrow", {}),
    }
    if path.suffix not in kinds:
        choices = ", ".join((".json", ".jsonl", *kinds))
        raise DataError(f"{path}: files ending in {path.suffix!r} are not supported (choices: {choices})")
    return kinds[path.suffix]
