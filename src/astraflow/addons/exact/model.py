"""Runs a model so that a token's values do not depend on other sequences, the batch, or its layout.

A linear algebra kernel chooses the order of its sums by the shapes of its inputs. An engine decodes a few
tokens per step against a cache, whereas a trainer computes whole sequences at once. Their logprobs therefore
differ in the last bits, although the weights are the same. Here, each product has a fixed shape
(batch-invariant kernels): tokens pass through projections in tiles of `TILE` rows, and each query attends
separately, to as many positions as its own position requires, in steps of `SPAN`. Norms, activations, and
softmax reduce each row separately. Rotary tables are computed in blocks of a fixed size.

A test at load time checks what shapes cannot ensure: that this machine's kernels give a row the same result
at any position in its tile, whatever the other rows contain. No gradients are computed here. The code runs on
one CPU thread, in float32, for the model families that `families.exact_refusal` accepts.

Legend: N tokens, n rows, H query heads, K key heads, D dimension of a head, L positions, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from astraflow.errors import DataError
from astraflow.models.families import exact_refusal, family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SPAN", "Attend", "InvariantModel", "attend"]

TILE = 64
"""Number of rows in every product with a projection. Fewer rows would use the kernels inefficiently, and more
would be mostly padding when an engine has few requests left."""
SPAN = 64
"""A query's keys are padded to a multiple of this."""
_TABLE_POSITIONS = 256
"""Number of positions in a block of the rotary tables."""
_CHUNK_LOGITS = 2**22
"""Largest number of logits in memory at once (16 MB)."""
_ALIGNMENT = 64
"""Alignment in bytes. Kernels may sum in another order if an operand starts elsewhere in a cache line."""
_PROBE_LENGTHS = (41, 24, 7, 1)
"""Lengths of the sequences in the test at load time. Together they reach into a second tile, and they start
at different rows."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [N, H, D], keys [N, K, D], values [N, K, D]) -> the attention's output [N, H * D]."""


