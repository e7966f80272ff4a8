"""Splits a batch into minibatches and microbatches, and lays out a microbatch for one forward pass.

`Columns` hold a batch's checked samples as flat arrays. A `Layout` lists the tokens of a microbatch so that
each is computed once. Samples of a group that begin with the same tokens (at least the prompt) share this
prefix: it is computed in one row, and each sample adds only its own tail, which attends to the shared prefix.
Samples with the same tokens are computed as one. A sample ends with the token that predicts its last trained
token, since no output after it is used.

Attention is limited to a row, or to a tail and its prefix. So nothing leaks between sequences, and a sample's
logprobs equal those of the sample computed alone. Everything here is pure numpy.

Legend: N tokens computed, P trained tokens, R causal rows, Q tail rows. `Tc`, `Tp` and `Tq` are the lengths
of the longest causal row, prefix and tail.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from astraflow.types.token_columns import Columns

__all__ = ["Layout", "cut_microbatches", "cut_minibatches", "make_layout", "samples_with_advantage"]

Ints = NDArray[np.int64]

_MIN_SAVED_FRAC = 0.25
"""A group shares its prefix if that saves at least this share of its tokens. Tails need a mask, which makes
them slower than causal rows, so a smaller saving would cost time overall."""

_MAX_MASK_ENTRIES = 2**25
"""Largest number of entries in the tails' mask (128 MB as float32). If it would have more, nothing is shared:
each sample is then a causal row, which needs no mask."""


def cut_minibatches(
    group_ids: Ints, num_minibatches: int, *, seed: int, split_groups: bool = False
) -> list[Ints]:
    """Cuts a batch, given by the groups [B] of its samples, into minibatches of whole groups, and returns the
    sample positions of each.

    The order of groups is random, and the minibatches are as equal in size as whole groups allow. With
    `split_groups`, or with fewer groups than minibatches, samples are shuffled instead. With fewer samples
    than minibatches, each sample is a minibatch. Within a minibatch, the samples of a group are adjacent, so
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
    # The first i + 1 groups have ends[i] samples. A cut follows the first group that reaches an equal share,
    # or misses it by at most half a sample, since equal shares need not be whole numbers.
    ends = np.cumsum(np.bincount(place))
    equal_shares = num_samples * np.arange(1, num) / num
    num_groups_before = np.searchsorted(ends, equal_shares - 0.5, side="left") + 1
    num_groups_before = _spread_cuts(num_groups_before, len(groups))
    return np.split(order, ends[num_groups_before - 1])


def _spread_cuts(cuts: Ints, num_groups: int) -> Ints:
    """Moves cuts apart so that each part has a group. A cut is the number of groups before it.

    A large group can attract several cuts. Example: cuts `1 1 4` of 4 groups become `1 2 3`.
    """
    idx = np.arange(len(cuts))
    # Cuts are distinct if `cuts - idx` never decreases, so a running maximum moves the others up.
    spread = np.maximum.accumulate(cuts - idx) + idx
    # One group must remain after the last cut, two after the cut before it, and so on.
    return np.minimum(spread, num_groups - len(cuts) + idx)


def samples_with_advantage(columns: Columns, samples: Ints) -> Ints:
    """The samples that have a trained token with an advantage other than 0."""
    has_advantage = np.zeros(len(columns.lengths), dtype=np.bool_)
    has_advantage[columns.sample_of(np.flatnonzero(columns.advantages))] = True
    return samples[has_advantage[samples]]


