"""Samples as flat columns, and what is refused."""

import msgspec
import numpy as np
import pytest

from astraflow import wire
from astraflow.errors import WireError
from astraflow.trainer.columns import columns_from_samples, sample_name
from astraflow.types import AdvantageSpan, Sample, SampleRules, Stream, StreamRule, VersionSpan
from drivers.trainer_builders import VOCAB_SIZE, make_sample


def changed(sample: Sample, **trajectory: object) -> Sample:
    return msgspec.structs.replace(
        sample, trajectory=msgspec.structs.replace(sample.trajectory, **trajectory)
    )


def refused(sample: Sample) -> str:
    """The message about a bad sample that stands between two good ones."""
    bad = msgspec.structs.replace(sample, group_id=5, episode_idx=2)
    with pytest.raises(WireError) as caught:
        columns_from_samples([make_sample(), bad, make_sample()], vocab_size=VOCAB_SIZE)
    return str(caught.value)


def test_trained_columns_hold_exactly_the_masked_tokens_in_order() -> None:
    samples = [
        make_sample([2, 3], [4, 5], behavior=[-0.5, -0.25], advantage=2.0, version=7),
        make_sample([6], [7], behavior=[-3.0], advantage=-1.0, version=8, group_id=4, episode_idx=1),
    ]
    columns = columns_from_samples(samples, vocab_size=VOCAB_SIZE)
    assert columns.token_ids.tolist() == [2, 3, 4, 5, 6, 7]
    assert columns.trained_idx.tolist() == [2, 3, 5]
    assert columns.trained_starts.tolist() == [0, 2, 3]
    assert columns.behavior_logprobs.tolist() == [-0.5, -0.25, -3.0]
    assert columns.advantages.tolist() == [2.0, 2.0, -1.0]
    assert columns.versions.tolist() == [7, 7, 8]
    assert columns.sample_of(np.arange(3)).tolist() == [0, 0, 1]
    assert sample_name(columns, 1) == "group 4/episode 1"


def test_advantages_may_differ_by_turn() -> None:
    sample = changed(
        make_sample([2], [3, 4, 5], behavior=[-1.0, 0.0, -1.0]),
        mask=wire.column([0, 1, 0, 1], "uint8"),
        versions=(VersionSpan(1, 1, 0), VersionSpan(3, 1, 0)),
    )
    sample = msgspec.structs.replace(sample, advantages=(AdvantageSpan(1, 2, 0.5), AdvantageSpan(3, 4, -0.5)))
    columns = columns_from_samples([sample], vocab_size=VOCAB_SIZE)
    assert columns.advantages.tolist() == [0.5, -0.5]
    assert columns.trained_idx.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (changed(make_sample(), mask=wire.column([0, 0, 0, 1], "uint8")), "4 mask entries for 5 tokens"),
        (changed(make_sample(), behavior_logprobs=wire.column([0.0] * 4, "float32")), "4 logprobs"),
        (make_sample(behavior=[-1.0, float("nan")]), "logprob of token 4 is nan; it must be finite"),
        (make_sample(behavior=[float("-inf"), -1.0]), "logprob of token 3 is -inf; it must be finite"),
        (make_sample(behavior=[-1.0, -89.0]), "logprob of token 4 is -89; a sampled token has at least -88"),
        (make_sample(behavior=[-1.0, 0.5]), "logprob of token 4 is 0.5; it is at most 0"),
        (make_sample(advantage=float("nan")), "without a finite advantage"),
        (make_sample([2, VOCAB_SIZE, 3]), f"token id {VOCAB_SIZE} is outside the vocabulary"),
        (make_sample([2, -1, 3]), "token id -1 is negative"),
        (make_sample([], [2, 3]), "nothing predicts the first token"),
        (make_sample([], [2]), "a trajectory of one token cannot be trained"),
        (make_sample([2], []), "no token has mask 1"),
        (make_sample(temperature=0.0), "temperature"),
        (changed(make_sample(), versions=()), "versions for 0 of 2 sampled tokens"),
        (changed(make_sample(), versions=(VersionSpan(3, 9, 0),)), "version span 3+9 is out of order"),
        (msgspec.structs.replace(make_sample(), advantages=()), "without a finite advantage"),
        (
            msgspec.structs.replace(make_sample(), advantages=(AdvantageSpan(3, 6, 1.0),)),
            "an advantage covers tokens 3 to 6 of 5",
        ),
    ],
)  # fmt: skip
def test_a_bad_sample_is_named_with_its_problem(sample: Sample, words: str) -> None:
    message = refused(sample)
    assert "group 5/episode 2" in message
    assert words in message


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(WireError, match="no samples"):
        columns_from_samples([], vocab_size=VOCAB_SIZE)


