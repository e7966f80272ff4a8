"""Exports episodes: rows of the index with the text of each episode, or traces for other systems."""

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from astraflow import wire
from astraflow.addons.view.chat_rows import chat_of
from astraflow.addons.view.filters import EpisodeFilter
from astraflow.addons.view.search import EpisodeDict, all_found
from astraflow.addons.view.stored_episodes import StoredEpisodes
from astraflow.addons.view.token_text import TokenText
from astraflow.addons.view.trace_formats import ChatRow, atif_of, trace_of
from astraflow.addons.view.word_search import WordSearch
from astraflow.errors import ConfigError, Error
from astraflow.recipe.run_folder import RunFolder
from astraflow.types import Message, Trajectory

__all__ = ["EPISODE_COLUMNS", "TRACES", "chats", "exported", "json_line", "load_pyarrow", "write_parquet"]

_ROW_GROUP = 1000
EPISODE_COLUMNS = {
    "id": "int64",
    "kind": "string",
    "group": "int64",
    "episode": "int64",
    "attempt": "int64",
    "part": "int64",
    "at_s": "float64",
    "duration_s": "float64",
    "task": "string",
    "policy": "string",
    "role": "string",
    "worker": "string",
    "reward": "float64",
    "score": "float64",
    "advantage": "float64",
    "tokens": "int64",
    "trained_tokens": "int64",
    "turns": "int64",
    "oldest_version": "int64",
    "newest_version": "int64",
    "finish": "string",
    "error": "string",
    "fate": "string",
    "step": "int64",
    "staleness": "int64",
    "text": "string",
    "completion": "string",
    "messages": "string",
    "metrics": "string",
}
"""Column -> its type in Parquet."""
_NOT_IN_CHATS = ("id", "tokens", "trained_tokens", "turns")
_EPISODE = ("kind", "group", "episode", "attempt")


def _as_atif(rows: Iterable[ChatRow]) -> Iterator[ChatRow]:
    for _, parts in groupby(rows, key=itemgetter(*_EPISODE)):
        yield atif_of(sorted(parts, key=itemgetter("part")))


TRACES: dict[str, Callable[[Iterable[ChatRow]], Iterable[ChatRow]]] = {
    "atif": _as_atif,
    "messages": iter,
    "trace": partial(map, trace_of),
}
"""Format -> what makes its documents of the rows of `chats`."""


def exported(
    database: sqlite3.Connection, folder: RunFolder, filters: EpisodeFilter, *, limit: int
) -> Iterator[EpisodeDict]:
    """Yields up to `limit` episodes, newest first, each with what was said. Raises: sqlite3.Error.

    `text` is the text of the episode's tokens or, if there are no tokens, of its messages. `completion` is
    the part of it that the policy sampled, with a line per turn. `messages` has the messages that were kept,
    in the form of chat templates. `metrics` has the parts of the reward and all other metrics. What is no
    longer available is empty.
    """
    texts = TokenText(folder)
    with StoredEpisodes(database, folder.journal) as stored:
        words = WordSearch(database, stored, texts)
        for row in all_found(database, filters, limit=limit, words=words):
            text = completion = ""
            messages: Sequence[Message] = ()
            with contextlib.suppress(Error):
                if (trajectory := stored.tokens(row["id"])) is not None:
                    ids = wire.array(trajectory.token_ids, "int32").tolist()
                    text = texts.text(trajectory.policy, ids)
                    completion = _sampled_text(trajectory, ids, texts)
            with contextlib.suppress(Error):
                messages = stored.messages(row["id"])
                text = text or "\n".join(message.content for message in messages)
                replies = [message.content for message in messages if message.role == "assistant"]
                completion = completion or "\n".join(replies)
            yield {
                **row,
                "text": text,
                "completion": completion,
                "messages": [_plain(message) for message in messages],
                "metrics": stored.result(row)[0],
            }


def chats(
    database: sqlite3.Connection, folder: RunFolder, filters: EpisodeFilter, *, limit: int
) -> Iterator[ChatRow]:
    """Yields up to `limit` episodes, newest first, as rows of messages, with tokens if they are available.

    Episodes of which neither tokens nor messages are left are skipped. Raises: sqlite3.Error.
    """
    texts = TokenText(folder)
    with StoredEpisodes(database, folder.journal) as stored:
        words = WordSearch(database, stored, texts)
        for row in all_found(database, filters, limit=limit, words=words):
            chat: ChatRow = {}
            with contextlib.suppress(Error):
                chat = {"messages": [_plain(message) for message in stored.messages(row["id"])], "tools": []}
            with contextlib.suppress(Error):
                if (trajectory := stored.tokens(row["id"])) is not None:
                    chat = chat_of(trajectory, partial(texts.text, trajectory.policy))
            if chat.get("messages"):
                place = f"{row['kind']}/{row['group']}.{row['episode']}.{row['attempt']}/{row['part']}"
                rest = {k: v for k, v in row.items() if v is not None and k not in _NOT_IN_CHATS}
                name = folder.path.resolve().name
                yield {"id": f"{name}/{place}", **chat, **rest, "metrics": stored.result(row)[0]}


def _plain(message: Message) -> dict[str, str]:
    """Returns a message as chat templates take it."""
    plain = {"role": message.role, "content": message.content}
    return plain | ({"name": message.name} if message.name else {})


def _sampled_text(trajectory: Trajectory, ids: Sequence[int], texts: TokenText) -> str:
    """Returns the text of a trajectory's sampled tokens, with a line per turn."""
    mask = wire.array(trajectory.mask, "uint8").tolist()
    turns = [
        [token_id for token_id, _ in tokens]
        for is_sampled, tokens in groupby(zip(ids, mask, strict=True), key=itemgetter(1))
        if is_sampled
    ]
    return "\n".join(texts.text(trajectory.policy, turn) for turn in turns)


def json_line(row: EpisodeDict) -> bytes:
    """Encodes one line of JSONL. Text that isn't valid Unicode is escaped."""
    return json.dumps(row).encode("ascii") + b"\n"


def load_pyarrow() -> Any:
    """Imports pyarrow, which the extra `parquet` installs. Raises: ConfigError if it is missing."""
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError as err:
        raise ConfigError('Parquet needs a package: pip install "astraflow[parquet]"') from err


def write_parquet(rows: Iterable[EpisodeDict], out: Path | BinaryIO) -> int:
    """Writes rows to a file and returns their number. Raises: ConfigError without pyarrow; OSError."""
    arrow = load_pyarrow()
    schema = arrow.schema([(name, arrow.type_for_alias(kind)) for name, kind in EPISODE_COLUMNS.items()])
    num = 0
    with arrow.parquet.ParquetWriter(out, schema, compression="zstd") as writer:
        for part in _parts(rows):
            writer.write_table(arrow.Table.from_pylist(part, schema=schema))
            num += len(part)
    return num


def _parts(rows: Iterable[EpisodeDict]) -> Iterator[list[EpisodeDict]]:
    """Splits the rows into pieces of `_ROW_GROUP`, with text that Parquet can hold."""
    part: list[EpisodeDict] = []
    for row in rows:
        part.append({name: _clean(value) for name, value in row.items()})
        if len(part) == _ROW_GROUP:
            yield part
            part = []
    if part:
        yield part


def _clean(value: object) -> object:
    """Writes lists and mappings as JSON, and replaces lone surrogates in text, which Parquet can't hold."""
    value = json.dumps(value) if isinstance(value, dict | list) else value
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
