"""Packing: nothing is lost, doubled or leaked, whatever the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.packing import cut_microbatches, cut_minibatches, make_layout
from astraflow.trainer.step import token_logprobs
from astraflow.trainer.torch.forward import TrainerForward
from astraflow.types import Sample
from astraflow.types.token_columns import Columns
from drivers.trainer_builders import VOCAB_SIZE, logprobs_alone, make_sample, make_tiny_model

TOKENS = st.lists(st.integers(2, 3), min_size=1, max_size=8)
"""Two different ids only, so that samples often share more than their prompt."""
GROUP = st.tuples(TOKENS, st.lists(st.tuples(TOKENS, st.booleans()), min_size=1, max_size=5))
GROUPS = st.lists(GROUP, min_size=1, max_size=5)


def samples_of(groups: list[tuple[list[int], list[tuple[list[int], bool]]]]) -> list[Sample]:
    """Samples of groups; now and then one with a prompt of its own."""
    return [
        make_sample([9, 8] if is_odd else prompt, sampled, group_id=7 * group, episode_idx=episode)
        for group, (prompt, members) in enumerate(groups)
        for episode, (sampled, is_odd) in enumerate(members)
    ]


def columns_of(groups: list[tuple[list[int], list[tuple[list[int], bool]]]]) -> Columns:
    return columns_from_samples(samples_of(groups), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_tiny_model()


@pytest.fixture(scope="module")
def packed_forward() -> TrainerForward:
    forward = TrainerForward(make_tiny_model(), vocab_size=VOCAB_SIZE, config=TorchBackendConfig())
    assert forward.is_packed
    return forward


@settings(deadline=None, max_examples=20)
@given(groups=st.lists(GROUP, min_size=1, max_size=3), budget=st.integers(10, 120), share=st.booleans())
def test_packed_logprobs_equal_those_of_each_sample_alone(
    model: torch.nn.Module,
    packed_forward: TrainerForward,
    groups: list[tuple[list[int], list[tuple[list[int], bool]]]],
    budget: int,
    share: bool,
) -> None:
    samples = samples_of(groups)
    columns = columns_from_samples(samples, vocab_size=VOCAB_SIZE)
    found = np.full(len(columns.trained_idx), np.nan, dtype=np.float32)
    for part in cut_microbatches(columns, np.arange(len(samples)), budget):
        packed = packed_forward.tensors(make_layout(columns, part, share=share))
        with torch.no_grad():
            logprobs = token_logprobs(packed_forward.logits(packed), packed.target_ids)
        found[packed.trained] = logprobs.numpy()
    expected = torch.cat([logprobs_alone(model, sample) for sample in samples])
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(groups=GROUPS, num=st.integers(1, 8), seed=st.integers(0, 2**40), split_groups=st.booleans())
def test_minibatches_hold_every_sample_once_and_none_is_empty(
    groups: list[tuple[list[int], list[tuple[list[int], bool]]]], num: int, seed: int, split_groups: bool
) -> None:
    columns = columns_of(groups)
    parts = cut_minibatches(columns.group_ids, num, seed=seed, split_groups=split_groups)
    assert len(parts) == min(num, len(columns.lengths))
    assert all(part.size for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(columns.lengths)))
    if len(groups) >= num and not split_groups:
        homes = [set(columns.group_ids[part].tolist()) for part in parts]
        assert sum(map(len, homes)) == len(groups)  # no group is split


@settings(deadline=None)
@given(groups=GROUPS, budget=st.integers(1, 200), padding=st.sampled_from((None, 1.0, 2.0)))
def test_microbatches_hold_every_sample_once_within_the_budget(
    groups: list[tuple[list[int], list[tuple[list[int], bool]]]], budget: int, padding: float | None
) -> None:
    columns = columns_of(groups)
    max_padded = None if padding is None else round(padding * budget)
    parts = cut_microbatches(columns, np.arange(len(columns.lengths)), budget, max_padded=max_padded)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(columns.lengths)))
    for part in parts:
        padded = len(part) * int(columns.lengths[part].max())
        is_within = int(columns.lengths[part].sum()) <= budget
        assert (is_within and (max_padded is None or padded <= max_padded)) or len(part) == 1
        layout = make_layout(columns, part)
        assert len(layout.token_ids) <= layout.num_sample_tokens == int(columns.lengths[part].sum())


@settings(deadline=None)
@given(groups=GROUPS, share=st.booleans())
def test_a_layout_predicts_every_trained_token_once_from_the_token_before(
    groups: list[tuple[list[int], list[tuple[list[int], bool]]]], share: bool
) -> None:
    columns = columns_of(groups)
    layout = make_layout(columns, np.arange(len(columns.lengths)), share=share)
    assert sorted(layout.trained.tolist()) == list(range(len(columns.trained_idx)))
    where = columns.trained_idx[layout.trained]
    np.testing.assert_array_equal(layout.target_ids, columns.token_ids[where])
    np.testing.assert_array_equal(layout.token_ids[layout.predict_idx], columns.token_ids[where - 1])
    own_start = columns.starts[columns.sample_of(layout.trained)]
    np.testing.assert_array_equal(layout.position_ids[layout.predict_idx], where - 1 - own_start)
