"""Dense retrieval: `sentence-transformers` embeds texts and queries, and `faiss` finds the nearest.

Embeddings are normalized, so the inner product of two embeddings is their cosine.
"""

import importlib.metadata
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import ConfigError
from astraflow.service.progress_bars import progress_bars_off
from astraflow.user_input.extras import install_command

__all__ = ["Dense", "EncoderSettings"]

_INDEX_FILE = "vectors.faiss"
_SETTINGS_FILE = "encoder.json"
_BATCH = 4_096
"""Number of texts that are embedded and added at a time."""
_TRAINING_TEXTS = 200_000
"""Number of texts whose embeddings train an index that needs training, such as an inverted file."""


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """The embedding model, and the prefixes that it expects."""

    folder: str
    """Folder of a model that `sentence-transformers` opens, e.g. of intfloat/e5-base-v2."""
    query_prefix: str = "query: "
    """Prefix of a query; the default is that of E5."""
    text_prefix: str = "passage: "
    """Prefix of a text."""
    factory: str = "Flat"
    """Kind of index, as `faiss.index_factory` names it: `Flat` compares with every text."""


class Dense:
    """An index of texts, which are identified by their numbers. Threads may share it."""

    kind: Final = "dense"

    def __init__(self, index: Any, encoder: Any, settings: EncoderSettings) -> None:
        self._index = index
        self._encoder = encoder
        self._settings = settings
        self._encoding = Lock()  # the fast tokenizers of Hugging Face cannot be shared by threads

    @staticmethod
    def library_version() -> str:
        """Name and version of the library that writes the files. Raises: ConfigError if it is missing."""
        _faiss()
        return f"faiss {importlib.metadata.version('faiss-cpu')}"

    @classmethod
    def build(
        cls, texts: Iterable[str], settings: EncoderSettings, *, progress: Callable[[int], object]
    ) -> "Dense":
        """Builds the index of one or more texts; `progress` gets the number of texts added so far.

        Raises: ConfigError if a library is missing, or the encoder cannot be opened.
        """
        encoder = _encoder(settings)
        batches = _batches(texts)
        first = _embed(encoder, settings.text_prefix, next(batches))
        try:
            index = _faiss().index_factory(first.shape[1], settings.factory, _faiss().METRIC_INNER_PRODUCT)
        except RuntimeError as err:
            raise ConfigError(
                f"{settings.factory!r} is not an index that faiss can make; use Flat, or IVF4096,Flat for "
                "millions of texts"
            ) from err
        waiting = [first]
        num_waiting = len(first)
        for batch in batches:
            waiting.append(_embed(encoder, settings.text_prefix, batch))
            num_waiting += len(batch)
            if index.is_trained or num_waiting >= _TRAINING_TEXTS:
                progress(_add(index, waiting))
                waiting = []
                num_waiting = 0
        if waiting:
            progress(_add(index, waiting))
        return cls(index, encoder, settings)

    @classmethod
    def load(cls, folder: Path) -> "Dense":
        """Loads the index that `save` wrote, with its encoder."""
        settings = EncoderSettings(**json.loads((folder / _SETTINGS_FILE).read_text(encoding="utf-8")))
        library = _faiss()
        index = library.read_index(str(folder / _INDEX_FILE), library.IO_FLAG_MMAP)
        return cls(index, _encoder(settings), settings)

    def save(self, folder: Path) -> None:
        """Writes index and settings into a folder. The encoder is not copied."""
        _faiss().write_index(self._index, str(folder / _INDEX_FILE))
        settings = {**asdict(self._settings), "folder": str(Path(self._settings.folder).resolve())}
        (folder / _SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def search(self, query: str, num: int) -> list[int]:
        """Numbers of the `num` texts that are nearest to the query, the nearest first."""
        with self._encoding:
            vector = _embed(self._encoder, self._settings.query_prefix, [query])
        _, ranking = self._index.search(vector, num)
        return [int(idx) for idx in ranking[0] if idx >= 0]  # faiss pads with -1 if there are fewer texts


def _add(index: Any, vectors: Sequence[NDArray[np.float32]]) -> int:
    """Adds vectors, after training the index on them if it needs that. Returns its number of vectors."""
    whole = np.concatenate(vectors)
    if not index.is_trained:
        index.train(whole)
    index.add(whole)
    return int(index.ntotal)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _embed(encoder: Any, prefix: str, texts: Sequence[str]) -> NDArray[np.float32]:
    """Embeds texts: returns vectors of length 1, [B, D]."""
    vectors = encoder.encode(
        [prefix + text for text in texts], normalize_embeddings=True, show_progress_bar=False
    )
    return np.asarray(vectors, dtype=np.float32)


def _faiss() -> Any:
    try:
        import faiss  # pyright: ignore[reportMissingImports]  # an extra that the checks do without
    except ImportError as err:
        raise ConfigError(f"dense retrieval needs faiss: {install_command('dense')}") from err
    return cast("Any", faiss)


def _encoder(settings: EncoderSettings) -> Any:
    """Loads the encoder. Raises: ConfigError if the library or the folder is missing."""
    folder = Path(settings.folder).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"the encoder {settings.folder!r} is not a folder, and encoders are never downloaded; "
            "run `hf download intfloat/e5-base-v2 --local-dir models/e5-base-v2`"
        )
    try:
        from sentence_transformers import (  # pyright: ignore[reportMissingImports]
            SentenceTransformer,  # pyright: ignore[reportUnknownVariableType]
        )
    except ImportError as err:
        raise ConfigError(f"dense retrieval needs sentence-transformers: {install_command('dense')}") from err
    with progress_bars_off():
        return cast("Any", SentenceTransformer)(str(folder), local_files_only=True)
