"""Runs any causal language model of transformers through its own modules, with a `KvCache`.

This file registers an attention function with transformers' `AttentionInterface`. The model calls it in every
layer with the layer's query, keys, and values. The function reads and writes the `KvCache` of the current
call. Positions are passed as `position_ids`. Transformers itself builds neither a mask nor a cache.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astraflow.errors import DataError
from astraflow.models.images import ImageRules
from astraflow.models.vision import ImageFeed
from astraflow.rollout.engines.cache import AttentionRule, CacheShape, KvCache, Stretch, causal_attention
from astraflow.types import Media

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GenericForward"]

_ATTENTION = "astraflow_slots"


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of the attention function in one forward pass.

    With `is_step`, the pass is a decoding step. With `stretch`, it has tokens that follow cached prefixes.
    Otherwise, it has whole sequences, whose keys and values are stored if `cache` and `rows` are given.
    """

    cache: KvCache | None = None
    rows: Tensor | None = None
    stretch: Stretch | None = None
    is_step: bool = False
    chunk: int = 0
    """Size of the chunks in the layers of `chunked`."""
    chunked: frozenset[int] = frozenset()
    """Layers that attend within chunks."""
    heads: dict[int, tuple[int, int, int]] = field(default_factory=dict[int, tuple[int, int, int]])
    """Layer -> number of key heads, size of a key, size of a value. Each layer that runs adds its own."""


class GenericForward:
    """A `Forward` that runs a model's own modules. It permanently replaces the attention of the text layers.

    Raises: DataError if the attention of a layer cannot be replaced, or the layers have different heads.
    """

    def __init__(self, model: "PreTrainedModel", images: ImageRules | None = None) -> None:
        """`images`: how the model reads images; None if it reads only text."""
        from transformers import AttentionInterface

        AttentionInterface.register(_ATTENTION, cast("Any", _attend))
        self._model = cast("Any", model)
        # Vision layers keep their own attention, because it covers whole images.
        self._image_feed = None if images is None else ImageFeed(model, images)
        self._model.set_attn_implementation(_ATTENTION if images is None else {"text_config": _ATTENTION})
        config = self._model.config.get_text_config()
        kinds = cast("list[str]", getattr(config, "layer_types", None) or [])  # not every config lists them
        self._chunked = frozenset(i for i, kind in enumerate(kinds) if kind == "chunked_attention")
        self._chunk = int(config.attention_chunk_size) if self._chunked else 0
        num_kv_heads, key_dim, value_dim = self._heads(int(config.num_hidden_layers))
        self._shape = CacheShape(
            num_layers=int(config.num_hidden_layers),
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=model.dtype,
            device=model.device,
        )
        self._vocab_size = int(config.vocab_size)

    @property
    def cache_shape(self) -> CacheShape:
        """The shape of a cache for this model."""
        return self._shape

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self._vocab_size

    def refresh(self) -> None:
        """Does nothing, because nothing is derived from parameters."""

    def prefill(
        self, tokens: Tensor, rows: Tensor, cache: KvCache, media: Sequence[Media] | None = None
    ) -> None:
        """Stores keys and values of prefixes [B, T] in the cache's rows."""
        # These logits are not used. 1 is the smallest number that can be requested, because 0 means all.
        if media is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            self._run(tokens, positions, self._call(cache, rows), num_logits=1)
            return
        assert self._image_feed is not None, "images for a model that reads only text"
        images = self._image_feed.inputs(media, num_tokens=tokens.shape[1])
        cache.shifts[rows.cpu().numpy()] = images.shifts
        with self._image_feed.showing(images):
            self._run(tokens, images.positions, self._call(cache, rows), num_logits=1, inputs=images.inputs)

    def extend(self, tokens: Tensor, stretch: Stretch, cache: KvCache) -> None:
        """Stores keys and values of tokens [B, T] that follow prefixes in the cache."""
        shifts = torch.from_numpy(cache.shifts).to(tokens.device)[stretch.rows, None]
        self._run(tokens, stretch.positions + shifts, self._call(cache, stretch=stretch), num_logits=1)

    def decode(self, tokens: Tensor, positions: NDArray[np.int64], cache: KvCache) -> Tensor:
        """One step: logits [B, V]."""
        at = cache.begin_step(positions)
        if self._image_feed is not None:
            at = at + torch.from_numpy(cache.shifts[: len(positions)]).to(at.device)
        return self._run(tokens[:, None], at[:, None], self._call(cache, is_step=True), num_logits=1)[:, 0]

    def sequence_logits(self, tokens: Tensor) -> Iterator[Tensor]:
        """The logits of tokens 1..T-1 of one sequence, all at once."""
        positions = torch.arange(len(tokens), device=tokens.device)
        logits = self._run(tokens[None], positions[None], self._call(), num_logits=0)
        yield logits[0, :-1]

    def _heads(self, num_layers: int) -> tuple[int, int, int]:
        """The number of key heads, and the sizes of a key and a value, which one token is run to find.

        A config does not always have them: latent attention (DeepSeek) derives its heads from other sizes.
        """
        call = self._call()
        first = torch.zeros((1, 1), dtype=torch.long, device=self._model.device)
        self._run(first, first, call, num_logits=1)
        missing = sorted(set(range(num_layers)) - call.heads.keys())
        if missing:
            raise DataError(
                f"{len(missing)} of {num_layers} layers (the first is layer {missing[0]}) do not call the "
                "attention that the engine gave the model"
            )
        sizes = set(call.heads.values())
        if len(sizes) > 1:
            raise DataError(f"its layers have heads of different sizes: {sorted(sizes)}")
        return sizes.pop()

    def _call(
        self,
        cache: KvCache | None = None,
        rows: Tensor | None = None,
        *,
        stretch: Stretch | None = None,
        is_step: bool = False,
    ) -> _Call:
        return _Call(cache, rows, stretch, is_step, self._chunk, self._chunked)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        call: _Call,
        *,
        num_logits: int,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Logits of the last `num_logits` positions, or of all if it is 0. `inputs`: the images."""
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=num_logits,
            astraflow_call=call,
            **(inputs or {}),
        )
        return cast("Tensor", output.logits)


def _attend(  # noqa: PLR0917 transformers passes these by position
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer.

    Takes the query as [B, heads, T, dim], and returns [B, T, heads, dim]. `attention_mask` is ignored,
    because the rule and the cache determine which positions are visible.
    """
    call = cast("_Call | None", kwargs.get("astraflow_call"))
    if call is None:
        raise DataError("its code does not pass the engine's arguments on to its attention")
    num_rows, num_heads, length, dim = query.shape
    layer = int(module.layer_idx)
    call.heads[layer] = (key.shape[1], key.shape[3], value.shape[3])
    rule = AttentionRule(
        scale=dim**-0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window") or 0,
        softcap=kwargs.get("softcap") or 0.0,
        chunk=call.chunk if layer in call.chunked else 0,
        sinks=kwargs.get("s_aux"),
    )
    if call.is_step:
        assert call.cache is not None
        out = call.cache.attend(layer, query[:, :, 0], key[:, :, 0], value[:, :, 0], rule)
    elif call.stretch is not None:
        assert call.cache is not None
        call.cache.write_stretch(layer, key, value, call.stretch)
        out = call.cache.attend_stretch(layer, query, call.stretch, rule)
    else:
        out = causal_attention(query, key, value, rule)
        if call.cache is not None and call.rows is not None:
            call.cache.write(layer, key, value, call.rows)
    return out.view(num_rows, length, num_heads, -1), None
