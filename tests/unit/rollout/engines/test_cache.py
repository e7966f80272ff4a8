"""Attention over slots against attention written out."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from astraflow.rollout.engines.cache import AttentionRule, CacheShape, KvCache, causal_attention, row_moves

LAYERS, HEADS, KV_HEADS, DIM, SLOTS, CONTEXT = 2, 4, 2, 8, 40, 64
VALUE_DIM = 12
SHAPE = CacheShape(LAYERS, KV_HEADS, DIM, VALUE_DIM, torch.float32, torch.device("cpu"))
RULES = [
    AttentionRule(scale=0.3),
    AttentionRule(scale=0.3, window=3),
    AttentionRule(scale=0.3, softcap=0.5),
    AttentionRule(scale=0.3, chunk=5),
    AttentionRule(scale=0.3, window=4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
]


def full_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """One sequence [heads, T, dim], written out position by position."""
    out = torch.zeros(query.shape[1], HEADS, VALUE_DIM)
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        for t in range(query.shape[1]):
            first = max(0, t + 1 - rule.window) if rule.window else 0
            first = max(first, t - t % rule.chunk) if rule.chunk else first
            scores = keys[kv, first : t + 1] @ query[head, t] * rule.scale
            if rule.softcap:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            if rule.sinks is not None:
                scores = torch.cat((scores, rule.sinks[head : head + 1]))
            weights = torch.softmax(scores, -1)[: t + 1 - first]
            out[t, head] = weights @ values[kv, first : t + 1]
    return out.reshape(query.shape[1], HEADS * VALUE_DIM)


def sequence(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    return tuple(torch.randn(n, length, dim, generator=generator) for n, dim in sizes)  # type: ignore[return-value]


def decode_last(
    cache: KvCache, sequences: list[tuple[torch.Tensor, ...]], rule: AttentionRule
) -> torch.Tensor:
    positions = np.array([s[0].shape[1] - 1 for s in sequences])
    cache.begin_step(positions)
    query, keys, values = (torch.stack([s[i][:, -1] for s in sequences]) for i in range(3))
    return cache.attend(1, query, keys, values, rule)


def fill(cache: KvCache, row: int, seq: tuple[torch.Tensor, ...]) -> None:
    cache.write(1, seq[1][None, :, :-1], seq[2][None, :, :-1], torch.tensor([row]))


@pytest.mark.parametrize("rule", RULES)
def test_whole_sequences_attend_causally(rule: AttentionRule) -> None:
    query, keys, values = sequence(7, 0)
    out = causal_attention(query[None], keys[None], values[None], rule)[0]
    assert torch.allclose(out, full_attention(query, keys, values, rule), atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_a_step_attends_to_what_each_row_holds_and_nothing_else(rule: AttentionRule) -> None:
    cache = KvCache(SHAPE, num_slots=SLOTS, max_context=CONTEXT)
    sequences = [sequence(length, seed) for seed, length in enumerate((1, 5, 64, 2, 33))]
    for row in range(SLOTS):  # leftovers of other requests
        fill(cache, row, sequence(CONTEXT, 100 + row))
    for row, seq in enumerate(sequences):
        fill(cache, row, seq)
    out = decode_last(cache, sequences, rule)
    for row, seq in enumerate(sequences):
        assert torch.allclose(out[row], full_attention(*seq, rule)[-1], atol=1e-5)


@pytest.mark.parametrize("context", [1, 7, 16, 17])
def test_a_context_may_be_shorter_than_a_vector(context: int) -> None:
    cache = KvCache(SHAPE, num_slots=4, max_context=context)
    sequences = [sequence(length, length) for length in (context, 1)]
    for row, seq in enumerate(sequences):
        fill(cache, row, seq)
    out = decode_last(cache, sequences, RULES[0])
    for row, seq in enumerate(sequences):
        assert torch.allclose(out[row], full_attention(*seq, RULES[0])[-1], atol=1e-5)


def test_rows_of_very_different_lengths_are_cut_into_blocks_that_agree() -> None:
    cache = KvCache(SHAPE, num_slots=SLOTS, max_context=4096)
    sequences = [sequence(4000 if row >= 32 else 3, row) for row in range(SLOTS)]
    for row, seq in enumerate(sequences):
        fill(cache, row, seq)
    out = decode_last(cache, sequences, RULES[0])
    for row in (0, 31, 32, 39):
        query, keys, values = sequences[row]
        scores = torch.einsum("hd,hld->hl", query[:, -1], keys.repeat_interleave(2, 0)) * 0.3
        last = torch.einsum("hl,hld->hd", torch.softmax(scores, -1), values.repeat_interleave(2, 0)).reshape(
            -1
        )
        assert torch.allclose(out[row], last, atol=1e-5)


def test_copied_rows_attend_like_their_source() -> None:
    cache = KvCache(SHAPE, num_slots=SLOTS, max_context=CONTEXT)
    seq = sequence(9, 3)
    fill(cache, 0, seq)
    cache.move(np.array([0, 0]), np.array([1, 2]), 8)
    out = decode_last(cache, [seq, seq, seq], RULES[0])
    assert torch.allclose(out[1], out[0])
    assert torch.allclose(out[2], full_attention(*seq, RULES[0])[-1], atol=1e-5)


def test_a_cleared_row_hides_values_that_are_not_finite() -> None:
    cache = KvCache(SHAPE, num_slots=SLOTS, max_context=CONTEXT)
    query, keys, values = sequence(20, 1)
    fill(cache, 0, (query, keys * torch.nan, values * torch.nan))
    cache.clear(0)
    short = sequence(2, 2)
    fill(cache, 0, short)
    assert torch.isfinite(decode_last(cache, [short], RULES[0])).all()


def test_rows_move_so_that_blocks_descend_in_length_and_as_few_as_possible() -> None:
    lengths = np.array([90, 9, 80, 8, 7, 70, 6, 60])
    sources, targets = row_moves(lengths, 4)
    assert sorted(sources) == sorted(targets) == [1, 3, 5, 7]
    lengths[targets] = lengths[sources]
    assert lengths[:4].min() >= lengths[4:].max()


@pytest.mark.parametrize("lengths", [[5], [50] * 8, [60, 50, 55, 49, 9, 3, 4, 8]])
def test_rows_that_lie_well_stay(lengths: list[int]) -> None:
    sources, targets = row_moves(np.array(lengths), 4)
    assert len(sources) == len(targets) == 0


def test_moved_rows_attend_as_before() -> None:
    cache = KvCache(SHAPE, num_slots=SLOTS, max_context=CONTEXT)
    sequences = [sequence(length, length) for length in (9, 4, 30)]
    for row, seq in enumerate(sequences):
        fill(cache, row, seq)
    cache.move(np.array([2, 0, 1]), np.array([0, 1, 2]), 29)
    moved = [sequences[i] for i in (2, 0, 1)]
    for row, out in enumerate(decode_last(cache, moved, RULES[0])):
        assert torch.allclose(out, full_attention(*moved[row], RULES[0])[-1], atol=1e-5)


class Reads(TorchDispatchMode):
    """Counts the calls of attention, and the keys and values that they read."""

    num_calls = 0
    num_values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default:
            self.num_calls += 1
            self.num_values += args[1].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("lengths", "num_calls", "frac"),
    [
        ([4000] * 16 + [200] * 112, 4, 0.25),  # two blocks, each of keys and of values
        ([4000] * 128, 2, 1.0),
        ([300] * 64 + [200] * 64, 2, 1.0),  # another call would take longer than the padding
    ],
)
def test_off_a_cpu_rows_are_cut_into_blocks_if_that_saves_more_than_a_call_costs(
    lengths: list[int], num_calls: int, frac: float
) -> None:
    shape = CacheShape(1, 8, 128, 128, torch.bfloat16, torch.device("meta"))
    cache = KvCache(shape, num_slots=len(lengths), max_context=4096)
    cache.begin_step(np.array(lengths) - 1)
    query, keys = (
        torch.zeros(len(lengths), num, 128, dtype=torch.bfloat16, device="meta") for num in (16, 8)
    )
    with Reads() as reads:
        cache.attend(0, query, keys, keys, AttentionRule(scale=0.1))
    assert reads.num_calls == num_calls
    assert reads.num_values <= frac * 2 * len(lengths) * 8 * 128 * max(lengths)
