"""Splits a batch into minibatches and microbatches, and lays a microbatch out for one forward pass.

`Columns` are a batch's samples, checked, as flat arrays. A `Layout` lists the tokens of a microbatch so that
each is computed once. Samples of one group that begin with the same tokens (the prompt, at least) share this
prefix: it is computed in one row, and each sample adds only its own tail, which attends to the shared prefix.

Attention is computed within a row, or from a tail to its own prefix. So nothing leaks between sequences, and
a sample's logprobs equal those of the sample alone. Everything here is pure numpy.

Legend: N tokens computed, P trained tokens, R causal rows, Q tail rows. `Tc`, `Tp` and `Tq` are the lengths
of the longest causal row, prefix and tail.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from astraflow.types.token_columns import Columns

__all__ = ["Layout", "cut_microbatches", "cut_minibatches", "make_layout", "with_advantage"]

Ints = NDArray[np.int64]

_MIN_SAVED_FRAC = 0.25
"""A group shares its prefix if that saves at least this share of its tokens. Tails need a mask, which makes
them slower than causal rows, so a smaller saving would cost time."""

_MAX_MASK_ENTRIES = 2**25
"""Most entries of the tails' mask (128 MB as float32). If it would have more, nothing is shared: each sample
is then a causal row, which needs no mask."""


def cut_minibatches(
    group_ids: Ints, num_minibatches: int, *, seed: int, split_groups: bool = False
) -> list[Ints]:
    """Cuts a batch, given by its samples' groups [B], into minibatches of whole groups, and returns the
    sample positions of each.

    Groups come in random order, and the minibatches have as equal numbers of samples as groups allow. With
    `split_groups`, or with fewer groups than minibatches, samples are shuffled instead. With fewer samples
    than minibatches, each sample is a minibatch. Within a minibatch the samples of a group stand together, so
    that they can share their prefix.
    """
    num_samples = len(group_ids)
    num = min(num_minibatches, num_samples)
    rng = np.random.default_rng(seed)
    groups, group_of = np.unique(group_ids, return_inverse=True)
    if num == 1:
        return [np.argsort(group_of, kind="stable")]
    if split_groups or len(groups) < num:
        parts = np.array_split(rng.permutation(num_samples), num)
        # Sorted by group, and within a group by position.
        return [part[np.lexsort((part, group_of[part]))] for part in parts]
    place_of_group = rng.permutation(len(groups))
    place = place_of_group[group_of]
    order = np.argsort(place, kind="stable")
    # ends[i] samples are in the first i + 1 groups. A cut follows the first group that reaches an equal share
    # or misses it by at most half a sample: equal shares need not be whole numbers.
    ends = np.cumsum(np.bincount(place))
    equal_shares = num_samples * np.arange(1, num) / num
    num_groups_before = np.searchsorted(ends, equal_shares - 0.5, side="left") + 1
    num_groups_before = _distinct(num_groups_before, len(groups))
    return np.split(order, ends[num_groups_before - 1])


def _distinct(cuts: Ints, num_groups: int) -> Ints:
    """Moves cuts apart so that each part holds a group. A cut is the number of groups before it.

    A large group can attract several cuts. Example: cuts `1 1 4` of 4 groups become `1 2 3`.
    """
    idx = np.arange(len(cuts))
    # Less their index, cuts that are at least one apart never fall; so a running maximum moves the rest up.
    spread = np.maximum.accumulate(cuts - idx) + idx
    # Behind the last cut one group must be left, behind the last but one two, and so on.
    return np.minimum(spread, num_groups - len(cuts) + idx)


def with_advantage(columns: Columns, samples: Ints) -> Ints:
    """Keeps the samples that have a trained token whose advantage is not 0."""
    has_advantage = np.zeros(len(columns.lengths), dtype=np.bool_)
    has_advantage[columns.sample_of(np.flatnonzero(columns.advantages))] = True
    return samples[has_advantage[samples]]


def cut_microbatches(
    columns: Columns, samples: Ints, token_budget: int, *, max_padded: int | None = None
) -> list[Ints]:
    """Cuts a minibatch into parts of at most `token_budget` tokens each, the longest samples first; without
    samples there is no part.

    With `max_padded`, the number of a part's samples times its longest sample is bounded too. What shared
    prefixes save is not counted. A sample longer than the budget is a part of its own. The samples of a group
    stand together where the budget allows.
    """
    if not samples.size:
        return []
    lengths = columns.lengths[samples]
    groups = columns.group_ids[samples]
    unique, group_of = np.unique(groups, return_inverse=True)
    longest = np.zeros(len(unique), dtype=np.int64)
    np.maximum.at(longest, group_of, lengths)
    # Groups are sorted by their longest sample, so that a part's samples have similar lengths; the last key
    # counts first.
    order = np.lexsort((samples, groups, -longest[group_of]))
    parts: list[Ints] = []
    start = 0
    widest = 0  # tokens of the longest sample since `start`
    num_tokens = 0
    for idx, length in enumerate(lengths[order].tolist()):
        widest = max(widest, length)
        num_tokens += length
        num_padded = (idx + 1 - start) * widest
        is_full = num_tokens > token_budget or (max_padded is not None and num_padded > max_padded)
        if idx > start and is_full:
            parts.append(samples[order[start:idx]])
            start = idx
            widest = num_tokens = length
    parts.append(samples[order[start:]])
    return parts


@dataclass(frozen=True, slots=True)
class Layout:
    """Index arrays of one forward pass over all samples of a microbatch; each token is computed once.

    Tokens are packed: first the causal rows one after the other, then the tails, all without padding. A
    causal row is a shared prefix or a whole sample. The other arrays say where packed tokens stand in padded
    rows.
    Example: two samples `p p a` and `p p b b` of one group give one causal row `p p` and the tail rows `a .`
    and `b b`. The packed tokens are `p p a b b`, and their positions are 0 1 2 2 3.
    """

    token_ids: Ints
    """[N] the packed tokens."""
    position_ids: Ints
    """[N] position of each packed token in its own sequence."""
    causal_idx: Ints
    """[R, Tc] packed position of each entry of the causal rows; right padding repeats a row's last entry."""
    tail_idx: Ints
    """[Q, Tq] packed position of each entry of the tails, padded likewise; Q is 0 if nothing is shared."""
    key_idx: Ints
    """[Q, Tp + Tq] packed positions that a tail may attend to: those of its prefix, then its own."""
    key_mask: NDArray[np.bool_]
    """[Q, Tq, Tp + Tq] which of these positions each entry of a tail sees."""
    row_idx: Ints
    """[N] where each packed token is in the causal rows and the tails, both flattened and joined."""
    predict_idx: Ints
    """[P] packed position whose output predicts the trained token."""
    target_ids: Ints
    """[P] the trained tokens."""
    trained: Ints
    """[P] positions of the trained tokens in the trained columns of `Columns`."""
    num_sample_tokens: int
    """Tokens of all samples; a shared token counts once for every sample that has it."""


