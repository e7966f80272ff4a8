"""Runs a model so that a token's logprob is bitwise equal to the trainer's.

Prefilling, extending, and decoding are the same operation here. The operation gets tokens at given positions
of given rows, stores their keys and values, and then computes the attention of each token separately.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astraflow.addons.exact.model import SPAN, InvariantModel, attend
from astraflow.rollout.engines.cache import CacheShape, KvCache, Stretch
from astraflow.types import Media

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["InvariantForward"]


class InvariantForward:
    """The batch-invariant `Forward`. Raises: DataError if the model or this machine doesn't support it."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self._model = InvariantModel(model)
        self._dtype = model.dtype
        self._device = model.device

    @property
    def cache_shape(self) -> CacheShape:
        """The shape of a cache for this model."""
        return CacheShape(
            num_layers=self._model.num_layers,
            num_kv_heads=self._model.num_kv_heads,
            key_dim=self._model.dim,
            value_dim=self._model.dim,
            dtype=self._dtype,
            device=self._device,
            multiple=SPAN,
        )

    @property
    def vocab_size(self) -> int:
        """Number of logits per token."""
        return self._model.vocab_size

    def refresh(self) -> None:
        """Does nothing, because nothing is derived from parameters."""

    def prefill(
        self, tokens: Tensor, rows: Tensor, cache: KvCache, media: Sequence[Media] | None = None
    ) -> None:
        """Stores the keys and values of prefixes [B, T] in the cache's rows."""
        assert media is None, "images for a model that reads only text"
        length = tokens.shape[1]
        self._hidden(tokens, cache.stretch(rows, torch.zeros_like(rows), length, reach=length), rows, cache)

    def extend(self, tokens: Tensor, stretch: Stretch, cache: KvCache) -> None:
        """Stores the keys and values of tokens [B, T] that follow prefixes in the cache."""
        self._hidden(tokens, stretch, stretch.rows, cache)

    def decode(self, tokens: Tensor, positions: NDArray[np.int64], cache: KvCache) -> Tensor:
        """Decodes one step. Returns logits [B, V]."""
        num_rows = len(tokens)
        starts = torch.from_numpy(positions)
        stretch = cache.stretch(torch.arange(num_rows), starts, 1, reach=int(positions.max()) + 1)
        return self._model.logits(self._hidden(tokens[:, None], stretch, slice(0, num_rows), cache))

    def sequence_logits(self, tokens: Tensor) -> Iterator[Tensor]:
        """Computes the logits of tokens 1..T-1 of one sequence, in parts."""
        hidden = self._model.sequences(tokens, [len(tokens)])
        return self._model.logit_parts(hidden[:-1])

    def _hidden(self, tokens: Tensor, stretch: Stretch, rows: Tensor | slice, cache: KvCache) -> Tensor:
        """Stores the keys and values of tokens [B, T], and returns their hidden states [B * T, h].

        `rows`: the rows of the stretch. If they are a slice, the cache entries are views instead of copies.
        """
        num_rows, length = tokens.shape

        def in_rows(heads: Tensor) -> Tensor:
            return heads.view(num_rows, length, *heads.shape[1:])

        def attend_rows(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            new_keys, new_values = (in_rows(heads).transpose(1, 2) for heads in (keys, values))
            cache.write_stretch(layer, new_keys, new_values, stretch)
            held = cache.entries(layer, rows)
            queries = in_rows(query)
            columns = [
                attend(queries[:, idx], *held, stretch.positions[:, idx], self._model.scale)
                for idx in range(length)
            ]
            return torch.stack(columns, 1).flatten(0, 1)

        return self._model.hidden(tokens.reshape(-1), stretch.positions.reshape(-1), attend_rows)
