"""Rows of a Hugging Face data set: of a local folder or file, or of a name on the hub."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from astraflow.addons.data_sets.config import HubSourceConfig
from astraflow.errors import ConfigError, DataError
from astraflow.service.progress_bars import progress_bars_off
from astraflow.tasks.rows import task_from_row
from astraflow.tasks.sources import ListSource, missing_file_error, select_tasks
from astraflow.types import Task
from astraflow.user_input.extras import install_command
from astraflow.user_input.hub_names import split_revision
from astraflow.user_input.mistakes import hint
from astraflow.user_input.user_files import is_there

__all__ = ["read_split"]


def read_split(config: HubSourceConfig, *, name: str, tokenizer_dir: Path | None) -> ListSource:
    """The tasks of a split, whose ids begin with `name`. Raises: ConfigError or DataError."""
    rows = _load_rows(config)
    tasks: list[Task] = []
    for idx, row in enumerate(rows):
        task = Task(id=f"{name or Path(config.path).stem}/{idx}", source=name, prompt="")
        tasks.append(task_from_row(row, config, task=task, where=config.row_place(idx)))
    if not tasks:
        raise DataError(f"data set {config.path}, split {config.split!r}, has no rows")
    return select_tasks(tasks, config, where=config.path, tokenizer_dir=tokenizer_dir)


def _load_rows(config: HubSourceConfig) -> Iterable[Mapping[str, Any]]:
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
                loaded: Any = datasets.load_from_disk(str(path))
                return cast("Iterable[Mapping[str, Any]]", _split_of(loaded, config))
            if path.is_file():
                kind = _file_kind(path)
                return cast("Any", datasets.load_dataset(kind, data_files=str(path), split="train"))
            name, revision = (str(path), "") if config.is_local else split_revision(config.path)
            revision = revision or None
            subset = config.subset or None
            return cast("Any", datasets.load_dataset(name, subset, split=config.split, revision=revision))
    except DataError:
        raise
    except (OSError, ValueError, KeyError, DatasetsError) as err:
        # Only the cause of the library's error names the line and file that it could not read.
        cause = f": {err.__cause__}" if err.__cause__ else ""
        if isinstance(err.__cause__, UnicodeDecodeError):
            cause += "; save the file as UTF-8"
        raise DataError(f"{where} cannot be loaded: {err}{cause}") from err


def _split_of(loaded: Any, config: HubSourceConfig) -> Any:
    """The split that the config names; a folder of `save_to_disk` has one split, or several by name."""
    if not isinstance(loaded, dict):
        return loaded
    splits = cast("dict[str, Any]", loaded)
    if config.split not in splits:
        raise DataError(
            f"data set {config.path} has no split {config.split!r}{hint(config.split, list(splits))}"
        )
    return splits[config.split]


def _file_kind(path: Path) -> str:
    """The name under which `datasets` loads files of this kind."""
    kinds = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
    if path.suffix not in kinds:
        raise DataError(
            f"{path}: files ending in {path.suffix!r} are not supported (choices: {', '.join(kinds)})"
        )
    return kinds[path.suffix]
