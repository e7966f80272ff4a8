import math

import msgspec
import pytest

from astraflow.errors import RolloutError
from astraflow.rollout.recorder import EpisodeRecorder, Speaker
from astraflow.types import FinishReason, Generation, Stream, Trajectory, VersionSpan
from astraflow.wire import array, column

ACTOR = Speaker("actor", "actor", 1.0)


def make_generation(
    *ids: int, versions: tuple[int, ...] = (), finish_reason: FinishReason = "stop"
) -> Generation:
    return Generation(
        token_ids=ids,
        logprobs=tuple(-0.1 * i for i in range(1, len(ids) + 1)),
        versions=versions or (3,) * len(ids),
        finish_reason=finish_reason,
    )


def ids(trajectory: Trajectory) -> list[int]:
    return array(trajectory.token_ids, "int32").tolist()


def mask(trajectory: Trajectory) -> list[int]:
    return array(trajectory.mask, "uint8").tolist()


def test_one_completion_becomes_prompt_and_sampled_tokens() -> None:
    recorder = EpisodeRecorder()
    idx = recorder.record(ACTOR, 0, (5, 6), make_generation(7, 8))
    (trajectory,) = recorder.trajectories({}, {0: 1.5})
    assert idx == 0
    assert ids(trajectory) == [5, 6, 7, 8]
    assert mask(trajectory) == [0, 0, 1, 1]
    assert array(trajectory.behavior_logprobs, "float32").tolist() == pytest.approx([0, 0, -0.1, -0.2])
    assert trajectory.versions == (VersionSpan(2, 2, 3),)
    assert trajectory.reward == 1.5


def test_a_second_turn_extends_the_same_trajectory() -> None:
    recorder = EpisodeRecorder()
    recorder.record(ACTOR, 0, (5, 6), make_generation(7, 8))
    recorder.record(ACTOR, 0, (5, 6, 7, 8, 9), make_generation(10, finish_reason="length"))
    (trajectory,) = recorder.trajectories({0: 0.5, 1: 2.0}, {})
    assert ids(trajectory) == [5, 6, 7, 8, 9, 10]
    assert mask(trajectory) == [0, 0, 1, 1, 0, 1]
    assert [(t.start, t.end, t.reward) for t in trajectory.turns] == [(2, 4, 0.5), (5, 6, 2.0)]
    assert trajectory.reward == 2.5
    assert trajectory.finish_reason == "length"
    assert recorder.num_forks == 0


def test_conversations_that_are_left_out_leave_no_trajectory() -> None:
    recorder = EpisodeRecorder()
    recorder.record(ACTOR, 0, (5, 6), make_generation(7))
    recorder.record(ACTOR, 1, (5, 9), make_generation(8))
    (trajectory,) = recorder.trajectories({}, {0: 1.0, 1: 2.0}, left_out={0})
    assert (ids(trajectory), trajectory.reward) == ([5, 9, 8], 2.0)


def test_what_a_shared_trajectory_trains_stays_if_one_of_its_conversations_is_left_out() -> None:
    recorder = EpisodeRecorder()
    recorder.record(ACTOR, 0, (5, 6), make_generation(7))
    recorder.record(ACTOR, 1, (5, 6, 7, 9), make_generation(8))
    (trajectory,) = recorder.trajectories({}, {}, left_out={1})
    assert mask(trajectory) == [0, 0, 1, 0, 1]


def test_sessions_never_share_a_trajectory() -> None:
    recorder = EpisodeRecorder()
    recorder.record(Speaker("actor", "actor", 1.0, "a"), 0, (5, 6), make_generation(7))
    recorder.record(Speaker("actor", "actor", 1.0, "b"), 1, (5, 6, 7, 9), make_generation(8))
    first, second = recorder.trajectories({}, {0: 1.0, 1: -1.0})
    assert (ids(first), mask(first), first.reward) == ([5, 6, 7], [0, 0, 1], 1.0)
    assert (ids(second), mask(second), second.reward) == ([5, 6, 7, 9, 8], [0, 0, 0, 0, 1], -1.0)


