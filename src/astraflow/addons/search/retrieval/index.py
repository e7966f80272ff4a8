"""Indexes that workflows search: built once into a folder, or in memory from a few documents.

A folder is an index if it has a manifest, which is written last. `check_index` reads only the manifest.
`open_index` opens each index once per process. Several threads may call `SearchIndex.search`.
"""

import os
import shutil
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Literal, Protocol, cast

import msgspec

from astraflow.addons.search.retrieval.bm25 import Bm25
from astraflow.addons.search.retrieval.config import FolderIndexConfig, MemoryIndexConfig
from astraflow.addons.search.retrieval.dense import Dense, EncoderSettings
from astraflow.addons.search.retrieval.documents import Document, DocumentFile, document_from, write_offsets
from astraflow.addons.search.retrieval.on_disk import OnDisk
from astraflow.config import Use, check_args, load_attr
from astraflow.errors import ConfigError, DataError, QueryError
from astraflow.user_input.new_folder import is_free, new_folder
from astraflow.user_input.own_code import describe_error

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
"""Increased when older indexes cannot be read any more."""
MAX_QUERY_CHARS = 1_000
"""Number of characters after which a query is cut; a longer one is mostly a model that repeats itself."""
_MANIFEST = "index.json"
_DOCUMENTS = "documents.jsonl"
_OFFSETS = "offsets.npy"


class _Retriever(Protocol):
    """Finds texts by their numbers."""

    def search(self, query: str, num: int) -> list[int]:
        """Numbers of at most `num` texts, the best first. Raises: QueryError."""
        ...

    def save(self, folder: Path) -> None:
        """Writes what `load` reads."""
        ...


class SearchIndex:
    """Documents with their retriever. Example: `index.search("capital of France", num=3)[0].title`."""

    def __init__(self, documents: Sequence[Document] | DocumentFile, retriever: _Retriever) -> None:
        self._documents = documents
        self._retriever = retriever

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, query: str, *, num: int) -> list[Document]:
        """At most `num` documents, the best first; empty if none matches.

        Raises: QueryError if the query cannot be searched for, e.g. because it has only stop words.
        """
        words = unicodedata.normalize("NFC", " ".join(query.split())[:MAX_QUERY_CHARS])
        if not words:
            raise QueryError("the query is empty")
        return [self._documents[idx] for idx in self._retriever.search(words, num)]


class IndexManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `index.json`."""

    format: int
    kind: Literal["bm25", "dense", "tantivy"]
    library: str
    """Library and version that wrote the index."""
    num_documents: int


# --- opening --------------------------------------------------------------------------------------


def check_index(config: FolderIndexConfig | MemoryIndexConfig) -> None:
    """Checks an index as far as possible without opening it.

    Raises: DataError if it is missing or incomplete, or was built by another version; ConfigError if a
    library is not installed, or if its documents come from a function that cannot be called.
    """
    if isinstance(config, FolderIndexConfig):
        manifest = _read_manifest(Path(config.path).expanduser())
        _KINDS[manifest.kind].library_version()
        return
    Bm25.library_version()
    _documents_function(config.documents)


def open_index(config: FolderIndexConfig | MemoryIndexConfig) -> SearchIndex:
    """Opens the index of a config; later calls in this process return the same object.

    Opening may take long, so call it in a thread. Raises: as `check_index`.
    """
    key = config.model_dump_json()
    with _opening:
        if key in _OPEN:
            return _OPEN[key]
        if isinstance(config, MemoryIndexConfig):
            documents = _make_documents(config.documents)
            index = SearchIndex(documents, Bm25.build(document.whole for document in documents))
        else:
            index = _load_folder(Path(config.path).expanduser())
        _OPEN[key] = index
        return index


_opening = Lock()
"""Held while an index is opened, so others that need it wait instead of opening it again."""
_OPEN: dict[str, SearchIndex] = {}
"""The indexes of this process, by their configs: training and evaluation sets share them."""


_KINDS: Mapping[str, type[Bm25] | type[Dense] | type[OnDisk]] = {
    kind.kind: kind for kind in (Bm25, Dense, OnDisk)
}


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


def _load_folder(folder: Path) -> SearchIndex:
    manifest = _read_manifest(folder)
    kind = _KINDS[manifest.kind]
    try:
        documents = DocumentFile(folder / _DOCUMENTS, folder / _OFFSETS)
        retriever = kind.load(folder)
    except ConfigError:
        raise
    # For a damaged file or one of another version, the libraries may raise anything.
    except Exception as err:
        raise DataError(
            f"the search index in {folder} was written by {manifest.library} and cannot be read by "
            f"{kind.library_version()}: {describe_error(err)}; remove the folder and build it again with "
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


def _make_documents(use: Use) -> list[Document]:
    """Calls the user's function. Raises: DataError if it fails, or does not return documents."""
    try:
        rows = list(_documents_function(use)(**use.args))
    except (ConfigError, DataError):
        raise
    except Exception as err:  # user code may raise anything
        raise DataError(f"index.documents: {use.use} raised {describe_error(err)}") from err
    documents = [document_from(row, where=f"{use.use}, document {idx}") for idx, row in enumerate(rows)]
    if not documents:
        raise DataError(f"index.documents: {use.use} returned no documents")
    return documents


# --- building -------------------------------------------------------------------------------------


def build_index(
    documents: Path,
    out: Path,
    *,
    encoder: EncoderSettings | None = None,
    is_on_disk: bool = False,
    limit: int = 0,
    progress: Callable[[str], object],
) -> IndexManifest:
    """Builds an index of a JSONL file in a folder, which appears completely or not at all.

    `encoder`: embeds documents for a dense index; None: BM25. `is_on_disk`: BM25 with little memory. `limit`:
    number of documents to use, from the first; 0: all.
    Raises: DataError if the file is missing or invalid, or if the folder exists and is not empty; ConfigError
    if a library is missing.
    """
    if not documents.is_file():
        raise DataError(f"{documents} does not exist; expected a JSONL file with `title` and `text`")
    if not is_free(out):
        raise DataError(f"{out} exists and is not an empty folder; choose another one, or remove it")
    with new_folder(out) as fresh:
        _place(documents, fresh / _DOCUMENTS)
        num = write_offsets(fresh / _DOCUMENTS, fresh / _OFFSETS, limit=limit)
        if not num:
            raise DataError(f"{documents} has no documents")
        progress(f"{num:,} documents")
        texts = (document.whole for document in DocumentFile(fresh / _DOCUMENTS, fresh / _OFFSETS))
        kind = Dense if encoder else OnDisk if is_on_disk else Bm25
        library = kind.library_version()
        if encoder:
            Dense.build(texts, encoder, progress=lambda done: progress(f"{done:,} embedded")).save(fresh)
        elif is_on_disk:
            OnDisk.build(texts, fresh, progress=lambda done: progress(f"{done:,} indexed"))
        else:
            Bm25.build(texts).save(fresh)
        manifest = IndexManifest(format=FORMAT, kind=kind.kind, library=library, num_documents=num)
        (fresh / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    return manifest


def _place(documents: Path, place: Path) -> None:
    """Makes the documents part of the index: a hard link if the file system allows it, else a copy."""
    try:
        os.link(documents, place)
    except OSError:
        shutil.copyfile(documents, place)