def cut_microbatches(
    columns: Columns, samples: Ints, token_budget: int, *, max_padded: int | None = None
) -> list[Ints]:
    """Cuts a minibatch into parts of at most `token_budget` tokens each, the longest samples first. There are
    no parts without samples.

    `max_padded` also bounds the number of a part's samples times the length of its longest sample. Savings
    from shared prefixes are ignored. A sample longer than the budget forms its own part. The samples of a
    group are adjacent where the budget allows.
    """
    if not samples.size:
        return []
    lengths = columns.lengths[samples]
    groups = columns.group_ids[samples]
    unique, group_of = np.unique(groups, return_inverse=True)
    longest = np.zeros(len(unique), dtype=np.int64)
    np.maximum.at(longest, group_of, lengths)
    # Groups are sorted by their longest sample, so that a part's samples have similar lengths. The last key
    # of `lexsort` has priority.
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

    Tokens are packed: first all causal rows, then all tails, without padding. A causal row is a shared prefix
    or a whole sample. The other arrays map packed tokens to padded rows.
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
    """[Q, Tq, Tp + Tq] which of these positions each entry of a tail attends to."""
    row_idx: Ints
    """[N] position of each packed token in the flattened causal rows followed by the flattened tails."""
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
    """Lays out some samples of a batch. The samples of a group share a prefix if they are adjacent.

    Samples that repeat the tokens of another one are predicted from its outputs. With `share=False`, each
    sample is its own causal row.
    """
    trained, trained_sample = _trained_positions(columns, samples)
    # The output at a token predicts the next one.
    before = columns.trained_idx[trained] - columns.starts[samples][trained_sample] - 1
    num_sample_tokens = int(columns.lengths[samples].sum())
    lengths = np.ones(len(samples), dtype=np.int64)
    np.maximum.at(lengths, trained_sample, before + 1)
    if share:
        distinct, copy_of = _distinct(columns, samples, lengths)
        samples = samples[distinct]
        lengths = lengths[distinct]
        trained_sample = copy_of[trained_sample]
    starts = columns.starts[samples]
    prefix, owner = _shared_prefixes(columns, samples, lengths) if share else _share_nothing(len(samples))
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

    # Positions in the sequences: a tail continues where its prefix ends.
    row, row_position = _ragged(row_lengths)
    tail, place_in_tail = _ragged(tail_lengths)
    tail_position = place_in_tail + tail_prefix[tail]
    row_source = starts[is_row][row] + row_position
    tail_source = starts[is_tail][tail] + tail_position
    causal_idx = _padded_idx(row_starts, row_lengths)
    tail_idx = _padded_idx(tail_starts, tail_lengths)
    prefix_idx = _padded_idx(row_starts[row_of[is_tail]], tail_prefix)
    key_idx = np.concatenate([prefix_idx, tail_idx], axis=1)
    place_in_rows = row * causal_idx.shape[1] + row_position
    place_in_tails = causal_idx.size + tail * tail_idx.shape[1] + place_in_tail

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
        num_sample_tokens=num_sample_tokens,
    )