# size: the arrays of one layout, each of which needs the ones before
def make_layout(columns: Columns, samples: Ints, *, share: bool = True) -> Layout:
    """Lays out some samples of a batch. The samples of one group share a prefix if they stand together.

    With `share=False` each sample is a causal row of its own.
    """
    lengths = columns.lengths[samples]
    starts = columns.starts[samples]
    prefix, owner = _shared_prefixes(columns, samples) if share else _unshared(len(samples))
    is_tail = prefix > 0
    # The first sample of a family owns the row of the prefix, and has a tail like the others.
    is_row = owner == np.arange(len(samples))
    row_of = (np.cumsum(is_row) - 1)[owner]
    row_lengths = np.where(is_tail, prefix, lengths)[is_row]
    row_starts = _starts(row_lengths)
    tail_lengths = (lengths - prefix)[is_tail]
    tail_prefix = prefix[is_tail]
    num_row_tokens = int(row_lengths.sum())
    tail_starts = num_row_tokens + _starts(tail_lengths)

    # Positions in the sequences: a tail goes on where its prefix ends.
    row, row_position = _ragged(row_lengths)
    tail, place_in_tail = _ragged(tail_lengths)
    tail_position = place_in_tail + tail_prefix[tail]
    row_source = starts[is_row][row] + row_position
    tail_source = starts[is_tail][tail] + tail_position
    causal_idx = _padded(row_starts, row_lengths)
    tail_idx = _padded(tail_starts, tail_lengths)
    prefix_idx = _padded(row_starts[row_of[is_tail]], tail_prefix)
    key_idx = np.concatenate([prefix_idx, tail_idx], axis=1)
    place_in_rows = row * causal_idx.shape[1] + row_position
    place_in_tails = causal_idx.size + tail * tail_idx.shape[1] + place_in_tail

    trained, trained_sample = _trained_of(columns, samples)
    # The output at a token predicts the next one.
    before = columns.trained_idx[trained] - starts[trained_sample] - 1
    first_in_tail = np.zeros(len(samples), dtype=np.int64)
    first_in_tail[is_tail] = tail_starts
    return Layout(
        token_ids=columns.token_ids[np.concatenate([row_source, tail_source])].astype(np.int64),
        position_ids=np.concatenate([row_position, tail_position]),
        causal_idx=causal_idx,
        tail_idx=tail_idx,
        key_idx=key_idx,
        key_mask=_key_mask(tail_prefix, tail_idx.shape[1], key_idx.shape[1]),
        row_idx=np.concatenate([place_in_rows, place_in_tails]),
        predict_idx=_packed_positions(before, trained_sample, prefix, row_starts[row_of], first_in_tail),
        target_ids=columns.token_ids[columns.trained_idx[trained]].astype(np.int64),
        trained=trained,
        num_sample_tokens=int(lengths.sum()),
    )