def test_a_ranks_slice_may_hold_no_samples() -> None:
    columns = columns_from_samples([], vocab_size=VOCAB_SIZE, is_slice=True)
    assert (columns.starts.size, columns.trained_idx.size, columns.trained_starts.tolist()) == (0, 0, [0])


# --- streams --------------------------------------------------------------------------------------

OWN = SampleRules(streams=(StreamRule(name="own"),))


def with_stream(sample: Sample, *entries: float, dtype: wire.ColumnType = "float32") -> Sample:
    return changed(sample, streams=(Stream(name="own", dtype=dtype, data=wire.column(entries, dtype)),))


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
def test_a_stream_keeps_its_type_and_loses_what_is_not_trained(dtype: wire.ColumnType) -> None:
    samples = [with_stream(make_sample([2, 3], [4]), 9, 9, 1, dtype=dtype)]
    samples.append(with_stream(make_sample([2], [4, 5]), 9, 2, 3, dtype=dtype))
    rules = SampleRules(streams=(StreamRule(name="own", dtype=dtype),))
    columns = columns_from_samples(samples, vocab_size=VOCAB_SIZE, rules=rules)
    assert columns.streams["own"].tolist() == [1, 2, 3]
    assert columns.streams["own"].dtype == np.dtype(dtype)
    assert columns.num_left_out == 0


def test_a_stream_of_several_values_per_token_keeps_its_rows() -> None:
    stream = Stream(name="route", dtype="int32", width=2, data=wire.column(range(10), "int32"))
    columns = columns_from_samples([changed(make_sample(), streams=(stream,))], vocab_size=VOCAB_SIZE)
    assert columns.streams["route"].tolist() == [[6, 7], [8, 9]]


@pytest.mark.parametrize(
    "odd", [make_sample(), with_stream(make_sample(), 0, 0, 0, 1, 2, dtype="int32")], ids=["lacks", "type"]
)
def test_a_stream_that_only_some_trajectories_have_is_left_out_and_counted(odd: Sample) -> None:
    good = with_stream(make_sample(), 0, 0, 0, 1, 2)
    columns = columns_from_samples([good, odd, good], vocab_size=VOCAB_SIZE)
    assert (columns.streams, columns.num_left_out) == ({}, 1)


@pytest.mark.parametrize(
    ("odd", "has"),
    [
        (make_sample(), "is missing, but train.loss reads it"),
        (with_stream(make_sample(), 0, 0, 0, 1, 2, dtype="int32"), "has 1 int32 values per token"),
        (with_stream(make_sample(), 0, 0, 0, 1), "has 4 entries for 5 tokens"),
        (with_stream(make_sample(), 0, 0, 0, 1, 1e16), "has 1e+16 at a trained token"),
    ],
)
def test_a_trajectory_whose_stream_cannot_be_read_is_named(odd: Sample, has: str) -> None:
    odd = msgspec.structs.replace(odd, group_id=5, episode_idx=2)
    good = with_stream(make_sample(), 0, 0, 0, 1, 2)
    first = msgspec.structs.replace(good, group_id=5, episode_idx=2)
    with pytest.raises(WireError) as caught:
        columns_from_samples([good, first, odd], vocab_size=VOCAB_SIZE, rules=OWN)
    assert f"policy actor, group 5/episode 2/trajectory 1 (role actor): stream 'own' {has}" in str(
        caught.value
    )


def test_a_stream_that_need_not_be_there_is_checked_where_it_is() -> None:
    rules = SampleRules(streams=(StreamRule(name="own", high=5, is_needed=False),))
    columns = columns_from_samples([make_sample()], vocab_size=VOCAB_SIZE, rules=rules)
    assert columns.streams == {}
    # What is beyond the bounds at a token that is not trained is never read.
    context = with_stream(make_sample(), 9, 9, 9, 1, 2)
    assert columns_from_samples([context], vocab_size=VOCAB_SIZE, rules=rules).streams["own"].tolist() == [
        1, 2,
    ]  # fmt: skip
    with pytest.raises(WireError, match=r"has 6 at a trained token; expected -1e\+15 to 5"):
        columns_from_samples([with_stream(make_sample(), 0, 0, 0, 1, 6)], vocab_size=VOCAB_SIZE, rules=rules)
