"""Indexes that workflows search: built once into a folder, or in memory from a few documents.

A folder is an index if it has a manifest, which is written last. `check_index` reads no more than that;
`open_index` opens an index once per process, whoever asks for it. `SearchIndex.search` may be called by
several threads.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Literal, Protocol, cast

import msgspec

from astraflow.addons.search.retrieval.bm25 import Bm25
from astraflow.addons.search.retrieval.config import FolderIndexConfig, IndexConfig, MemoryIndexConfig
from astraflow.addons.search.retrieval.dense import Dense, EncoderSettings
from astraflow.addons.search.retrieval.documents import Document, DocumentFile, document_from, written_offsets
from astraflow.config import Use, check_args, load_attr
from astraflow.errors import ConfigError, DataError, QueryError
from astraflow.user_input.own_code import described

__all__ = [
    "FORMAT",
    "MAX_QUERY_CHARS",
    "IndexManifest",
    "SearchIndex",
    "build_index",
    "check_index",
    "open_index",
]

FORMAT = 1
"""Raised when an index of before cannot be read any more."""
MAX_QUERY_CHARS = 1_000
"""Characters of a query that are searched for; a longer one is mostly a model that repeats itself."""
_MANIFEST = "index.json"
_DOCUMENTS = "documents.jsonl"
_OFFSETS = "offsets.npy"


class _Retriever(Protocol):
    """Finds texts by their numbers."""

    def search(self, query: str, num: int) -> list[int]:
        """Numbers of at most `num` texts, the best first. Raises: QueryError."""
        ...

    def save(self, folder: Path) -> None:
        """Writes what `loaded` reads."""
        ...


class SearchIndex:
    """Documents and what finds them. Example: `index.search("capital of France", num=3)[0].title`."""

    def __init__(self, documents: Sequence[Document] | DocumentFile, retriever: _Retriever) -> None:
        self._documents = documents
        self._retriever = retriever

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, query: str, *, num: int) -> list[Document]:
        """At most `num` documents, the best first; none if none fits.

        Raises: QueryError if the query cannot be searched for, e.g. because it has only stop words.
        """
        words = " ".join(query.split())[:MAX_QUERY_CHARS]
        if not words:
            raise QueryError("the query is empty")
        return [self._documents[idx] for idx in self._retriever.search(words, num)]


class IndexManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `index.json`."""

    format: int
    kind: Literal["bm25", "dense"]
    library: str
    """Library and version that wrote the index."""
    num_documents: int


# --- opening --------------------------------------------------------------------------------------


def check_index(config: IndexConfig) -> None:
    """Checks what can be known of an index without opening it.

    Raises: DataError if it is not there, is not whole, or was built by another version; ConfigError if what
    it needs is not installed, or its documents come from a function that cannot be called.
    """
    if isinstance(config, FolderIndexConfig):
        manifest = _read_manifest(Path(config.path).expanduser())
        (Bm25 if manifest.kind == "bm25" else Dense).library_version()
        return
    Bm25.library_version()
    _documents_function(config.documents)


def open_index(config: IndexConfig) -> SearchIndex:
    """The index of a config; later calls of the process return the same one. May take long: call a thread.

    Raises: as `check_index`.
    """
    key = config.model_dump_json()
    with _opening:
        if key not in _OPEN:
            _OPEN[key] = _opened(config)
        return _OPEN[key]


_opening = Lock()
"""Those who ask while an index is opened wait for it."""
_OPEN: dict[str, SearchIndex] = {}
"""The indexes of this process, by their configs: training and evaluation sets share them."""


def _opened(config: IndexConfig) -> SearchIndex:
    if isinstance(config, MemoryIndexConfig):
        documents = _made_documents(config.documents)
        return SearchIndex(documents, Bm25.built(document.whole for document in documents))
    return _loaded(Path(config.path).expanduser())


