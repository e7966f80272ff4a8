"""Selects the rows of a source that become tasks (those with a short enough prompt, up to a limit), and the
tasks that are checked before a run.

One warning says how many rows are left out. Tokens are counted with the tokenizer's file alone, without
torch, because the dataflow counts them too.
"""

import heapq
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from astraflow.errors import ConfigError, DataError
from astraflow.protocols import TaskSource
from astraflow.tasks.config import TaskSourceConfig
from astraflow.tasks.variants import PromptsConfig, RowsConfig, SourceVariant
from astraflow.types import Task

__all__ = ["longest_prompt", "prompt_counter", "select_fitting", "tasks_to_check"]

_log = logging.getLogger(__name__)
_BATCH = 256
"""Number of prompts that the tokenizer gets at a time, and encodes in parallel."""
_MAX_CHECKED = 256
"""Largest number of tasks that are read if a source was checked when it was written. Each may have half a
megabyte of test cases on disk."""
_MAX_COUNTED = 64
"""Number of prompts, the longest ones, whose tokens are counted."""
_EntryT = TypeVar("_EntryT")


def select_fitting(
    entries: Iterable[_EntryT],
    config: PromptsConfig,
    *,
    task_of: Callable[[_EntryT], Task],
    where: str,
    tokenizer_dir: Path | None,
) -> list[_EntryT]:
    """Selects the entries whose tasks the config keeps, in order.

    `task_of` is called only if prompts must be counted. `where`: names the source in messages.
    Raises: DataError if no entry is left; ConfigError or DataError if the tokenizer cannot be loaded.
    """
    most = config.max_prompt_tokens
    if not most:
        return list(itertools.islice(entries, config.limit or None))
    fitting = list[_EntryT]()
    num_seen = 0
    for entry, num_tokens in _measure(entries, task_of, prompt_counter(tokenizer_dir)):
        num_seen += 1
        if num_tokens <= most:
            fitting.append(entry)
        if config.limit and len(fitting) == config.limit:
            break
    if not fitting:
        raise DataError(
            f"{where}: the prompts of all {num_seen} rows have more than max_prompt_tokens = {most} tokens; "
            "raise it"
        )
    if num_seen > len(fitting):
        _log.warning(
            "%s: %d of %d rows are left out, because their prompts have more than max_prompt_tokens = %d "
            "tokens",
            where,
            num_seen - len(fitting),
            num_seen,
            most,
        )
    return fitting


def tasks_to_check(source: TaskSource, config: TaskSourceConfig) -> Iterator[Task]:
    """The tasks of a source that are checked before a run.

    These are all tasks. If they were checked when they were written, these are at most 256 tasks, spread
    evenly from the first to the last.
    """
    num_tasks = len(source)
    is_checked = isinstance(config, SourceVariant) and config.is_checked
    is_all = not is_checked or num_tasks <= _MAX_CHECKED
    return map(source.task, range(num_tasks) if is_all else _spread(num_tasks))


def _spread(num_tasks: int) -> list[int]:
    """Positions of 256 tasks, spread evenly from the first to the last."""
    return [number * (num_tasks - 1) // (_MAX_CHECKED - 1) for number in range(_MAX_CHECKED)]


def longest_prompt(source: TaskSource, config: TaskSourceConfig, tokenizer_dir: Path) -> int:
    """Number of tokens of the longest prompt of a source.

    Counts the tokens of the prompts with the most bytes. If no tokenizer can be loaded, returns the number of
    bytes, which is an upper bound.
    """
    num_tasks = len(source)
    is_read = isinstance(config, RowsConfig)
    chosen = range(num_tasks) if is_read or num_tasks <= _MAX_CHECKED else _spread(num_tasks)
    texts = heapq.nlargest(
        _MAX_COUNTED, (_text_of(source.task(idx)).encode(errors="replace") for idx in chosen), key=len
    )
    try:
        count = prompt_counter(tokenizer_dir)
    except (ConfigError, DataError):
        return max(map(len, texts), default=0)
    return max(count([text.decode() for text in texts]), default=0)


def prompt_counter(folder: Path | None) -> Callable[[list[str]], list[int]]:
    """Makes a function that counts the tokens of texts.

    Raises: ConfigError if the library is missing, or no folder is given; DataError if the folder's tokenizer
    cannot be loaded.
    """
    try:
        import tokenizers
    except ImportError as err:
        raise ConfigError(
            "max_prompt_tokens needs the package tokenizers: pip install astraflow[torch]"
        ) from err
    if folder is None:
        raise ConfigError("max_prompt_tokens needs a tokenizer, but no model is known here")
    file = folder / "tokenizer.json"
    try:
        tokenizer = cast("Any", tokenizers.Tokenizer).from_file(str(file))
    except Exception as err:  # the library raises plain `Exception` for a missing or broken file
        raise DataError(f"max_prompt_tokens needs {file}, which cannot be loaded: {err}") from err

    def count(texts: list[str]) -> list[int]:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [len(one.ids) for one in encoded]

    return count


def _text_of(task: Task) -> str:
    return "".join([*(message.content for message in task.context), task.prompt])


def _measure(
    entries: Iterable[_EntryT],
    task_of: Callable[[_EntryT], Task],
    count: Callable[[list[str]], list[int]],
) -> Iterator[tuple[_EntryT, int]]:
    """Yields each entry with the number of tokens of its prompt."""
    iterator = iter(entries)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield from zip(batch, count([_text_of(task_of(entry)) for entry in batch]), strict=True)
