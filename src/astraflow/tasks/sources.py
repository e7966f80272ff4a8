"""Makes the task sources of a recipe.

A source is fixed and ordered: the same index always means the same task. Generated tasks are made on request.
Files are read once, when the source is made, so a broken line is reported before anything starts. Libraries
are imported only by the sources that need them.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from astraflow.config import Config, Use, check_args, load_attr
from astraflow.errors import ConfigError, DataError, Error
from astraflow.protocols import TaskSource
from astraflow.service.progress_bars import progress_bars_off
from astraflow.tasks.config import (
    EnvironmentConfig,
    EnvironmentSourceConfig,
    HubSourceConfig,
    JsonlSourceConfig,
    TaskSourceConfig,
)
from astraflow.tasks.environment import choose_environment, make_environment, with_environment
from astraflow.tasks.rows import row_place, shorten, task_from_row
from astraflow.tasks.selection import select_fitting
from astraflow.tasks.variants import SourceContext, SourceVariant
from astraflow.types import Task
from astraflow.user_input.extras import install_command
from astraflow.user_input.hub_names import split_revision
from astraflow.user_input.mistakes import hint, near_path
from astraflow.user_input.own_code import described
from astraflow.user_input.user_files import check_regular, is_there, shown_path

__all__ = ["ListSource", "make_source"]

_BYTE_ORDER_MARK = "\ufeff"
_OTHER_FILES = "; {name: datasets} reads files of other kinds (one JSON array, CSV, parquet)"


def make_source(
    config: TaskSourceConfig,
    *,
    name: str = "",
    environments: Mapping[str, EnvironmentConfig] | None = None,
    workflow: Config | None = None,
    tokenizer_dir: Path | None = None,
) -> TaskSource:
    """Makes the source of a config.

    `name`: the source's name in the recipe, which is also the tasks' `source` and the start of their ids.
    `environments`: the environments of the recipe. `workflow`: the workflow that runs the tasks.
    `tokenizer_dir`: the model folder whose tokenizer counts the tokens of prompts.
    Raises: ConfigError for an unknown data set, argument or component; DataError for a broken or missing
    file.
    """
    match config:
        case JsonlSourceConfig():
            return _select(_jsonl_tasks(config, name), config, tokenizer_dir)
        case HubSourceConfig():
            return _select(_hub_tasks(config, name), config, tokenizer_dir)
        case EnvironmentSourceConfig():
            return _EnvironmentSource(config, environments or {}, name=name)
        case SourceVariant():
            context = SourceContext(name, workflow, tokenizer_dir)
            return _make_checked(lambda: config.make(context), f"the source {config.name!r}")
        case Use():
            return _user_source(config)


class ListSource:
    """Tasks held in memory. Example: `len(ListSource([Task(id="a", source="s", prompt="2 + 3")])) == 1`."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = tuple(tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, idx: int) -> Task:
        """Task number `idx`, from 0."""
        return self._tasks[idx]


def _select(
    tasks: list[Task], config: JsonlSourceConfig | HubSourceConfig, tokenizer_dir: Path | None
) -> ListSource:
    """Selects the tasks that the config keeps."""

    def itself(task: Task) -> Task:
        return task

    return ListSource(
        select_fitting(tasks, config, task_of=itself, where=config.path, tokenizer_dir=tokenizer_dir)
    )


class _EnvironmentSource:
    """The tasks of one split of an environment.

    Each task gets the source's name as its `source` and at the start of its id, and the environment's name.
    """

    def __init__(
        self,
        config: EnvironmentSourceConfig,
        environments: Mapping[str, EnvironmentConfig],
        *,
        name: str,
    ) -> None:
        """`environments`: the environments of the recipe.

        Raises: ConfigError if the environment cannot be made; DataError if its `tasks` calls `exit`.
        """
        self._name = name
        self._environment = choose_environment(config, environments)
        made = make_environment(self._environment, environments[self._environment])
        try:
            found = made.tasks(config.split)
        except SystemExit as err:
            raise DataError(
                f"tasks.environments.{self._environment}: tasks({config.split!r}) called exit({err})"
            ) from err
        except Error:
            raise
        except Exception as err:  # user code may raise anything
            raise DataError(
                f"tasks.environments.{self._environment}: tasks({config.split!r}) raised {described(err)}"
            ) from err
        if isinstance(found, Sequence):  # an environment may return a plain list of tasks
            found = ListSource(found)
        where = f"tasks.environments.{self._environment}: tasks({config.split!r})"
        self._tasks = _check_source(found, where)

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, idx: int) -> Task:
        """Task number `idx`, from 0."""
        task = self._tasks.task(idx)
        named = msgspec.structs.replace(task, id=f"{self._name}/{task.id}", source=self._name)
        return with_environment(named, self._environment)