def _read_manifest(folder: Path) -> IndexManifest:
    how = f"build it with `astraflow data index DOCUMENTS --out {folder}`"
    try:
        manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=IndexManifest)
    except FileNotFoundError as err:
        raise DataError(f"there is no search index in {folder}; {how}") from err
    except (OSError, msgspec.DecodeError) as err:
        raise DataError(f"{folder / _MANIFEST} cannot be read: {err}; remove the folder and {how}") from err
    if manifest.format != FORMAT:
        raise DataError(
            f"the search index in {folder} has the format {manifest.format}, and this version of AstraFlow "
            f"reads {FORMAT}; remove the folder and {how}"
        )
    return manifest


def _loaded(folder: Path) -> SearchIndex:
    manifest = _read_manifest(folder)
    kind = Bm25 if manifest.kind == "bm25" else Dense
    try:
        documents = DocumentFile(folder / _DOCUMENTS, folder / _OFFSETS)
        retriever = kind.loaded(folder)
    except ConfigError:
        raise
    # The libraries raise whatever a damaged file, or one of another version, leads to.
    except Exception as err:
        raise DataError(
            f"the search index in {folder} was written by {manifest.library} and cannot be read by "
            f"{kind.library_version()}: {described(err)}; remove the folder and build it again with "
            f"`astraflow data index`"
        ) from err
    if len(documents) != manifest.num_documents:
        raise DataError(
            f"{folder} has {len(documents)} documents instead of {manifest.num_documents}; remove the folder "
            "and build it again with `astraflow data index`"
        )
    return SearchIndex(documents, retriever)


def _documents_function(use: Use) -> Callable[..., Sequence[Mapping[str, str]]]:
    where = "index.documents"
    function = load_attr(use.use, where=f"{where}.use")
    check_args(function, use.args, where=f"{where}.args")
    return cast("Callable[..., Sequence[Mapping[str, str]]]", function)


def _made_documents(use: Use) -> list[Document]:
    """Raises: DataError if the function fails, or returns something else than documents."""
    try:
        rows = list(_documents_function(use)(**use.args))
    except (ConfigError, DataError):
        raise
    except Exception as err:  # code of the user's, which may raise anything
        raise DataError(f"index.documents: {use.use} raised {described(err)}") from err
    found = [document_from(row, where=f"{use.use}, document {idx}") for idx, row in enumerate(rows)]
    if not found:
        raise DataError(f"index.documents: {use.use} returned no documents")
    return found


# --- building -------------------------------------------------------------------------------------


def build_index(
    documents: Path,
    out: Path,
    *,
    encoder: EncoderSettings | None = None,
    limit: int = 0,
    progress: Callable[[str], object],
) -> IndexManifest:
    """Builds an index of a JSONL file into a folder, which appears as a whole or not at all.

    `encoder`: makes it a dense index; None: BM25. `limit`: documents to take, the first ones; 0: all.

    Raises: DataError if the file is missing or holds something else, or the folder is not free; ConfigError
    if a library is missing.
    """
    if not documents.is_file():
        raise DataError(f"{documents} does not exist; expected a JSONL file with `title` and `text`")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is not an empty folder; choose another one, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        _place(documents, fresh / _DOCUMENTS)
        num = written_offsets(fresh / _DOCUMENTS, fresh / _OFFSETS, limit=limit)
        if not num:
            raise DataError(f"{documents} holds no documents")
        progress(f"{num:,} documents")
        texts = (document.whole for document in DocumentFile(fresh / _DOCUMENTS, fresh / _OFFSETS))
        if encoder is None:
            library = Bm25.library_version()
            Bm25.built(texts).save(fresh)
        else:
            library = Dense.library_version()
            Dense.built(texts, encoder, progress=lambda done: progress(f"{done:,} embedded")).save(fresh)
        manifest = IndexManifest(
            format=FORMAT, kind="dense" if encoder else "bm25", library=library, num_documents=num
        )
        (fresh / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        if out.exists():
            out.rmdir()
        fresh.rename(out)
    return manifest


def _place(documents: Path, place: Path) -> None:
    """The documents belong to the index: a hard link where the file system allows it, else a copy."""
    try:
        os.link(documents, place)
    except OSError:
        shutil.copyfile(documents, place)
