"""Runs any causal language model of transformers through its own modules, with a `KvCache` behind them.

This file registers an attention function with transformers' `AttentionInterface`. The model calls it in every
layer with the layer's query, keys and values, and the function reads and writes the `KvCache` of the present
call. Positions are passed as `position_ids`; transformers builds no mask and no cache of its own.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astraflow.rollout.engines.cache import AttentionRule, CacheShape, KvCache, Stretch, causal_attention
from astraflow.rollout.engines.sampling import token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GenericForward"]

_ATTENTION = "astraflow_slots"


@dataclass(frozen=True, slots=True)
class _Call:
    """What the attention does in one forward pass.

    With `is_step` it does one decoding step, with `stretch` it runs tokens that follow cached prefixes, and
    otherwise it runs whole sequences. Keys and values of whole sequences are stored if `cache` and `rows` are
    given.
    """

    cache: KvCache | None = None
    rows: Tensor | None = None
    stretch: Stretch | None = None
    is_step: bool = False


class GenericForward:
    """A `Forward` over a model's own modules. The model's attention implementation is replaced for good."""

    def __init__(self, model: "PreTrainedModel") -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(_ATTENTION, cast("Any", _attend))
        self._model = cast("Any", model)
        self._model.set_attn_implementation(_ATTENTION)
        config = self._model.config.get_text_config()
        num_heads = int(config.num_attention_heads)
        num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
        self._shape = CacheShape(
            int(config.num_hidden_layers), num_kv_heads, head_dim, model.dtype, model.device
        )
        self._vocab_size = int(config.vocab_size)

    @property
    def cache_shape(self) -> CacheShape:
        """What a cache for this model must hold."""
        return self._shape

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self._vocab_size

    def refresh(self) -> None:
        """Does nothing: nothing is derived from parameters."""

    def prefill(self, tokens: Tensor, rows: Tensor, cache: KvCache) -> None:
        """Stores keys and values of prefixes [B, T] in the cache's rows."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        # Nobody reads these logits; 1 is the fewest that can be asked for, since 0 means all.
        self._run(tokens, positions, _Call(cache, rows), num_logits=1)

    def extend(self, tokens: Tensor, stretch: Stretch, cache: KvCache) -> None:
        """Stores keys and values of tokens [B, T] that follow prefixes in the cache."""
        self._run(tokens, stretch.positions, _Call(cache, stretch=stretch), num_logits=1)

    def decode(self, tokens: Tensor, positions: NDArray[np.int64], cache: KvCache) -> Tensor:
        """One step: logits [B, V]."""
        at = cache.begin_step(positions)
        return self._run(tokens[:, None], at[:, None], _Call(cache, is_step=True), num_logits=1)[:, 0]

    def score(self, tokens: Tensor) -> Tensor:
        """Logprobs [T - 1] of tokens 1..T-1 of one sequence."""
        positions = torch.arange(len(tokens), device=tokens.device)
        logits = self._run(tokens[None], positions[None], _Call(), num_logits=0)
        return token_logprobs(logits[0, :-1], tokens[1:])

    def _run(self, tokens: Tensor, positions: Tensor, call: _Call, *, num_logits: int) -> Tensor:
        """Logits of the last `num_logits` positions; 0 gives those of all positions."""
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=num_logits,
            astraflow_call=call,
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
    """Transformers calls this in each layer. Takes query [B, heads, T, dim], returns [B, T, heads, dim].

    `attention_mask` is ignored: the rule and the cache say which positions are seen.
    """
    call = cast("_Call", kwargs["astraflow_call"])
    num_rows, num_heads, length, dim = query.shape
    rule = AttentionRule(
        scale=dim**-0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window") or 0,
        softcap=kwargs.get("softcap") or 0.0,
    )
    layer = int(module.layer_idx)
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
    return out.view(num_rows, length, num_heads, dim), None
