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

from astraflow.config import Config, Use, load_component
from astraflow.errors import ConfigError, DataError, Error
from astraflow.protocols import TaskSource
from astraflow.tasks.config import (
    EnvironmentConfig,
    EnvironmentSourceConfig,
    JsonlSourceConfig,
    TaskSourceConfig,
)
from astraflow.tasks.environment import make_environment, with_environment
from astraflow.tasks.rows import shorten, task_from_row
from astraflow.tasks.selection import select_fitting
from astraflow.tasks.variants import PromptsConfig, SourceContext, SourceVariant
from astraflow.types import Task
from astraflow.user_input.mistakes import near_path
from astraflow.user_input.own_code import describe_error
from astraflow.user_input.user_files import check_regular, format_path, is_there

__all__ = ["ListSource", "make_source", "missing_file_error", "select_tasks"]

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
            return select_tasks(
                _jsonl_tasks(config, name), config, where=config.path, tokenizer_dir=tokenizer_dir
            )
        case EnvironmentSourceConfig():
            return _EnvironmentSource(config, environments or {}, name=name)
        case SourceVariant():
            context = SourceContext(name, workflow, tokenizer_dir)
            return _make_checked(lambda: config.make(context), f"the source {config.name!r}")
        case Use():
            maker = load_component(config, where="source")
            return _make_checked(lambda: maker(**config.args), f"source.use = {config.use!r}")


class ListSource:
    """Tasks held in memory. Example: `len(ListSource([Task(id="a", source="s", prompt="2 + 3")])) == 1`."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = tuple(tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, idx: int) -> Task:
        """Task number `idx`, from 0."""
        return self._tasks[idx]


def select_tasks(
    tasks: list[Task], config: PromptsConfig, *, where: str, tokenizer_dir: Path | None
) -> ListSource:
    """Selects the tasks that the config keeps. `where` names the source in messages."""

    def itself(task: Task) -> Task:
        return task

    return ListSource(select_fitting(tasks, config, task_of=itself, where=where, tokenizer_dir=tokenizer_dir))


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
        self._environment = config.choose_environment(environments)
        made = make_environment(self._environment, environments[self._environment])
        try:
            tasks = made.tasks(config.split)
        except SystemExit as err:
            raise DataError(
                f"tasks.environments.{self._environment}: tasks({config.split!r}) called exit({err})"
            ) from err
        except Error:
            raise
        except Exception as err:  # user code may raise anything
            raise DataError(
                f"tasks.environments.{self._environment}: tasks({config.split!r}) raised "
                f"{describe_error(err)}"
            ) from err
        if isinstance(tasks, Sequence):  # an environment may return a plain list of tasks
            tasks = ListSource(tasks)
        where = f"tasks.environments.{self._environment}: tasks({config.split!r})"
        self._tasks = _check_source(tasks, where)

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
            where = config.row_place(idx)
            task = Task(id=f"{name or path.stem}/{idx}", source=name, prompt="")
            tasks.append(task_from_row(_jsonl_row(line, where), config, task=task, where=where))
    if not tasks:
        raise DataError(f"{path} has no tasks; expected one JSON object per line")
    return tasks


def _read_text(path: Path) -> str:
    """The text of a file. Raises: DataError that names the line at which it is not UTF-8."""
    if not is_there(path):
        raise missing_file_error(path)
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


def missing_file_error(path: Path) -> DataError:
    """The error for a file of tasks that does not exist, with the nearest path that does."""
    return DataError(f"{format_path(path)} does not exist (looked in {Path.cwd()}){near_path(path)}")


def _jsonl_row(line: str, where: str) -> Mapping[str, Any]:
    excerpt = shorten(line if line.isprintable() else repr(line))
    try:
        row = json.loads(line)
    except RecursionError as err:
        raise DataError(f"{where} is nested too deeply: {excerpt}") from err
    except ValueError as err:
        raise DataError(f"{where} is not valid JSON: {err}; it reads {excerpt}{_OTHER_FILES}") from err
    if not isinstance(row, dict):
        raise DataError(f"{where} holds {excerpt}; expected a JSON object{_OTHER_FILES}")
    return cast("dict[str, Any]", row)


def _make_checked(make: Callable[[], object], what: str) -> TaskSource:
    """Makes a source with code of others. Raises: ConfigError or DataError that names `what`."""
    try:
        source = make()
    except SystemExit as err:
        raise DataError(f"{what} called exit({err}) instead of making a source") from err
    except Error:
        raise
    except Exception as err:  # user code may raise anything
        raise DataError(f"{what} could not be made: it raised {describe_error(err)}") from err
    return _check_source(source, what)


def _check_source(source: object, where: str) -> TaskSource:
    if not (hasattr(source, "__len__") and callable(getattr(source, "task", None))):
        raise ConfigError(
            f"{where} made a {type(source).__name__}; expected an object with __len__() and task(idx)"
        )
    return cast("TaskSource", source)
