"""Minibatches, microbatches and layouts by example; their laws are in the property tests."""

from dataclasses import replace

import numpy as np

from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.packing import cut_microbatches, cut_minibatches, make_layout
from astraflow.types.token_columns import Columns
from drivers.trainer_builders import VOCAB_SIZE, make_sample


def make_columns(*groups: list[tuple[list[int], list[int]]]) -> Columns:
    samples = [
        make_sample(prompt, sampled, group_id=group, episode_idx=episode)
        for group, members in enumerate(groups)
        for episode, (prompt, sampled) in enumerate(members)
    ]
    return columns_from_samples(samples, vocab_size=VOCAB_SIZE)


def test_a_shared_prompt_is_computed_once() -> None:
    columns = make_columns([([2, 3], [4, 7]), ([2, 3], [5, 6, 7])])
    layout = make_layout(columns, np.arange(2))
    assert layout.token_ids.tolist() == [2, 3, 4, 5, 6]
    assert layout.position_ids.tolist() == [0, 1, 2, 2, 3]
    assert layout.causal_idx.tolist() == [[0, 1]]
    assert layout.tail_idx.tolist() == [[2, 2], [3, 4]]
    assert layout.key_idx.tolist() == [[0, 1, 2, 2], [0, 1, 3, 4]]
    assert layout.key_mask[0].tolist() == [[True, True, True, False], [True, True, True, True]]
    assert layout.predict_idx.tolist() == [1, 2, 1, 3, 4]
    assert layout.target_ids.tolist() == [4, 7, 5, 6, 7]
    assert layout.num_sample_tokens == 9


def test_equal_beginnings_of_different_groups_are_not_shared() -> None:
    columns = make_columns([([2, 3], [4, 6])], [([2, 3], [5, 6])])
    assert make_layout(columns, np.arange(2)).causal_idx.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_tokens_after_the_last_prediction_are_not_computed() -> None:
    columns = make_columns([([2, 3], [4])], [([2, 3], [4, 5, 6, 7])])
    # The last two tokens are untrained, as those of a tool's result would be.
    columns = replace(columns, trained_idx=columns.trained_idx[:3], trained_starts=np.array([0, 1, 3]))
    layout = make_layout(columns, np.arange(2))
    assert layout.token_ids.tolist() == [2, 3, 2, 3, 4]
    assert layout.predict_idx.tolist() == [1, 3, 4]
    assert layout.target_ids.tolist() == [4, 4, 5]


def test_a_small_saving_is_not_shared() -> None:
    columns = make_columns([([2], [3] * 9), ([2], [4] * 9)])
    layout = make_layout(columns, np.arange(2))
    assert layout.tail_idx.size == 0
    assert len(layout.token_ids) == 18


def test_identical_samples_are_computed_once() -> None:
    columns = make_columns([([2, 3], [4, 5, 7]), ([2, 3], [6, 7]), ([2, 3], [4, 5, 8])], [([2, 3], [6, 7])])
    layout = make_layout(columns, np.arange(4))
    assert layout.token_ids.tolist() == [2, 3, 4, 5, 6]
    assert layout.predict_idx.tolist() == [1, 2, 3, 1, 4, 1, 2, 3, 1, 4]
    assert layout.target_ids.tolist() == [4, 5, 7, 6, 7, 4, 5, 8, 6, 7]
    assert layout.trained.tolist() == list(range(10))
    assert layout.num_sample_tokens == 18
    apart = make_layout(columns, np.arange(4), share=False)
    assert len(apart.token_ids) == 14


def test_longest_samples_come_first_and_groups_stay_together() -> None:
    short, long = ([2], [3]), ([2], [3] * 8)
    columns = make_columns([short, short], [long, short], [short])
    parts = cut_microbatches(columns, np.arange(5), 18, max_padded=18)
    assert [part.tolist() for part in parts] == [[2, 3], [0, 1, 4]]


def test_padding_that_nobody_computes_takes_no_budget() -> None:
    short, long = ([2], [3]), ([2], [3] * 8)
    columns = make_columns([short, short], [long, short], [short])
    assert [part.tolist() for part in cut_microbatches(columns, np.arange(5), 17)] == [[2, 3, 0, 1, 4]]
    assert [part.tolist() for part in cut_microbatches(columns, np.arange(5), 16)] == [[2, 3, 0, 1], [4]]


def test_a_sample_over_the_budget_stands_alone() -> None:
    columns = make_columns([([2], [3] * 8)], [([2], [3])], [([2], [3])])
    assert [part.tolist() for part in cut_microbatches(columns, np.arange(3), 4)] == [[0], [1, 2]]


def test_every_part_keeps_the_budget_counting_its_first_sample() -> None:
    columns = make_columns(*[[([2], [3] * 4)] for _ in range(6)])  # six samples of 5 tokens
    parts = cut_microbatches(columns, np.arange(6), 12)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert all(columns.lengths[part].sum() <= 12 for part in parts)


def test_the_seed_alone_decides_the_minibatches() -> None:
    columns = make_columns(*[[([2], [3])] * 2 for _ in range(16)])
    first, same, other = (
        [part.tolist() for part in cut_minibatches(columns.group_ids, 4, seed=seed)] for seed in (1, 1, 2)
    )
    assert first == same
    assert first != other
    assert [len(part) for part in first] == [8, 8, 8, 8]


def test_uneven_groups_give_minibatches_of_similar_size() -> None:
    columns = make_columns(*[[([2], [3])] * num for num in (8, 1, 1, 1, 1, 8, 2, 2)])
    sizes = [len(part) for part in cut_minibatches(columns.group_ids, 2, seed=3)]
    assert sum(sizes) == 24
    assert min(sizes) >= 8


def test_groups_may_be_split_over_all_minibatches() -> None:
    columns = make_columns(*[[([2], [3])] * 8 for _ in range(16)])
    parts = cut_minibatches(columns.group_ids, 2, seed=1, split_groups=True)
    assert [len(part) for part in parts] == [64, 64]
    for part in parts:
        groups = columns.group_ids[part]
        assert len(np.unique(groups)) > 14  # drawn among samples: hardly any group is in one half alone
        assert (np.diff(groups) >= 0).all()  # samples of a group stand together and share their prefix
