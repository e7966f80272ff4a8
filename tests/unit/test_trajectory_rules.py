"""What a trainer requires of a trajectory: each rule, at its bounds."""

import math
import re

import msgspec
import numpy as np
import pytest

from astraflow.errors import WireError
from astraflow.models.images import IMAGE
from astraflow.trajectory_rules import ANY_TRAINER, MIN_LOGPROB, check_shape, check_values
from astraflow.types import MediaRef, Stream, Trajectory, VersionSpan
from astraflow.types.status import ImageTokens, SampleRules, StreamRule
from astraflow.wire import array, column
from drivers.dataflow_driver import make_trajectory
from drivers.vision_models import picture

IMAGES = ImageTokens(token_id=9, patch=4, merge=2, min_pixels=64, max_pixels=4096)
TEACHER = StreamRule(name="teacher", low=-2.0, high=0.0)


def changed(**fields: object) -> Trajectory:
    """Seven tokens, the last four of them sampled."""
    return msgspec.structs.replace(make_trajectory(), **fields)


def with_teacher(*values: float, dtype: str = "float32") -> Trajectory:
    return changed(streams=(Stream(name="teacher", dtype=dtype, data=column(values, dtype)),))  # type: ignore[arg-type]


def with_image(*, first_sampled: int, start: int = 1) -> Trajectory:
    """Ten tokens. The six from `start` on stand for an image, and those from `first_sampled` are sampled."""
    tokens = [9 if start <= idx < start + 6 else 1 for idx in range(10)]
    num = 10 - first_sampled
    return msgspec.structs.replace(
        make_trajectory(num_prompt=first_sampled, num_sampled=num),
        token_ids=column(tokens, "int32"),
        media=(MediaRef(kind=IMAGE, uri=picture(0), start=start),),
    )


def test_a_trajectory_that_keeps_all_rules_tells_how_many_tokens_were_sampled() -> None:
    rules = SampleRules(vocab_size=10**6, max_tokens=7, images=IMAGES, streams=(TEACHER,))
    assert check_shape(with_teacher(9.0, -9.0, 1.0, 0.0, -1.0, -2.0, 0.0), rules) == 4
    assert check_shape(make_trajectory(), ANY_TRAINER) == 4
    assert check_shape(with_image(first_sampled=7), SampleRules(images=IMAGES)) == 3


ONE = changed(
    token_ids=column([1], "int32"), mask=b"\1", behavior_logprobs=column([-1.0], "float32"), turns=(),
    versions=(VersionSpan(0, 1, 0),),
)  # fmt: skip


@pytest.mark.parametrize(
    ("trajectory", "rules", "told"),
    [
        (ONE, ANY_TRAINER, "of one token cannot be trained"),
        (make_trajectory(num_prompt=0), ANY_TRAINER, "token 0 has mask 1"),
        (changed(temperature=0.0), ANY_TRAINER, "greedy data cannot train"),
        (changed(temperature=math.inf), ANY_TRAINER, "sampled at temperature inf"),
        (make_trajectory(), SampleRules(max_tokens=6), "7 tokens; the policy's model has only 6 positions"),
        (make_trajectory(), SampleRules(streams=(TEACHER,)), "'teacher' is missing, but train.loss reads it"),
        (
            with_teacher(*[0.0] * 7, dtype="int32"),
            SampleRules(streams=(TEACHER,)),
            "1 int32 values per token",
        ),
        (
            with_teacher(*[0.0] * 6, 0.5),
            SampleRules(streams=(TEACHER,)),
            "0.5 at a trained token; expected -2",
        ),
        (with_teacher(*[0.0] * 6, -3), SampleRules(streams=(TEACHER,)), "-3 at a trained token"),
        (
            with_teacher(*[0.0] * 7),
            SampleRules(refused_streams=("teacher",)),
            "cannot be used by the policy's",
        ),
        (with_image(first_sampled=7), SampleRules(images=None), "media of kind 'image' at token 1"),
        (with_image(first_sampled=6), SampleRules(images=IMAGES), "tokens 1 to 7 stand for an image"),
        (
            with_image(first_sampled=5, start=0),
            SampleRules(images=IMAGES),
            "tokens 0 to 6 stand for an image",
        ),
        (with_image(first_sampled=8, start=4), SampleRules(images=IMAGES), "is out of place"),
    ],
)
def test_a_trajectory_that_breaks_a_rule_is_refused(
    trajectory: Trajectory, rules: SampleRules, told: str
) -> None:
    with pytest.raises(WireError, match=re.escape(told)):
        check_shape(trajectory, rules)
    assert check_shape(trajectory, None) > 0  # it is consistent, so it may still be evaluated


def test_a_stream_that_the_trainer_can_do_without_may_be_missing() -> None:
    rule = msgspec.structs.replace(TEACHER, is_needed=False)
    assert check_shape(make_trajectory(), SampleRules(streams=(rule,))) == 4


def test_a_logprob_that_cannot_be_trained_may_still_be_evaluated() -> None:
    logprobs = array(make_trajectory().behavior_logprobs, "float32").copy()
    logprobs[4] = np.float32(MIN_LOGPROB)
    check_values(changed(behavior_logprobs=column(logprobs, "float32")), ANY_TRAINER)
    logprobs[4] = -89.5
    broken = changed(behavior_logprobs=column(logprobs, "float32"))
    with pytest.raises(WireError, match=r"logprob of token 4 is -89\.5; a sampled token has at least -88"):
        check_values(broken, ANY_TRAINER)
    check_values(broken, None)


def test_the_vocabulary_is_the_rules_or_else_the_callers() -> None:
    trajectory = changed(token_ids=column([0, 1, 2, 3, 4, 5, 30], "int32"))
    check_values(trajectory, SampleRules(vocab_size=31), vocab_size=7)
    check_values(trajectory, None, vocab_size=31)
    for rules, own in ((SampleRules(vocab_size=30), 0), (None, 30), (ANY_TRAINER, 30)):
        with pytest.raises(WireError, match="token id 30 is outside the vocabulary of 30"):
            check_values(trajectory, rules, vocab_size=own)