def _jsonl_tasks(config: JsonlSourceConfig, name: str) -> list[Task]:
    path = Path(config.path).expanduser()
    tasks: list[Task] = []
    for idx, line in enumerate(_read_text(path).split("\n")):
        # Concatenated files may have a byte order mark in the middle.
        line = line.removeprefix(_BYTE_ORDER_MARK)
        if line.strip():
            where = row_place(config, idx)
            task = Task(id=f"{name or path.stem}/{idx}", source=name, prompt="")
            tasks.append(task_from_row(_jsonl_row(line, where), config, task=task, where=where))
    if not tasks:
        raise DataError(f"{path} has no tasks; expected one JSON object per line")
    return tasks


def _read_text(path: Path) -> str:
    """The text of a file. Raises: DataError that names the line at which it is not UTF-8."""
    if not is_there(path):
        raise _missing_file_error(path)
    check_regular(path, "the task file")
    try:
        data = path.read_bytes()
    except OSError as err:
        raise DataError(f"{path} cannot be read: {err}") from err
    try:
        return data.decode()
    except UnicodeDecodeError as err:
        line = data.count(b"\n", 0, err.start) + 1
        is_utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        reason = "it starts with the byte order mark of UTF-16" if is_utf_16 else err
        raise DataError(
            f"{path}, line {line} cannot be read as UTF-8 text: {reason}; save the file as UTF-8"
        ) from err


def _missing_file_error(path: Path) -> DataError:
    return DataError(f"{shown_path(path)} does not exist (looked in {Path.cwd()}){near_path(path)}")


def _jsonl_row(line: str, where: str) -> Mapping[str, Any]:
    shown = shorten(line if line.isprintable() else repr(line))
    try:
        row = json.loads(line)
    except RecursionError as err:
        raise DataError(f"{where} is nested too deeply: {shown}") from err
    except ValueError as err:
        raise DataError(f"{where} is not valid JSON: {err}; it reads {shown}{_OTHER_FILES}") from err
    if not isinstance(row, dict):
        raise DataError(f"{where} holds {shown}; expected a JSON object{_OTHER_FILES}")
    return cast("dict[str, Any]", row)


def _hub_tasks(config: HubSourceConfig, name: str) -> list[Task]:
    rows = _load_rows(config)
    tasks: list[Task] = []
    for idx, row in enumerate(rows):
        task = Task(id=f"{name or Path(config.path).stem}/{idx}", source=name, prompt="")
        tasks.append(task_from_row(row, config, task=task, where=row_place(config, idx)))
    if not tasks:
        raise DataError(f"data set {config.path}, split {config.split!r}, has no rows")
    return tasks


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
        raise _missing_file_error(path)
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


def _user_source(config: Use) -> TaskSource:
    maker = cast("Callable[..., object]", load_attr(config.use, where="source.use"))
    check_args(maker, config.args, where="source.args")
    return _make_checked(lambda: maker(**config.args), f"source.use = {config.use!r}")


def _make_checked(make: Callable[[], object], what: str) -> TaskSource:
    """Makes a source with code of others. Raises: ConfigError or DataError that names `what`."""
    try:
        source = make()
    except SystemExit as err:
        raise DataError(f"{what} called exit({err}) instead of making a source") from err
    except Error:
        raise
    except Exception as err:  # user code may raise anything
        raise DataError(f"{what} could not be made: it raised {described(err)}") from err
    return _check_source(source, what)


def _check_source(source: object, where: str) -> TaskSource:
    if not (hasattr(source, "__len__") and callable(getattr(source, "task", None))):
        raise ConfigError(
            f"{where} made a {type(source).__name__}; expected an object with __len__() and task(idx)"
        )
    return cast("TaskSource", source)