def test_an_edited_history_forks_and_trains_each_sampled_token_once() -> None:
    recorder = EpisodeRecorder()
    recorder.record(ACTOR, 0, (5, 6), make_generation(7, 8))
    recorder.record(ACTOR, 0, (5, 6, 8, 9), make_generation(10))
    first, fork = recorder.trajectories({}, {0: 1.0})
    assert mask(first) == [0, 0, 1, 1]
    assert ids(fork) == [5, 6, 8, 9, 10]
    assert mask(fork) == [0, 0, 0, 0, 1]
    assert (first.is_fork, fork.is_fork) == (False, True)
    assert first.reward == fork.reward == 1.0
    assert recorder.num_forks == 1


def test_branches_of_one_answer_mask_the_shared_tokens_in_the_later_branch() -> None:
    recorder = EpisodeRecorder()
    recorder.record(ACTOR, 0, (5,), make_generation(7))
    recorder.record(ACTOR, 0, (5, 7, 1), make_generation(8))
    recorder.record(ACTOR, 1, (5, 7, 2), make_generation(9))
    first, fork = recorder.trajectories({}, {})
    assert mask(first) == [0, 1, 0, 1]
    assert mask(fork) == [0, 0, 0, 1]
    assert fork.is_fork


def test_two_conversations_with_the_same_prompt_are_no_fork() -> None:
    recorder = EpisodeRecorder()
    recorder.record(ACTOR, 0, (5, 6), make_generation(7))
    recorder.record(ACTOR, 1, (5, 6), make_generation(7))
    assert [t.is_fork for t in recorder.trajectories({}, {})] == [False, False]


def test_conversations_that_coincide_keep_their_own_trajectories_and_rewards() -> None:
    recorder = EpisodeRecorder()
    for conversation in (0, 1):
        recorder.record(ACTOR, conversation, (5,), make_generation(6))
    for conversation in (1, 0):
        recorder.record(ACTOR, conversation, (5, 6, 7), make_generation(8))
    first, second = recorder.trajectories({}, {0: 1.0, 1: -1.0})
    assert mask(first) == mask(second) == [0, 1, 0, 1]
    assert (first.reward, second.reward) == (1.0, -1.0)


def test_a_conversation_that_never_had_room_is_counted_and_leaves_nothing() -> None:
    recorder = EpisodeRecorder()
    with pytest.raises(KeyError):
        recorder.record_overflow(0)
    recorder.record(ACTOR, 0, (5,), make_generation(6))
    idx = recorder.record_overflow(1)
    (trajectory,) = recorder.trajectories({idx: 3.0}, {1: 2.0})
    assert (trajectory.reward, trajectory.finish_reason) == (0.0, "stop")
    assert (recorder.num_overflows, recorder.num_completions) == (1, 2)


@pytest.mark.parametrize(
    "other", [Speaker("critic", "actor", 1.0), Speaker("actor", "judge", 1.0), Speaker("actor", "actor", 0.5)]
)
def test_speakers_never_share_a_trajectory(other: Speaker) -> None:
    recorder = EpisodeRecorder()
    recorder.record(ACTOR, 0, (5,), make_generation(6))
    recorder.record(other, 1, (5, 6), make_generation(7))
    assert [mask(t) for t in recorder.trajectories({}, {})] == [[0, 1], [0, 0, 1]]


def test_versions_are_run_lengths_over_the_sampled_tokens_alone() -> None:
    recorder = EpisodeRecorder()
    recorder.record(ACTOR, 0, (5,), make_generation(6, 7, 8, versions=(3, 3, 4)))
    recorder.record(ACTOR, 0, (5, 6, 7, 8, 9), make_generation(10, versions=(4,)))
    (trajectory,) = recorder.trajectories({}, {})
    assert trajectory.versions == (VersionSpan(1, 2, 3), VersionSpan(3, 1, 4), VersionSpan(5, 1, 4))