def _distinct(columns: Columns, samples: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Indices of the samples that do not repeat the tokens of an earlier one, and for each sample [B], the
    place of its tokens among them."""
    numbers: dict[bytes, int] = {}
    tokens = columns.token_ids
    spans = zip(columns.starts[samples].tolist(), lengths.tolist(), strict=True)
    copy_of = [numbers.setdefault(tokens[at : at + size].tobytes(), len(numbers)) for at, size in spans]
    _, first = np.unique(copy_of, return_index=True)
    return first, np.array(copy_of, dtype=np.int64)


def _packed_positions(
    position: Ints, sample: Ints, prefix: Ints, first_in_row: Ints, first_in_tail: Ints
) -> Ints:
    """The packed positions of tokens, which are given by their `position` in their `sample`.

    A token of a shared prefix, or of a sample that shares nothing, is in a causal row. A token after a shared
    prefix is in its sample's tail.
    """
    is_in_tail = (prefix[sample] > 0) & (position >= prefix[sample])
    in_tail = first_in_tail[sample] + position - prefix[sample]
    in_row = first_in_row[sample] + position
    return np.where(is_in_tail, in_tail, in_row)


def _share_nothing(num_samples: int) -> tuple[Ints, Ints]:
    """The result of `_shared_prefixes` if nothing is shared: each sample is its own row."""
    return np.zeros(num_samples, dtype=np.int64), np.arange(num_samples)


def _shared_prefixes(columns: Columns, samples: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """The length of the prefix that each sample, of the given computed length, shares (0 if none), and the
    sample whose row holds the prefix.

    A family is a run of adjacent samples of one group; the row of its first sample holds the prefix. A prefix
    leaves every sample at least one token, since a tail must not be empty.
    """
    groups = columns.group_ids[samples]
    num = len(samples)
    is_first = np.concatenate([[True], groups[1:] != groups[:-1]])
    first_of_family = np.flatnonzero(is_first)
    family = np.cumsum(is_first) - 1
    first = first_of_family[family]
    # The prefix common to a family is the shortest of those that each sample has in common with the first.
    common = np.minimum(_common_with_first(columns, samples, lengths, first), lengths - 1)
    prefix_of_family = np.minimum.reduceat(common, first_of_family)
    tokens_of_family = np.add.reduceat(lengths, first_of_family)
    saved = (np.bincount(family) - 1) * prefix_of_family
    is_shared = (saved > 0) & (saved >= _MIN_SAVED_FRAC * tokens_of_family)
    prefix = np.where(is_shared, prefix_of_family, 0)[family]
    tails = (lengths - prefix)[prefix > 0]
    if tails.size:
        # An upper bound: the longest sample stands for the longest prefix plus the longest tail.
        num_mask_entries = tails.size * int(tails.max()) * int(lengths.max())
        if num_mask_entries > _MAX_MASK_ENTRIES:
            return _share_nothing(num)
    return prefix, np.where(prefix > 0, first, np.arange(num))


def _common_with_first(columns: Columns, samples: Ints, lengths: Ints, first: Ints) -> Ints:
    """[B]: length of the prefix that each sample has in common with sample `first` [B]."""
    starts = columns.starts[samples]
    common = np.minimum(lengths, lengths[first])
    sample, position = _ragged(common)
    tokens = columns.token_ids
    differs = tokens[starts[sample] + position] != tokens[starts[first][sample] + position]
    where = np.flatnonzero(differs)
    np.minimum.at(common, sample[where], position[where])  # the prefix ends at the first difference
    return common


def _trained_positions(columns: Columns, samples: Ints) -> tuple[Ints, Ints]:
    """All trained tokens of `samples`: their positions in the trained columns, and the sample of each."""
    first = columns.trained_starts[samples]
    counts = columns.trained_starts[samples + 1] - first
    sample, position = _ragged(counts)
    return first[sample] + position, sample


def _key_mask(prefix: Ints, width: int, num_keys: int) -> NDArray[np.bool_]:
    """Each entry of a tail attends to the whole prefix, without padding, and to the tail up to itself.

    The tail's padding needs no mask: it is on the right, so no real entry attends to it.
    """
    num_prefix = num_keys - width
    mask = np.zeros((len(prefix), width, num_keys), dtype=np.bool_)
    mask[:, :, :num_prefix] = (np.arange(num_prefix) < prefix[:, None])[:, None]
    mask[:, :, num_prefix:] = np.tri(width, dtype=np.bool_)
    return mask


def _starts(lengths: Ints) -> Ints:
    """The start of each row if the rows are concatenated."""
    # The last slice matters only without rows, where a single 0 would remain.
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)[:-1]])[: len(lengths)]


def _ragged(lengths: Ints) -> tuple[Ints, Ints]:
    """The row of each entry, and its position in that row, for concatenated rows of these lengths."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - _starts(lengths)[row]


def _padded_idx(starts: Ints, lengths: Ints) -> Ints:
    """[len(starts), max(lengths)]: start + position. Padding repeats a row's last entry, because that is a
    valid index."""
    width = int(lengths.max()) if lengths.size else 0
    return starts[:, None] + np.minimum(np.arange(width), lengths[:, None] - 1)
