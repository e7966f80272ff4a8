"""BM25 retrieval with the library `bm25s`: finds documents that share rare words with the query."""

import importlib.metadata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, cast

from astraflow.errors import ConfigError, QueryError
from astraflow.user_input.extras import install_command

__all__ = ["Bm25"]

_STOP_WORDS = "english"


def _library() -> Any:
    """Imports the library. Raises: ConfigError with the command that installs it."""
    try:
        import bm25s
    except ImportError as err:
        raise ConfigError(f"BM25 needs bm25s: {install_command('search')}") from err
    return cast("Any", bm25s)


class Bm25:
    """An index of texts, which are identified by their numbers.

    Example: `Bm25.build(["a cat", "a dog"]).search("dog", 1) == [1]`.
    """

    kind: Final = "bm25"

    def __init__(self, index: Any) -> None:
        self._index = index

    @staticmethod
    def library_version() -> str:
        """Name and version of the library that writes the files. Raises: ConfigError if it is missing."""
        _library()
        return f"bm25s {importlib.metadata.version('bm25s')}"

    @classmethod
    def build(cls, texts: Iterable[str]) -> "Bm25":
        """Builds the index of these texts."""
        library = _library()
        tokens = library.tokenize(list(texts), stopwords=_STOP_WORDS, show_progress=False)
        index = library.BM25()
        index.index(tokens, show_progress=False)
        return cls(index)

    @classmethod
    def load(cls, folder: Path) -> "Bm25":
        """Loads the index that `save` wrote; its arrays stay on disk until they are read."""
        return cls(_library().BM25.load(folder, mmap=True, load_corpus=False))

    def save(self, folder: Path) -> None:
        """Writes the index into a folder."""
        self._index.save(folder)

    def search(self, query: str, num: int) -> list[int]:
        """Numbers of at most `num` texts that share a word with the query, the best first.

        Raises: QueryError if the query has no word to search for.
        """
        words = _words(query, stop_words=_STOP_WORDS)
        if not words and _words(query, stop_words=None):
            raise QueryError(
                f"the query {query!r} has only stop words, which occur in nearly every text; use specific "
                "words"
            )
        if not words:
            raise QueryError(f"the query {query!r} has no word of two letters or more")
        num_found = min(num, int(self._index.scores["num_docs"]))
        ranking, scores = self._index.retrieve([words], k=num_found, show_progress=False)
        return [int(idx) for idx, score in zip(ranking[0], scores[0], strict=True) if score > 0]


def _words(query: str, *, stop_words: str | None) -> Sequence[str]:
    tokens = _library().tokenize([query], stopwords=stop_words, return_ids=False, show_progress=False)
    return cast("list[list[str]]", tokens)[0]
