"""Splits a batch into minibatches and microbatches, and lays a microbatch out for one forward pass. Pure
numpy.

`Columns` are a batch's samples, checked, as flat arrays. A `Layout` holds each token that must be computed
once: samples of one group that share a prefix (the prompt, at least) share its tokens too. Rows keep the
sequences apart: attention is computed within a row only, so nothing leaks between sequences, and a sample's
logprobs equal those of the sample alone.

Legend: B samples, N tokens, P trained tokens, R causal rows, Q tail rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from astraflow.trainer.columns import Columns

__all__ = ["Layout", "cut_microbatches", "cut_minibatches", "make_layout", "with_advantage"]

Ints = NDArray[np.int64]

_MIN_SAVED_FRAC = 0.25
"""A group shares its prefix if that saves this share of its tokens. Rows with a mask are slower than causal
ones, so a smaller saving would cost time."""

_MAX_MASK_ENTRIES = 2**25
"""Largest number of entries in a layout's tail mask (128 MB as float32); longer tails become causal rows,
which need no mask."""


def cut_minibatches(
    columns: Columns, num_minibatches: int, *, seed: int, split_groups: bool = False
) -> list[Ints]:
    """Sample positions of each minibatch: whole groups in random order, as equal in samples as groups allow.

    With `split_groups`, or fewer groups than minibatches, samples are shuffled instead; with fewer samples,
    there are as many minibatches as samples. Within a minibatch the samples of a group stand together.
    """
    num_samples = len(columns.lengths)
    num = min(num_minibatches, num_samples)
    rng = np.random.default_rng(seed)
    groups, group_of = np.unique(columns.group_ids, return_inverse=True)
    if num == 1:
        return [np.argsort(group_of, kind="stable")]
    if split_groups or len(groups) < num:
        parts = np.array_split(rng.permutation(num_samples), num)
        return [part[np.lexsort((part, group_of[part]))] for part in parts]
    rank = rng.permutation(len(groups))
    order = np.argsort(rank[group_of], kind="stable")
    ends = np.cumsum(np.bincount(rank[group_of]))
    wanted = num_samples * np.arange(1, num) / num
    cuts = np.searchsorted(ends, wanted - 0.5, side="left") + 1
    cuts = _distinct(cuts, len(groups))
    return np.split(order, ends[cuts - 1])


def _distinct(cuts: Ints, num_groups: int) -> Ints:
    """Cuts moved apart so that each part holds a group."""
    num = len(cuts)
    spread = np.maximum.accumulate(cuts - np.arange(num)) + np.arange(num)
    return np.minimum(spread, num_groups - num + np.arange(num))


def with_advantage(columns: Columns, samples: Ints) -> Ints:
    """Those of `samples` with a trained token whose advantage is not 0; all of them if there are none."""
    has_advantage = np.zeros(len(columns.lengths), dtype=np.bool_)
    has_advantage[columns.sample_of(np.flatnonzero(columns.advantages))] = True
    kept = samples[has_advantage[samples]]
    return kept if kept.size else samples


def cut_microbatches(columns: Columns, samples: Ints, token_budget: int) -> list[Ints]:
    """Parts of `samples` (a minibatch), each within `token_budget` padded tokens; longest samples first.

    Padded tokens are counted without shared prefixes: number of samples times the longest. A sample longer
    than the budget stands alone. The samples of a group stand together where the budget allows.
    """
    lengths = columns.lengths[samples]
    groups = columns.group_ids[samples]
    unique, group_of = np.unique(groups, return_inverse=True)
    longest = np.zeros(len(unique), dtype=np.int64)
    np.maximum.at(longest, group_of, lengths)
    order = np.lexsort((samples, groups, -longest[group_of]))
    parts: list[Ints] = []
    start = 0
    widest = 0  # tokens of the longest sample since `start`
    for idx, length in enumerate(lengths[order].tolist()):
        widest = max(widest, length)
        if idx > start and (idx + 1 - start) * widest > token_budget:
            parts.append(samples[order[start:idx]])
            start = idx
            widest = length
    parts.append(samples[order[start:]])
    return parts


@dataclass(frozen=True, slots=True)
class Layout:
    """Index arrays of one forward pass. All samples of a microbatch, each token computed once.

    Example: two samples `p p a` and `p p b b` of one group give one causal row `p p` and the tail rows `a .`
    and `b b`; packed tokens are `p p a b b`.
    """

    token_ids: Ints
    """[N] packed: the causal rows one after the other, then the tails."""
    position_ids: Ints
    """[N], of each token in its own sequence."""
    causal_idx: Ints
    """[R, Tc] packed position of each entry of the causal rows; right padding repeats a row's last token."""
    tail_idx: Ints
    """[Q, Tq] packed position of each entry of the tails; Q is 0 if nothing is shared."""
    key_idx: Ints
    """[Q, Tp + Tq] packed positions that a tail may attend to: its prefix, then itself."""
    key_mask: NDArray[np.bool_]
    """[Q, Tq, Tp + Tq] which of them each entry sees."""
    row_idx: Ints
    """[N] where a packed token stands in the causal rows and tails, both flattened and joined."""
    predict_idx: Ints
    """[P] packed position whose output predicts the trained token."""
    target_ids: Ints
    """[P] the trained tokens."""
    trained: Ints
    """[P] their positions in the trained columns of `Columns`."""
    num_sample_tokens: int
    """Tokens of all samples, shared ones counted each time."""


