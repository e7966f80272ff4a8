"""Samples as flat columns, and what is refused."""

import msgspec
import numpy as np
import pytest

from astraflow import wire
from astraflow.errors import WireError
from astraflow.trainer.columns import columns_from_samples, sample_name
from astraflow.types import AdvantageSpan, Sample, Stream, VersionSpan
from trainer_builders import VOCAB_SIZE, make_sample


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
    sample = changed(make_sample([2], [3, 4, 5]), mask=wire.column([0, 1, 0, 1], "uint8"))
    sample = msgspec.structs.replace(sample, advantages=(AdvantageSpan(1, 2, 0.5), AdvantageSpan(3, 4, -0.5)))
    columns = columns_from_samples([sample], vocab_size=VOCAB_SIZE)
    assert columns.advantages.tolist() == [0.5, -0.5]
    assert columns.trained_idx.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (changed(make_sample(), mask=wire.column([0, 0, 0, 1], "uint8")), "5 token ids, 4 mask"),
        (changed(make_sample(), behavior_logprobs=wire.column([0.0] * 4, "float32")), "4 logprobs"),
        (make_sample(behavior=[-1.0, float("nan")]), "logprobs that are not finite (first at token 4;"),
        (make_sample(behavior=[float("-inf"), -1.0]), "logprobs that are not finite"),
        (make_sample(advantage=float("nan")), "without a finite advantage"),
        (make_sample([2, VOCAB_SIZE, 3]), f"outside 0..{VOCAB_SIZE - 1} (first at token 1"),
        (make_sample([2, -1, 3]), "token ids outside"),
        (make_sample([], [2, 3]), "first token"),
        (make_sample(temperature=0.0), "temperature"),
        (changed(make_sample(), versions=()), "without a version"),
        (changed(make_sample(), versions=(VersionSpan(3, 9, 0),)), "a version covers tokens 3 to 12 of 5"),
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


def test_a_batch_without_trained_tokens_is_refused() -> None:
    sample = changed(make_sample(), mask=wire.column([0] * 5, "uint8"))
    with pytest.raises(WireError, match="trained token"):
        columns_from_samples([sample], vocab_size=VOCAB_SIZE)


# --- streams --------------------------------------------------------------------------------------


def with_stream(sample: Sample, *entries: float, dtype: wire.ColumnType = "float32") -> Sample:
    return changed(sample, streams=(Stream(name="own", dtype=dtype, data=wire.column(entries, dtype)),))


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
def test_a_stream_keeps_its_type_and_loses_what_is_not_trained(dtype: wire.ColumnType) -> None:
    samples = [with_stream(make_sample([2, 3], [4]), 9, 9, 1, dtype=dtype)]
    samples.append(with_stream(make_sample([2], [4, 5]), 9, 2, 3, dtype=dtype))
    columns = columns_from_samples(samples, vocab_size=VOCAB_SIZE, needed_streams=("own",))
    assert columns.streams["own"].tolist() == [1, 2, 3]
    assert columns.streams["own"].dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    ("odd", "has"),
    [
        (make_sample(), "no entries"),
        (with_stream(make_sample(), 0, 0, 0, 1, 2, dtype="int32"), "20 bytes of int32"),
        (with_stream(make_sample(), 0, 0, 0, 1), "16 bytes of float32"),
    ],
)
def test_a_trajectory_without_the_stream_of_the_others_is_named(odd: Sample, has: str) -> None:
    odd = msgspec.structs.replace(odd, group_id=5, episode_idx=2)
    good = with_stream(make_sample(), 0, 0, 0, 1, 2)
    first = msgspec.structs.replace(good, group_id=5, episode_idx=2)
    with pytest.raises(WireError) as caught:
        columns_from_samples([good, first, odd], vocab_size=VOCAB_SIZE)
    assert f"policy actor, group 5/episode 2/trajectory 1 (role actor): stream 'own' has {has}" in str(
        caught.value
    )


def test_a_batch_without_a_stream_that_the_loss_reads_is_refused_with_the_reason() -> None:
    with pytest.raises(WireError, match=r"policy actor: train\.loss reads stream 'own', and no trajectory"):
        columns_from_samples([make_sample()], vocab_size=VOCAB_SIZE, needed_streams=("own",))


@pytest.mark.parametrize("width", [1, 3])
def test_a_ranks_slice_may_have_streams_and_no_trained_token(width: int) -> None:
    sample = make_sample([2, 3, 4], [5, 6])
    data = wire.column(np.zeros(5 * width), "float32")
    stream = Stream(name="teacher", dtype="float32", data=data, width=width)
    trajectory = msgspec.structs.replace(sample.trajectory, mask=bytes(5), versions=(), streams=(stream,))
    untrained = msgspec.structs.replace(sample, trajectory=trajectory)
    columns = columns_from_samples([untrained], vocab_size=VOCAB_SIZE, is_slice=True)
    assert columns.streams["teacher"].shape == ((0,) if width == 1 else (0, width))
