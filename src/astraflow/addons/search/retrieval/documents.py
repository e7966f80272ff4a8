"""The documents of a search index: JSONL files whose lines have `title` and `text`."""

import json
import mmap
import unicodedata
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import DataError

__all__ = ["Document", "DocumentFile", "document_from", "read_documents", "write_offsets"]


@dataclass(frozen=True, slots=True)
class Document:
    """One document, or one passage of a longer document."""

    title: str
    text: str

    @property
    def whole(self) -> str:
        """The text that is indexed: title and text, which count alike, in Unicode's form NFC."""
        return unicodedata.normalize("NFC", f"{self.title}\n{self.text}")


def document_from(row: Mapping[str, Any], *, where: str) -> Document:
    """Reads the document of a row. Raises: DataError if `text` is missing, or a value is not valid text."""
    title = row.get("title", "")
    text = row.get("text")
    if not isinstance(title, str) or not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: expected a mapping with the text `text`, and optionally the text `title`")
    try:
        (title + text).encode()
    except UnicodeEncodeError as err:
        raise DataError(f"{where}: its text is not valid Unicode: {err}; correct it, or remove it") from err
    return Document(title, text)


def read_documents(path: str) -> Sequence[Mapping[str, str]]:
    """Reads the documents of a JSONL file that fits into memory.

    Raises: DataError if the file is missing, or if a line is not a document.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            documents = [
                _parse_document(line, where=f"{path}, line {number}") for number, line in enumerate(file, 1)
            ]
    except OSError as err:
        raise DataError(f"the documents {path} cannot be read: {err.strerror}") from err
    return [{"title": document.title, "text": document.text} for document in documents]


def _parse_document(line: bytes, *, where: str) -> Document:
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise DataError(f"{where} is not valid JSON: {err}") from err
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object")
    return document_from(cast("dict[str, Any]", row), where=where)


# --- documents that stay on disk ------------------------------------------------------------------


def write_offsets(documents: Path, offsets: Path, *, limit: int = 0) -> int:
    """Writes the offset of each line of a JSONL file, and the end of the last. Returns the number of lines.

    `limit`: number of lines to use, from the first; 0: all.
    """
    ends = array("q", [0])
    with documents.open("rb") as file:
        for line in file:
            ends.append(ends[-1] + len(line))
            if limit and len(ends) > limit:
                break
    np.save(offsets, np.array(ends, dtype=np.int64))
    return len(ends) - 1


class DocumentFile:
    """The documents of a JSONL file, each of which is read on request. Threads may share it.

    Example: `DocumentFile(Path("documents.jsonl"), Path("offsets.npy"))[0].title`.
    """

    def __init__(self, documents: Path, offsets: Path) -> None:
        """Raises: OSError or ValueError if the files are missing or incomplete."""
        self._name = str(documents)
        self._offsets: NDArray[np.int64] = np.load(offsets, mmap_mode="r")
        with documents.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._content) < self._offsets[-1]:
            raise ValueError(f"{documents} has {len(self._content)} of {self._offsets[-1]} bytes")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[Document]:
        return (self[idx] for idx in range(len(self)))

    def __getitem__(self, idx: int) -> Document:
        if not 0 <= idx < len(self):
            raise IndexError(idx)
        line = self._content[int(self._offsets[idx]) : int(self._offsets[idx + 1])]
        return _parse_document(line, where=f"{self._name}, line {idx + 1}")