def make_layout(columns: Columns, samples: Ints, *, share: bool = True) -> Layout:
    """Lays out some samples of a batch; those of one group must stand together to share a prefix.

    With `share=False` each sample is a causal row of its own.
    """
    lengths = columns.lengths[samples]
    starts = columns.starts[samples]
    prefix, owner = _shared_prefixes(columns, samples) if share else _unshared(len(samples))
    is_tail = prefix > 0
    is_row = owner == np.arange(len(samples))
    row_of = (np.cumsum(is_row) - 1)[owner]
    row_lengths = np.where(is_tail, prefix, lengths)[is_row]
    row_starts = _starts(row_lengths)
    tail_lengths = (lengths - prefix)[is_tail]
    tail_prefix = prefix[is_tail]
    num_row_tokens = int(row_lengths.sum())
    tail_starts = num_row_tokens + _starts(tail_lengths)

    row, row_position = _ragged(row_lengths)
    tail, tail_position = _ragged(tail_lengths)
    tail_position = tail_position + tail_prefix[tail]
    source_idx = np.concatenate([starts[is_row][row] + row_position, starts[is_tail][tail] + tail_position])
    causal_idx = _padded(row_starts, row_lengths)
    tail_idx = _padded(tail_starts, tail_lengths)
    key_idx = np.concatenate([_padded(row_starts[row_of[is_tail]], tail_prefix), tail_idx], axis=1)
    trained, trained_sample = _trained_of(columns, samples)
    # The output at a token predicts the next one.
    before = columns.trained_idx[trained] - starts[trained_sample] - 1
    first_in_tail = np.zeros(len(samples), dtype=np.int64)
    first_in_tail[is_tail] = tail_starts
    row_idx = np.concatenate(
        [
            row * causal_idx.shape[1] + row_position,
            causal_idx.size + tail * tail_idx.shape[1] + tail_position - tail_prefix[tail],
        ]
    )
    return Layout(
        token_ids=columns.token_ids[source_idx].astype(np.int64),
        position_ids=np.concatenate([row_position, tail_position]),
        causal_idx=causal_idx,
        tail_idx=tail_idx,
        key_idx=key_idx,
        key_mask=_key_mask(tail_prefix, tail_idx.shape[1], key_idx.shape[1]),
        row_idx=row_idx,
        predict_idx=_packed_positions(before, trained_sample, prefix, row_starts[row_of], first_in_tail),
        target_ids=columns.token_ids[columns.trained_idx[trained]].astype(np.int64),
        trained=trained,
        num_sample_tokens=int(lengths.sum()),
    )