def test_a_turn_without_room_truncates_the_trajectory_and_keeps_its_reward() -> None:
    recorder = EpisodeRecorder()
    recorder.record(ACTOR, 0, (5,), make_generation(6))
    idx = recorder.record_overflow(0)
    (trajectory,) = recorder.trajectories({idx: -1.0}, {})
    assert trajectory.finish_reason == "length"
    assert trajectory.reward == -1.0
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        (Generation(token_ids=(1, 2), logprobs=(0.0,), versions=(1,), finish_reason="stop"), "2 tokens, 1 "),
        (Generation(token_ids=(), logprobs=(), versions=(), finish_reason="stop"), "no token"),
        (Generation(token_ids=(1,), logprobs=(math.nan,), versions=(1,), finish_reason="stop"), "not finite"),
        (
            Generation(
                token_ids=(1, 2), logprobs=(math.inf, -math.inf), versions=(1, 1), finish_reason="stop"
            ),
            "not finite",
        ),
        (Generation(token_ids=(1,), logprobs=(-1.0,), versions=(1,), finish_reason="abort"), "aborted"),
    ],
)  # fmt: skip
def test_a_broken_generation_is_an_error(generation: Generation, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        EpisodeRecorder().record(ACTOR, 0, (5,), generation)


# --- streams --------------------------------------------------------------------------------------


def make_stream(*entries: float, name: str = "teacher") -> Stream:
    return Stream(name=name, dtype="float32", data=column(entries, "float32"))


def test_streams_of_engine_and_workflow_stand_where_their_tokens_do() -> None:
    recorder = EpisodeRecorder()
    first = msgspec.structs.replace(make_generation(7, 8), streams=(make_stream(0.5, 0.25, name="engine"),))
    second = msgspec.structs.replace(make_generation(10), streams=(make_stream(0.125, name="engine"),))
    recorder.record(ACTOR, 0, (5, 6), first)
    recorder.record(ACTOR, 0, (5, 6, 7, 8, 9), second)
    recorder.add_stream(0, make_stream(1, 2))
    recorder.add_stream(1, make_stream(3))
    (trajectory,) = recorder.trajectories({}, {})
    found = {stream.name: array(stream.data, stream.dtype).tolist() for stream in trajectory.streams}
    assert found == {"engine": [0, 0, 0.5, 0.25, 0, 0.125], "teacher": [0, 0, 1, 2, 0, 3]}


def test_a_fork_has_no_entries_for_what_it_does_not_train() -> None:
    recorder = EpisodeRecorder()
    recorder.record(ACTOR, 0, (5, 6), make_generation(7, 8))
    recorder.record(ACTOR, 0, (5, 6, 7, 9), make_generation(10))
    recorder.add_stream(0, make_stream(1, 2))
    recorder.add_stream(1, make_stream(3))
    whole, fork = recorder.trajectories({}, {})
    assert array(whole.streams[0].data, "float32").tolist() == [0, 0, 1, 2]
    assert array(fork.streams[0].data, "float32").tolist() == [0, 0, 0, 0, 3]


def test_a_stream_of_some_turns_of_a_trajectory_is_an_error_that_names_them() -> None:
    recorder = EpisodeRecorder()
    recorder.record(ACTOR, 0, (5, 6), make_generation(7, 8))
    recorder.record(ACTOR, 0, (5, 6, 7, 8, 9), make_generation(10))
    recorder.add_stream(0, make_stream(1, 2))
    with pytest.raises(RolloutError, match=r"actor, trajectory 0: completion 1 .*'teacher'"):
        recorder.trajectories({}, {})


def test_a_stream_that_does_not_fit_its_completion_is_refused() -> None:
    recorder = EpisodeRecorder()
    recorder.record(ACTOR, 0, (5, 6), make_generation(7, 8))
    with pytest.raises(RolloutError, match=r"'teacher' .* 0 has 1 entries for 2 tokens"):
        recorder.add_stream(0, make_stream(1))
    with pytest.raises(RolloutError, match="not of this episode"):
        recorder.add_stream(1, make_stream(1))
    recorder.add_stream(0, make_stream(1, 2))
    with pytest.raises(RolloutError, match="recorded twice"):
        recorder.add_stream(0, make_stream(1, 2))