def _packed_positions(
    position: Ints, sample: Ints, prefix: Ints, first_in_row: Ints, first_in_tail: Ints
) -> Ints:
    """The packed positions of tokens, which are given by their `position` in their `sample`.

    A token of a shared prefix, or of a sample that shares nothing, is in a causal row. A token behind a
    shared prefix is in its sample's tail.
    """
    is_in_tail = (prefix[sample] > 0) & (position >= prefix[sample])
    in_tail = first_in_tail[sample] + position - prefix[sample]
    in_row = first_in_row[sample] + position
    return np.where(is_in_tail, in_tail, in_row)


def _unshared(num_samples: int) -> tuple[Ints, Ints]:
    """What `_shared_prefixes` returns if nothing is shared: each sample is the row of itself."""
    return np.zeros(num_samples, dtype=np.int64), np.arange(num_samples)


def _shared_prefixes(columns: Columns, samples: Ints) -> tuple[Ints, Ints]:
    """The length of the prefix that each sample shares (0 if none), and the sample whose row holds it.

    A family is a run of neighbours of one group; its first sample's row holds the prefix. A prefix leaves
    every sample at least one token of its own, since a tail must not be empty.
    """
    lengths = columns.lengths[samples]
    groups = columns.group_ids[samples]
    num = len(samples)
    is_first = np.concatenate([[True], groups[1:] != groups[:-1]])
    first_of_family = np.flatnonzero(is_first)
    family = np.cumsum(is_first) - 1
    first = first_of_family[family]
    # What all samples of a family have in common is the least of what each has in common with the first.
    common = np.minimum(_common_with_first(columns, samples, first), lengths - 1)
    prefix_of_family = np.minimum.reduceat(common, first_of_family)
    tokens_of_family = np.add.reduceat(lengths, first_of_family)
    saved = (np.bincount(family) - 1) * prefix_of_family
    is_shared = (saved > 0) & (saved >= _MIN_SAVED_FRAC * tokens_of_family)
    prefix = np.where(is_shared, prefix_of_family, 0)[family]
    tails = (lengths - prefix)[prefix > 0]
    if tails.size:
        # The longest sample is taken for the longest prefix and the longest tail together.
        num_mask_entries = tails.size * int(tails.max()) * int(lengths.max())
        if num_mask_entries > _MAX_MASK_ENTRIES:
            return _unshared(num)
    return prefix, np.where(prefix > 0, first, np.arange(num))


def _common_with_first(columns: Columns, samples: Ints, first: Ints) -> Ints:
    """Length of the prefix that each sample has in common with another one, `first`, of the same samples."""
    lengths = columns.lengths[samples]
    starts = columns.starts[samples]
    common = np.minimum(lengths, lengths[first])
    sample, position = _ragged(common)
    tokens = columns.token_ids
    differs = tokens[starts[sample] + position] != tokens[starts[first][sample] + position]
    where = np.flatnonzero(differs)
    np.minimum.at(common, sample[where], position[where])  # the prefix ends at the first difference
    return common


def _trained_of(columns: Columns, samples: Ints) -> tuple[Ints, Ints]:
    """All trained tokens of `samples`: their positions in the trained columns, and the sample of each."""
    first = columns.trained_starts[samples]
    counts = columns.trained_starts[samples + 1] - first
    sample, position = _ragged(counts)
    return first[sample] + position, sample


def _key_mask(prefix: Ints, width: int, num_keys: int) -> NDArray[np.bool_]:
    """Each entry of a tail sees the whole prefix, without its padding, and its tail up to itself.

    The tail's padding needs no mask: it is on the right, where no real entry sees it.
    """
    num_prefix = num_keys - width
    mask = np.zeros((len(prefix), width, num_keys), dtype=np.bool_)
    mask[:, :, :num_prefix] = (np.arange(num_prefix) < prefix[:, None])[:, None]
    mask[:, :, num_prefix:] = np.tri(width, dtype=np.bool_)
    return mask


def _starts(lengths: Ints) -> Ints:
    """Where each of several rows begins if they stand one after the other."""
    # The last slice matters only without rows, where a single 0 would remain.
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)[:-1]])[: len(lengths)]


def _ragged(lengths: Ints) -> tuple[Ints, Ints]:
    """The row of each entry and its position in that row, for rows of these lengths one after the other."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - _starts(lengths)[row]


def _padded(starts: Ints, lengths: Ints) -> Ints:
    """[len(starts), max(lengths)] start + position; behind a row's end its last entry is repeated.

    An entry that is repeated is a valid index, which a special value for padding would not be.
    """
    width = int(lengths.max()) if lengths.size else 0
    return starts[:, None] + np.minimum(np.arange(width), lengths[:, None] - 1)