def _packed_positions(
    position: Ints, sample: Ints, prefix: Ints, first_in_row: Ints, first_in_tail: Ints
) -> Ints:
    """Where tokens stand in the packed order, by their `position` in their `sample`: tokens of a shared
    prefix in its causal row, those behind it in the sample's tail."""
    is_behind = (prefix[sample] > 0) & (position >= prefix[sample])
    in_tail = first_in_tail[sample] + position - prefix[sample]
    return np.where(is_behind, in_tail, first_in_row[sample] + position)


def _unshared(num_samples: int) -> tuple[Ints, Ints]:
    return np.zeros(num_samples, dtype=np.int64), np.arange(num_samples)


def _shared_prefixes(columns: Columns, samples: Ints) -> tuple[Ints, Ints]:
    """Per sample: length of the prefix that it shares (0: none), and which sample's row holds the prefix.

    A prefix leaves every sharer at least one token of its own.
    """
    lengths = columns.lengths[samples]
    groups = columns.group_ids[samples]
    num = len(samples)
    is_first = np.concatenate([[True], groups[1:] != groups[:-1]])
    first_of_family = np.flatnonzero(is_first)
    family = np.cumsum(is_first) - 1
    first = first_of_family[family]
    common = _common_with_first(columns, samples, first)
    prefix = np.minimum.reduceat(np.minimum(common, lengths - 1), first_of_family)
    sizes = np.bincount(family)
    saved = (sizes - 1) * prefix
    is_shared = saved >= _MIN_SAVED_FRAC * np.add.reduceat(lengths, first_of_family)
    is_shared &= saved > 0
    prefix = np.where(is_shared, prefix, 0)
    per_sample = prefix[family]
    tails = (lengths - per_sample)[per_sample > 0]
    if tails.size and tails.size * int(tails.max()) * int(lengths.max()) > _MAX_MASK_ENTRIES:
        return _unshared(num)
    return per_sample, np.where(per_sample > 0, first, np.arange(num))


def _common_with_first(columns: Columns, samples: Ints, first: Ints) -> Ints:
    """Length of the common prefix of each sample with the sample at position `first` of it."""
    lengths = columns.lengths[samples]
    starts = columns.starts[samples]
    common = np.minimum(lengths, lengths[first])
    sample, position = _ragged(common)
    tokens = columns.token_ids
    differs = tokens[starts[sample] + position] != tokens[starts[first][sample] + position]
    where = np.flatnonzero(differs)
    np.minimum.at(common, sample[where], position[where])
    return common


def _trained_of(columns: Columns, samples: Ints) -> tuple[Ints, Ints]:
    """Positions in the trained columns of all trained tokens of `samples`, and each one's sample."""
    first = columns.trained_starts[samples]
    counts = columns.trained_starts[samples + 1] - first
    sample, position = _ragged(counts)
    return first[sample] + position, sample


def _key_mask(prefix: Ints, width: int, num_keys: int) -> NDArray[np.bool_]:
    num_prefix = num_keys - width
    mask = np.zeros((len(prefix), width, num_keys), dtype=np.bool_)
    mask[:, :, :num_prefix] = (np.arange(num_prefix) < prefix[:, None])[:, None]
    mask[:, :, num_prefix:] = np.tri(width, dtype=np.bool_)
    return mask


def _starts(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)[:-1]])[: len(lengths)]


def _ragged(lengths: Ints) -> tuple[Ints, Ints]:
    """(row, position in the row) of each entry of rows of these lengths, one after the other."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - _starts(lengths)[row]


def _padded(starts: Ints, lengths: Ints) -> Ints:
    """[len(starts), max(lengths)]: start + position; beyond a row's end its last entry repeats."""
    width = int(lengths.max()) if lengths.size else 0
    return starts[:, None] + np.minimum(np.arange(width), lengths[:, None] - 1)
