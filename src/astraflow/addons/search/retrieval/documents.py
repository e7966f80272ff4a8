"""The documents that are searched: JSONL files whose lines have `title` and `text`."""

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import DataError

__all__ = ["Document", "DocumentFile", "document_from", "read_documents", "written_offsets"]


@dataclass(frozen=True, slots=True)
class Document:
    """One document, or one passage of a longer one."""

    title: str
    text: str

    @property
    def whole(self) -> str:
        """What is indexed: the title counts like the text."""
        return f"{self.title}\n{self.text}"


def document_from(row: Mapping[str, Any], *, where: str) -> Document:
    """The document of a row. Raises: DataError if it has no text, or `title` or `text` is none."""
    title = row.get("title", "")
    text = row.get("text")
    if not isinstance(title, str) or not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: expected a mapping with `text` and perhaps `title`, both texts")
    try:
        (title + text).encode()
    except UnicodeEncodeError as err:
        raise DataError(f"{where}: its text is not valid Unicode: {err}; correct it, or remove it") from err
    return Document(title, text)


def read_documents(path: str) -> Sequence[Mapping[str, str]]:
    """The documents of a JSONL file that fits into memory.

    Raises: DataError if the file is missing, or a line is no document.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            found = [_parsed(line, where=f"{path}, line {number}") for number, line in enumerate(file, 1)]
    except OSError as err:
        raise DataError(f"the documents {path} cannot be read: {err.strerror}") from err
    return [{"title": document.title, "text": document.text} for document in found]


def _parsed(line: bytes, *, where: str) -> Document:
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise DataError(f"{where} is no JSON: {err}") from err
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object")
    return document_from(cast("dict[str, Any]", row), where=where)


# --- documents that stay on disk ------------------------------------------------------------------


def written_offsets(documents: Path, offsets: Path, *, limit: int = 0) -> int:
    """Writes where each line of a JSONL file begins, and where the last one ends; returns their number.

    `limit`: lines to take; 0 takes all.
    """
    found = [0]
    with documents.open("rb") as file:
        for line in file:
            found.append(found[-1] + len(line))
            if limit and len(found) > limit:
                break
    np.save(offsets, np.array(found, dtype=np.int64))
    return len(found) - 1


class DocumentFile:
    """The documents of a JSONL file, each read when it is asked for. Threads may share it.

    Example: `DocumentFile(Path("documents.jsonl"), Path("offsets.npy"))[0].title`.
    """

    def __init__(self, documents: Path, offsets: Path) -> None:
        """Raises: OSError or ValueError if the files are not there, or are not whole."""
        self._name = str(documents)
        self._offsets: NDArray[np.int64] = np.load(offsets, mmap_mode="r")
        with documents.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._content) < self._offsets[-1]:
            raise ValueError(f"{documents} has {len(self._content)} bytes of {self._offsets[-1]}")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[Document]:
        return (self[idx] for idx in range(len(self)))

    def __getitem__(self, idx: int) -> Document:
        if not 0 <= idx < len(self):
            raise IndexError(idx)
        line = self._content[int(self._offsets[idx]) : int(self._offsets[idx + 1])]
        return _parsed(line, where=f"{self._name}, line {idx + 1}")
