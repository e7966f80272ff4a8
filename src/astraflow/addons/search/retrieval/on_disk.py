"""BM25 retrieval from disk with the library `tantivy`, for millions of documents.

Building needs less than a gigabyte of memory, and an open index some megabytes: its files are mapped into
memory, where all services of a machine share the pages that they read.
"""

import importlib.metadata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, cast

from astraflow.errors import ConfigError, QueryError
from astraflow.user_input.extras import install_command

__all__ = ["OnDisk"]

_FOLDER = "tantivy"
_TEXT = "text"
_NUMBER = "number"
_ANALYZER = "words"
_HEAP_BYTES = 256 << 20
"""Memory of the writer, after which it writes a part of the index to disk."""
_TOLD = 100_000
"""Documents after which the progress is told."""
_MAX_CHARS = 40
"""Characters of the longest word that counts."""


def _library() -> Any:
    """Imports the library. Raises: ConfigError with the command that installs it."""
    try:
        import tantivy  # pyright: ignore[reportMissingImports]  # an extra that the checks do without
    except ImportError as err:
        raise ConfigError(f"an index on disk needs tantivy: {install_command('search')}") from err
    return cast("Any", tantivy)


class OnDisk:
    """An index of texts, which are identified by their numbers. Threads may share it.

    Example: `OnDisk.build(["a cat", "a dog"], folder, progress=print).search("dog", 1) == [1]`.
    """

    kind: Final = "tantivy"

    def __init__(self, index: Any) -> None:
        self._index = index
        self._analyzer = _analyzer()
        index.register_tokenizer(_ANALYZER, self._analyzer)
        index.reload()

    @staticmethod
    def library_version() -> str:
        """Name and version of the library that writes the files. Raises: ConfigError if it is missing."""
        _library()
        return f"tantivy {importlib.metadata.version('tantivy')}"

    @classmethod
    def build(cls, texts: Iterable[str], folder: Path, *, progress: Callable[[int], object]) -> "OnDisk":
        """Builds the index of texts in a folder; `progress` gets the number of texts added so far."""
        library = _library()
        place = folder / _FOLDER
        place.mkdir()
        fields = library.SchemaBuilder()
        fields.add_text_field(_TEXT, stored=False, tokenizer_name=_ANALYZER, index_option="freq")
        fields.add_unsigned_field(_NUMBER, stored=True, indexed=False)
        index = library.Index(fields.build(), path=str(place))
        index.register_tokenizer(_ANALYZER, _analyzer())
        writer = index.writer(heap_size=_HEAP_BYTES, num_threads=1)
        for number, text in enumerate(texts):
            document = library.Document()
            document.add_text(_TEXT, text)
            document.add_unsigned(_NUMBER, number)
            writer.add_document(document)
            if number % _TOLD == _TOLD - 1:
                progress(number + 1)
        writer.commit()
        writer.wait_merging_threads()
        return cls(index)

    @classmethod
    def load(cls, folder: Path) -> "OnDisk":
        """Opens the index that `build` wrote."""
        return cls(_library().Index.open(str(folder / _FOLDER)))

    def save(self, folder: Path) -> None:
        """Does nothing, because `build` wrote the index into its folder."""

    def search(self, query: str, num: int) -> list[int]:
        """Numbers of at most `num` texts that share a word with the query, the best first.

        Raises: QueryError if the query has no word to search for.
        """
        library = _library()
        words = cast("list[str]", self._analyzer.analyze(query))
        if not words:
            raise QueryError(f"the query {query!r} has no word to search for, or only stop words")
        schema = self._index.schema
        terms = [(library.Occur.Should, library.Query.term_query(schema, _TEXT, word)) for word in words]
        searcher = self._index.searcher()
        hits = searcher.search(library.Query.boolean_query(terms), num, count=False).hits
        return [int(searcher.doc(place)[_NUMBER][0]) for _, place in hits]


def _analyzer() -> Any:
    library = _library()
    words = library.TextAnalyzerBuilder(library.Tokenizer.simple())
    for each in ("lowercase", "stopword", "remove_long"):
        given = {"stopword": ("english",), "remove_long": (_MAX_CHARS,)}.get(each, ())
        words = words.filter(getattr(library.Filter, each)(*given))
    return words.build()
