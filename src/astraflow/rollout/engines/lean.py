"""Runs models of the Llama family (Llama, Mistral, Qwen2, Qwen3) from their parameters, without module code.

Projections with the same input are fused: one tensor has their weights, and the model's own parameters become
views of it. So replacing the parameters in place (`FittedTensors.install`) also replaces the fused weights,
and only `refresh` has to follow. The rotary tables come from the model's own rotary module.

On a CPU, only products are computed in the dtype of the weights. Everything between them is in float32, as in
a trainer that computes with autocast. For a model in bfloat16, that is faster there, and closer to float32
than the model's own modules are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from astraflow.rollout.engines.cache import AttentionRule, CacheShape, KvCache, Stretch, causal_attention
from astraflow.types import Media

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LeanForward", "Projection", "is_lean"]

_ARCHITECTURES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
"""Types of rotary embeddings whose table does not depend on the length of the sequence."""
_SCORE_TOKENS = 512
"""Number of positions whose logits are in memory at once when a sequence is scored."""


def is_lean(model: "PreTrainedModel", *, max_context: int) -> bool:
    """Whether `LeanForward` implements the model's architecture and settings."""
    config = cast("Any", model).config
    if type(model).__name__ not in _ARCHITECTURES or config.hidden_act != "silu":
        return False
    rope = config.rope_parameters
    if rope["rope_type"] not in _STATIC_ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return False
    window = getattr(config, "sliding_window", None)  # not every architecture has one
    return not window or window >= max_context  # a window as large as the context hides nothing


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear projection, or several with the same input whose weights are fused."""

    weight: Tensor
    """[out, in]"""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias, for x [N, in]."""
        return functional.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x @ weight.T + bias, in one pass if there is no bias and all have the same dtype."""
        if residual.dtype != self.weight.dtype:
            return residual + functional.linear(x, self.weight, self.bias)
        out = torch.addmm(residual, x, self.weight.t())
        return out if self.bias is None else out + self.bias


Wrap = Callable[[Sequence[str], Projection], Projection]
"""Replaces a projection. Gets the names of its parts below the model, without `.weight`, in their order."""


@dataclass(slots=True)
class _Layer:
    """The parameters of one layer. `qkv` fuses query, key and value; `gate_up` fuses gate and up."""

    norm_weights: tuple[Tensor, Tensor]
    """The weights of the norms before the attention and before the MLP."""
    norms: tuple[Tensor, Tensor]
    """The same in the dtype in which norms are computed."""
    qkv: Projection
    head_norms: tuple[Tensor, Tensor] | None
    """The norms [dim] of query heads and of key heads; only Qwen3 has them."""
    head_norm: Tensor | None
    """[query heads + key heads, dim] derived from `head_norms`, so that one product normalizes all heads."""
    out: Projection
    gate_up: Projection
    down: Projection


class LeanForward:
    """A `Forward` for a model of the Llama family. The model's projections become views of fused tensors."""

    def __init__(self, model: "PreTrainedModel", *, max_context: int) -> None:
        config = cast("Any", model).config
        modules = cast("Any", model).model
        self._num_heads = int(config.num_attention_heads)
        self._num_kv_heads = int(config.num_key_value_heads)
        self._dim = int(modules.layers[0].self_attn.head_dim)
        self._eps = float(config.rms_norm_eps)
        self._rule = AttentionRule(scale=float(modules.layers[0].self_attn.scaling))
        self._embedding: Tensor = modules.embed_tokens.weight
        self._norm_weight: Tensor = modules.norm.weight
        self._norm = self._norm_weight
        self._head: Tensor = cast("Any", model).lm_head.weight
        self._layers = [_fuse_layer(module) for module in modules.layers]
        self._dtype = self._embedding.dtype
        self._wide = torch.float32 if model.device.type == "cpu" else self._dtype
        """The dtype of everything but products."""
        positions = torch.arange(max_context, device=model.device)[None]
        cos, sin = modules.rotary_emb(self._embedding[:1].to(self._wide), positions)
        half = self._dim // 2
        self._cos: Tensor = cos[0, :, None]
        # A rotation is x * cos + (-x2, x1) * sin for halves x1, x2. The minus sign is part of the table, so a
        # step only has to swap the halves.
        self._sin: Tensor = torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), -1)
        self.refresh()

    @property
    def cache_shape(self) -> CacheShape:
        """The shape of a cache for this model."""
        weight = self._embedding
        return CacheShape(
            num_layers=len(self._layers),
            num_kv_heads=self._num_kv_heads,
            key_dim=self._dim,
            value_dim=self._dim,
            dtype=weight.dtype,
            device=weight.device,
        )

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self._head.shape[0]

    def wrap(self, wrap: Wrap) -> None:
        """Replaces every projection of every layer."""
        for i, layer in enumerate(self._layers):
            attention, mlp = (f"model.layers.{i}.{part}" for part in ("self_attn", "mlp"))
            layer.qkv = wrap([f"{attention}.{part}_proj" for part in "qkv"], layer.qkv)
            layer.out = wrap([f"{attention}.o_proj"], layer.out)
            layer.gate_up = wrap([f"{mlp}.gate_proj", f"{mlp}.up_proj"], layer.gate_up)
            layer.down = wrap([f"{mlp}.down_proj"], layer.down)

    def refresh(self) -> None:
        """Recomputes what is derived from parameters."""
        counts = (self._num_heads, self._num_kv_heads)
        self._norm = self._norm_weight.to(self._wide)
        for layer in self._layers:
            layer.norms = (layer.norm_weights[0].to(self._wide), layer.norm_weights[1].to(self._wide))
            if layer.head_norms is not None:
                norms = [norm.expand(n, -1) for norm, n in zip(layer.head_norms, counts, strict=True)]
                layer.head_norm = torch.cat(norms).to(self._wide)

    def prefill(
        self, tokens: Tensor, rows: Tensor, cache: KvCache, media: Sequence[Media] | None = None
    ) -> None:
        """Stores keys and values of prefixes [B, T] in the cache's rows."""
        assert media is None, "images for a model that reads only text"
        num_rows, length = tokens.shape
        hidden = self._embed(tokens.reshape(-1))
        cos, sin = self._tables(length, num_rows)
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            query, keys, values = self._sequence_qkv(layer, hidden, cos, sin, num_rows)
            cache.write(i, keys, values, rows)
            if i < last:  # only keys and values are needed, and the output of the last layer yields none
                attended = causal_attention(query, keys, values, self._rule)
                hidden = self._finish(layer, hidden, attended.view(num_rows * length, -1))

    def extend(self, tokens: Tensor, stretch: Stretch, cache: KvCache) -> None:
        """Stores keys and values of tokens [B, T] that follow prefixes in the cache."""
        num_rows, length = tokens.shape
        hidden = self._embed(tokens.reshape(-1))
        at = stretch.positions.reshape(-1)
        cos = self._cos[at]
        sin = self._sin[at]
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            query, keys, values = self._sequence_qkv(layer, hidden, cos, sin, num_rows)
            cache.write_stretch(i, keys, values, stretch)
            if i < last:  # as in `prefill`
                attended = cache.attend_stretch(i, query, stretch, self._rule)
                hidden = self._finish(layer, hidden, attended.view(num_rows * length, -1))

    def decode(self, tokens: Tensor, positions: NDArray[np.int64], cache: KvCache) -> Tensor:
        """One step: logits [B, V]."""
        at = cache.begin_step(positions)
        cos = self._cos[at]
        sin = self._sin[at]
        hidden = self._embed(tokens)
        for i, layer in enumerate(self._layers):
            query, keys, values = self._qkv(layer, hidden, cos, sin)
            hidden = self._finish(layer, hidden, cache.attend(i, query, keys, values, self._rule))
        return functional.linear(self._rms_norm(hidden, self._norm), self._head)

    def sequence_logits(self, tokens: Tensor) -> Iterator[Tensor]:
        """The logits of tokens 1..T-1 of one sequence, a few hundred tokens at a time."""
        length = len(tokens)
        hidden = self._embed(tokens)
        cos, sin = self._tables(length, 1)
        for layer in self._layers:
            query, keys, values = self._sequence_qkv(layer, hidden, cos, sin, 1)
            attended = causal_attention(query, keys, values, self._rule)
            hidden = self._finish(layer, hidden, attended.view(length, -1))
        normed = self._rms_norm(hidden[:-1], self._norm)
        for start in range(0, length - 1, _SCORE_TOKENS):
            yield functional.linear(normed[start : start + _SCORE_TOKENS], self._head)

    def _tables(self, length: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """The rotary tables of positions 0..length-1, repeated for each row."""
        return self._cos[:length].repeat(num_rows, 1, 1), self._sin[:length].repeat(num_rows, 1, 1)

    def _sequence_qkv(
        self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor, num_rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, keys and values [B, heads, T, dim] of sequences, from their hidden states [B * T, h]."""
        query, keys, values = (
            heads.reshape(num_rows, len(hidden) // num_rows, -1, self._dim).transpose(1, 2)
            for heads in self._qkv(layer, hidden, cos, sin)
        )
        return query, keys, values

    def _qkv(self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated query, rotated keys, and values, each [N, heads, dim], from hidden states [N, h]."""
        num_rotated = self._num_heads + self._num_kv_heads
        fused = layer.qkv(self._rms_norm(hidden, layer.norms[0]))
        heads = fused.to(self._wide).view(len(hidden), num_rotated + self._num_kv_heads, self._dim)
        rotated = heads[:, :num_rotated]
        values = heads[:, num_rotated:]
        if layer.head_norm is not None:
            rotated = functional.rms_norm(rotated, (self._dim,), None, self._eps) * layer.head_norm
        swapped = rotated.roll(self._dim // 2, -1)
        rotated = torch.addcmul(rotated * cos, swapped, sin)
        return rotated[:, : self._num_heads], rotated[:, self._num_heads :], values

    def _finish(self, layer: _Layer, hidden: Tensor, attended: Tensor) -> Tensor:
        """Computes the rest of a layer after its attention: output projection, MLP, and both residuals."""
        hidden = layer.out.add_to(hidden, attended.to(self._dtype))
        gate, up = layer.gate_up(self._rms_norm(hidden, layer.norms[1])).chunk(2, -1)
        return layer.down.add_to(hidden, functional.silu(gate).mul_(up))

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._embedding[tokens].to(self._wide)

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Normalizes hidden states, as the input of a product."""
        return functional.rms_norm(hidden, (hidden.shape[-1],), weight, self._eps).to(self._dtype)


def _fuse_layer(module: Any) -> _Layer:
    """Collects the parameters of a decoder layer, and makes its projections views of fused tensors."""
    attention = module.self_attn
    mlp = module.mlp
    norms = (module.input_layernorm.weight, module.post_attention_layernorm.weight)
    has_head_norms = "q_norm" in dict(attention.named_children())
    return _Layer(
        norm_weights=norms,
        norms=norms,
        qkv=_fuse(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=(attention.q_norm.weight, attention.k_norm.weight) if has_head_norms else None,
        head_norm=None,
        out=Projection(attention.o_proj.weight, attention.o_proj.bias),
        gate_up=_fuse(mlp.gate_proj, mlp.up_proj),
        down=Projection(mlp.down_proj.weight, mlp.down_proj.bias),
    )


def _fuse(*linears: Any) -> Projection:
    """Joins the weights and biases of projections with the same input, and makes them views of the result."""
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias.data for linear in linears])
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return Projection(weight, bias)