class InvariantModel:
    """Computes with the parameters of a model, and reads them at every call. The caller owns the model.

    Example: `hidden = model.sequences(tokens, lengths)`, then `model.logprobs(hidden[at], targets)`.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        """Raises: DataError if exact logprobs are not guaranteed for the model's family or on this
        machine."""
        whole = cast("Any", model)
        config = cast("Mapping[str, Any]", whole.config.to_dict())
        if reason := exact_refusal(config):
            raise DataError(f"exact: true is not guaranteed for {family_of(config)!r}: {reason}")
        for parameter in model.parameters():
            if parameter.data_ptr() % _ALIGNMENT:  # in a memory-mapped file, tensors start anywhere
                parameter.data = parameter.data.clone()
        self._body = whole.model
        self._head = whole.lm_head
        self._layers = list(self._body.layers)
        attention = self._layers[0].self_attn
        self.dim = int(attention.head_dim)
        self.num_kv_heads = int(whole.config.num_key_value_heads)
        self.scale = float(attention.scaling)
        empty = self._embedding.new_empty(0, 1, self.dim)
        self._tables = (empty, empty)
        """Cosines and sines [positions, 1, D] of all positions needed so far."""
        self._check_invariance(family_of(config))

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._layers)

    @property
    def vocab_size(self) -> int:
        """Number of logits per token."""
        return self._head.weight.shape[0]

    @torch.no_grad()
    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the last hidden states [N, h], before the output head, of tokens [N] at positions [N]."""
        num_tokens = len(tokens)
        cos, sin = self._rotary(_pad(positions))
        hidden = self._embedding[_pad(tokens)]
        for idx, layer in enumerate(self._layers):
            query, keys, values = self._heads(layer, hidden, cos, sin)
            out = attend(idx, query[:num_tokens], keys[:num_tokens], values[:num_tokens])
            hidden = hidden + _project(layer.self_attn.o_proj, _pad(out))
            normed = _normalize(layer.post_attention_layernorm, hidden)
            gate = functional.silu(_project(layer.mlp.gate_proj, normed))
            inner = gate * _project(layer.mlp.up_proj, normed)
            hidden = hidden + _project(layer.mlp.down_proj, inner)
        return _normalize(self._body.norm, hidden)[:num_tokens]

    def sequences(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Computes `hidden` of whole sequences, whose tokens are concatenated."""
        layout = _Sequences(lengths, self.scale)
        return self.hidden(tokens, layout.positions, layout.attend)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [N, V] of `hidden` [N, h]."""
        return _project(self._head, _pad(hidden))[: len(hidden)]

    def logit_parts(self, hidden: Tensor) -> Iterator[Tensor]:
        """Computes the logits of `hidden` [N, h] in turn, as many at a time as fit."""
        size = max(1, _CHUNK_LOGITS // (TILE * self.vocab_size)) * TILE  # a whole number of tiles
        return (self.logits(hidden[start : start + size]) for start in range(0, len(hidden), size))

    @torch.no_grad()
    def logprobs(self, hidden: Tensor, targets: Tensor, inverse_temperatures: Tensor | None = None) -> Tensor:
        """Returns logprobs [N] of `targets` [N], each at its own temperature; None means 1 for all.

        An engine that samples must compute the same: logits times the inverse, then `torch.log_softmax`.
        """
        logprobs = hidden.new_empty(len(hidden))
        start = 0
        for logits in self.logit_parts(hidden):
            part = slice(start, start + len(logits))
            start = part.stop
            if inverse_temperatures is not None:
                logits = logits * inverse_temperatures[part, None]
            logprobs[part] = torch.log_softmax(logits, -1).gather(1, targets[part, None])[:, 0]
        return logprobs

    @property
    def _embedding(self) -> Tensor:
        return self._body.embed_tokens.weight

    def _heads(self, layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rotated query, the rotated keys, and the values, each [N, heads, D]."""
        attention = layer.self_attn
        normed = _normalize(layer.input_layernorm, hidden)
        query, keys, values = (
            _project(projection, normed).view(len(hidden), -1, self.dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if "q_norm" in dict(attention.named_children()):  # of these families, only Qwen3 has these norms
            query = _normalize(attention.q_norm, query)
            keys = _normalize(attention.k_norm, keys)
        return _rotate(query, cos, sin), _rotate(keys, cos, sin), values

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [N, 1, D] of positions [N]. Extends the tables as needed."""
        while len(self._tables[0]) <= int(positions.max()):
            start = len(self._tables[0])
            block = torch.arange(start, start + _TABLE_POSITIONS)[None]
            fresh = self._body.rotary_emb(self._embedding[:1], block)
            cos, sin = (
                torch.cat((table, new[0, :, None])) for table, new in zip(self._tables, fresh, strict=True)
            )
            self._tables = (cos, sin)
        cos, sin = self._tables
        return cos[positions], sin[positions]

    @torch.no_grad()
    def _check_invariance(self, family: str) -> None:
        """Raises DataError if sequences get different logprobs together than separately."""
        tokens = torch.arange(sum(_PROBE_LENGTHS)).mul(7).remainder(self.vocab_size)
        starts = [0, *accumulate(_PROBE_LENGTHS)]
        together = torch.log_softmax(self.logits(self.sequences(tokens, _PROBE_LENGTHS)), -1)
        for start, end in pairwise(starts):
            hidden = self.sequences(tokens[start:end], [end - start])
            alone = torch.log_softmax(self.logits(hidden), -1)
            if not torch.equal(alone, together[start:end]):
                gap = float((alone - together[start:end]).abs().max())
                raise DataError(
                    f"exact: true is not guaranteed for {family!r} on this machine: a sequence of "
                    f"{end - start} tokens gets different logprobs alone than with others (by {gap:.2g} "
                    "nats), because torch's kernels here depend on the position of a row; leave out exact"
                )


class _Sequences:
    """The attention of whole sequences, whose tokens are concatenated."""

    def __init__(self, lengths: Sequence[int], scale: float) -> None:
        self._scale = scale
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        self.positions = torch.cat([torch.arange(length) for length in lengths])
        # The longest sequences come first, so the sequences that have a t-th token are the first ones.
        order = torch.argsort(sizes, descending=True, stable=True)
        self._starts = starts[order]
        longest = int(sizes.max())
        held = torch.arange(-(-longest // SPAN) * SPAN)
        # Padding repeats a sequence's last token: its values are finite, and every query masks them.
        self._places = self._starts[:, None] + torch.minimum(held, sizes[order][:, None] - 1)
        self._counts = [int((sizes > position).sum()) for position in range(longest)]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Implements `Attend`. Computes one position of all sequences at a time, as an engine does."""
        del layer
        all_keys, all_values = (part[self._places].transpose(1, 2).contiguous() for part in (keys, values))
        out = torch.empty_like(query).flatten(1)
        for position, count in enumerate(self._counts):
            at = self._starts[:count] + position
            positions = torch.full((count,), position)
            out[at] = attend(query[at], all_keys[:count], all_values[:count], positions, self._scale)
        return out


def attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Computes the attention of one query per row, at its position, over the row's entries up to there.

    Shapes: query [n, H, D]; keys and values [n, K, L, D], contiguous and finite, with L a multiple of `SPAN`
    that exceeds all positions; positions [n]; result [n, H * D].
    """
    spans = positions // SPAN
    shortest = int(spans.min())
    longest = int(spans.max())
    if shortest == longest:
        reach = (longest + 1) * SPAN
        return _attend(query, keys[:, :, :reach], values[:, :, :reach], positions, scale)
    out = torch.empty_like(query).flatten(1)
    # Rows with the same span are computed together, so the shape of a row's products depends only on its own
    # position.
    for span in range(shortest, longest + 1):
        rows = (spans == span).nonzero()[:, 0]
        reach = (span + 1) * SPAN
        if len(rows):
            held_keys, held_values = (part[rows, :, :reach] for part in (keys, values))
            out[rows] = _attend(query[rows], held_keys, held_values, positions[rows], scale)
    return out


def _attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Computes the attention over all L entries; those after a row's position are masked."""
    num_rows, num_heads, dim = query.shape
    num_kv_heads, length = keys.shape[1:3]
    # One product per row and key head, of all query heads that share the key head.
    groups = num_rows * num_kv_heads
    scaled = (query * scale).view(groups, -1, dim)
    scores = torch.bmm(scaled, keys.reshape(groups, length, dim).transpose(1, 2))
    is_hidden = torch.arange(length) > positions[:, None]
    scores = scores.view(num_rows, num_heads, length).masked_fill_(is_hidden[:, None], -torch.inf)
    weights = torch.softmax(scores, -1).view(groups, -1, length)
    return torch.bmm(weights, values.reshape(groups, length, dim)).view(num_rows, num_heads * dim)


def _project(projection: Any, rows: Tensor) -> Tensor:
    """Applies a linear layer to rows [N, in], where N is a multiple of `TILE`."""
    weight = projection.weight.t()
    out = rows.new_empty(len(rows), weight.shape[1])
    for start in range(0, len(rows), TILE):
        tile = slice(start, start + TILE)
        torch.mm(rows[tile], weight, out=out[tile])
    return out if projection.bias is None else out + projection.bias


def _normalize(norm: Any, rows: Tensor) -> Tensor:
    """Applies an RMS norm over the last axis."""
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return rows * scale * norm.weight


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary position embedding to heads [N, heads, D]."""
    low, high = heads.chunk(2, -1)
    return heads * cos + torch.cat((-high, low), -1) * sin


def _pad(rows: Tensor) -> Tensor:
    """Appends zeros to the rows [N, ...], up to a multiple of `TILE`."""
    missing = -len(rows) % TILE
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows
