from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from astraflow.dataflow.core.commands import PayloadRef, TrajectoryMeta
from astraflow.dataflow.service.ingest import (
    PolicyLimits,
    check_publication,
    check_results,
    facts_of,
    vocab_size,
)
from astraflow.errors import WeightsError, WireError
from astraflow.types import (
    Chunk,
    Episode,
    EpisodeResult,
    Failure,
    MediaRef,
    MetricItem,
    PolicyInfo,
    Sampling,
    Stream,
    Trajectory,
    Turn,
    VersionSpan,
)
from astraflow.types.bounds import MAX_METRIC, MAX_REWARD
from astraflow.wire import array, column, decode
from drivers.dataflow_driver import VOCAB, make_episode, make_tensor_manifest, make_trajectory

LIMITS = {
    "actor": PolicyLimits(
        PolicyInfo(name="actor", is_trained=True, sampling=Sampling(), max_lag=1), 2, vocab_size=VOCAB
    ),
    "judge": PolicyLimits(PolicyInfo(name="judge", is_trained=False, sampling=Sampling(), max_lag=1), -1),
}


def check(episode: Episode, *, hosts: tuple[str, ...] = ("actor", "judge"), lease_id: str = "5.1.0") -> None:
    """Among good episodes, as in a request; raises what is found of this one."""
    good = EpisodeResult(lease_id="4.0.0", outcome=make_episode(make_trajectory()))
    failure = EpisodeResult(lease_id="4.1.0", outcome=Failure(error_class="x", message="y"))
    result = EpisodeResult(lease_id=lease_id, outcome=episode)
    broken = check_results((good, failure, result, good), policies=LIMITS, hosts=())
    assert broken.keys() <= {2}
    alone = check_results((result,), policies=LIMITS, hosts=hosts)
    assert [str(err) for err in broken.values()] in ([str(err) for err in alone.values()], [])
    if alone:
        raise alone[0]


def changed(**fields: object) -> Trajectory:
    return msgspec.structs.replace(make_trajectory(), **fields)


def with_logprob(idx: int, value: float) -> bytes:
    logprobs = array(make_trajectory().behavior_logprobs, "float32").copy()
    logprobs[idx] = value
    return column(logprobs, "float32")


def with_token(value: int) -> bytes:
    ids = array(make_trajectory().token_ids, "int32").copy()
    ids[1] = value
    return column(ids, "int32")


BROKEN: dict[str, tuple[Callable[[], Trajectory], str]] = {
    "short logprobs": (
        lambda: changed(behavior_logprobs=column(np.zeros(6), "float32")),
        "6 logprobs for 7 tokens",
    ),
    "short mask": (lambda: changed(mask=column(np.ones(6), "uint8")), "6 mask entries for 7 tokens"),
    "torn column": (lambda: changed(token_ids=b"12345"), "token_ids: int32 column of 5 bytes"),
    "no tokens": (lambda: changed(token_ids=b"", mask=b"", behavior_logprobs=b""), "no tokens"),
    "nan": (lambda: changed(behavior_logprobs=with_logprob(4, np.nan)), "logprob of token 4 is nan"),
    "positive": (lambda: changed(behavior_logprobs=with_logprob(4, 0.5)), "logprob of token 4 is 0.5"),
    "stray logprob": (lambda: changed(behavior_logprobs=with_logprob(1, -0.5)), "token 1 has mask 0"),
    "negative id": (lambda: changed(token_ids=with_token(-1)), "token id -1 is negative"),
    "foreign id": (lambda: changed(token_ids=with_token(VOCAB)), f"outside the vocabulary of {VOCAB}"),
    "mask 2": (lambda: changed(mask=column([0, 0, 0, 1, 1, 2, 1], "uint8")), "mask has an entry 2"),
    "mask 0": (
        lambda: changed(mask=bytes(7), behavior_logprobs=column(np.zeros(7), "float32"), versions=()),
        "no token has mask 1",
    ),
    "too few versions": (lambda: changed(versions=(VersionSpan(3, 3, 0),)), "versions for 3 of 4"),
    "versions on prompt": (lambda: changed(versions=(VersionSpan(2, 5, 0),)), "tokens with mask 0"),
    "versions overlap": (
        lambda: changed(versions=(VersionSpan(3, 3, 0), VersionSpan(5, 2, 0))),
        r"version span 5\+2 is out of order",
    ),
    "versions beyond memory": (
        lambda: changed(versions=(VersionSpan(3, 2**60, 0),)),
        rf"version span 3\+{2**60} is out of order or beyond 7",
    ),
    "future version": (lambda: changed(versions=(VersionSpan(3, 4, 3),)), "version 3 of policy 'actor'"),
    "turn beyond": (lambda: changed(turns=(Turn(start=3, end=8),)), r"turn 0 \[3, 8\) is out of order"),
    "turn misses": (lambda: changed(turns=(Turn(start=3, end=6),)), "the turns cover 3 of 4"),
    "nan reward": (lambda: changed(reward=float("nan")), "reward nan is not finite"),
    "nan turn": (lambda: changed(turns=(Turn(start=3, end=7, reward=float("inf")),)), "reward inf of turn 0"),
    "temperature": (lambda: changed(temperature=0.7), "temperature 0.7, but the recipe sets 1.0"),
    "policy": (lambda: changed(policy="critic"), "policy 'critic' is not in this run"),
    "stream": (
        lambda: changed(streams=(Stream(name="teacher", dtype="float32", data=bytes(8)),)),
        "stream 'teacher' has 2 entries for 7 tokens",
    ),
    "stream twice": (
        lambda: changed(streams=(Stream(name="teacher", dtype="uint8", data=bytes(7)),) * 2),
        "stream 'teacher' comes twice",
    ),
    "stream nan": (
        lambda: changed(
            streams=(Stream(name="t", dtype="float32", data=column([0] * 6 + [np.nan], "float32")),)
        ),
        "stream 't' has an entry that is not finite, at token 6",
    ),
    "media": (lambda: changed(media=(MediaRef(kind="image", uri="u", start=7),)), "media at 7"),
    "media out of order": (
        lambda: changed(
            media=(MediaRef(kind="image", uri="u", start=2), MediaRef(kind="image", uri="u", start=1))
        ),
        "media at 1 after media at 2",
    ),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_trajectory_is_refused_by_name(name: str) -> None:
    make, message = BROKEN[name]
    with pytest.raises(WireError, match=f"^group 5/trajectory 1: .*{message}"):
        check(make_episode(make_trajectory(), make()))


def test_a_good_episode_passes() -> None:
    check(make_episode(make_trajectory(version=2), make_trajectory(policy="judge")))


def test_a_negative_zero_is_a_zero() -> None:
    check(make_episode(changed(behavior_logprobs=with_logprob(1, -0.0))))


def test_evaluation_may_sample_at_another_temperature() -> None:
    check(make_episode(changed(temperature=0.0)), lease_id="e1.0.0")


def test_a_policy_that_the_sender_does_not_host_is_refused() -> None:
    with pytest.raises(WireError, match="did not register as hosting policy 'actor'"):
        check(make_episode(make_trajectory()), hosts=("judge",))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score": float("nan")}, "score nan"),
        ({"duration_s": -1.0}, "duration_s -1.0"),
        ({"metrics": (MetricItem("x", float("inf")),)}, "metric 'x' is inf"),
    ],
)
def test_broken_figures_of_an_episode_are_refused(fields: dict[str, object], message: str) -> None:
    episode = msgspec.structs.replace(make_episode(make_trajectory()), **fields)
    with pytest.raises(WireError, match=f"^group 5: {message}"):
        check(episode)


def test_facts_hold_what_the_core_needs_and_only_trained_policies() -> None:
    stored: list[bytes] = []

    def store(payload: bytes) -> PayloadRef:
        stored.append(payload)
        return PayloadRef(0, 28, len(payload))

    actor = msgspec.structs.replace(make_trajectory(), versions=(VersionSpan(3, 1, 1), VersionSpan(4, 3, 2)))
    facts = facts_of(make_episode(actor, make_trajectory(policy="judge")), ("actor",), store)
    (meta,) = facts.trajectories
    assert (meta.num_tokens, meta.num_trained_tokens, meta.num_trained_by_turn) == (7, 4, (4,))
    assert meta.turn_spans == tuple((turn.start, turn.end) for turn in actor.turns)
    assert (meta.oldest_version, meta.newest_version) == (1, 2)
    assert decode(stored[0], Trajectory) == actor
    assert len(stored) == 1


def facts_of_tokens(*ids: int, turns: tuple[Turn, ...], num_prompt: int = 2) -> TrajectoryMeta:
    trajectory = msgspec.structs.replace(
        make_trajectory(),
        token_ids=column([*ids], "int32"),
        mask=bytes([0] * num_prompt + [1] * (len(ids) - num_prompt)),
        turns=turns,
    )
    facts = facts_of(
        make_episode(trajectory), ("actor",), lambda _: PayloadRef(0, 0, 0), repetition_of=("actor",)
    )
    return facts.trajectories[0]


def test_a_turns_state_key_is_its_own_or_of_what_it_was_shown() -> None:
    turns = (Turn(start=2, end=3), Turn(start=4, end=5), Turn(start=6, end=7))
    first = facts_of_tokens(1, 2, 50, 7, 51, 8, 52, turns=turns)
    other = facts_of_tokens(1, 2, 60, 9, 61, 8, 62, turns=turns)
    same = [a == b for a, b in zip(first.state_keys, other.state_keys, strict=True)]
    assert same == [True, False, True]
    named = (Turn(start=2, end=3, state_key="door"), Turn(start=4, end=7, state_key="door"))
    assert len(set(facts_of_tokens(1, 2, 50, 7, 51, 8, 52, turns=named).state_keys)) == 1


def test_repetition_is_the_share_of_runs_of_eight_that_came_before() -> None:
    turns = (Turn(start=2, end=18),)
    assert facts_of_tokens(1, 2, *range(16), turns=turns).repeated_frac == 0.0
    # Nine runs of eight within 16 equal tokens, one of them new.
    assert facts_of_tokens(1, 2, *[5] * 16, turns=turns).repeated_frac == pytest.approx(8 / 9)
    assert facts_of_tokens(1, 2, *[5] * 7, turns=(Turn(start=2, end=9),)).repeated_frac == 0.0


def test_the_vocabulary_is_read_from_the_manifest() -> None:
    assert vocab_size(make_tensor_manifest("actor", 0, vocab=99)) == 99
    assert vocab_size(msgspec.structs.replace(make_tensor_manifest("actor", 0), tensors=())) == 0


def bounded(*, max_tokens: int = 0, max_sampled: int = 20) -> dict[str, PolicyLimits]:
    sampling = Sampling(max_tokens=max_sampled)
    info = PolicyInfo(name="actor", is_trained=True, sampling=sampling, max_lag=1)
    return {"actor": PolicyLimits(info, 2, vocab_size=VOCAB, max_tokens=max_tokens)}


def found(episode: Episode, policies: dict[str, PolicyLimits], lease_id: str = "5.1.0") -> str:
    result = EpisodeResult(lease_id=lease_id, outcome=episode)
    return str(check_results((result,), policies=policies, hosts=()).get(0, ""))


def test_a_turn_longer_than_the_policys_completions_is_refused() -> None:
    long = make_episode(make_trajectory(num_sampled=2_000_000))
    assert "turn 0 has 2000000 sampled tokens; the policy's sampling.max_tokens is 20" in found(
        long, bounded()
    )
    assert found(make_episode(make_trajectory(num_sampled=20)), bounded()) == ""
    assert found(make_episode(make_trajectory(num_sampled=21)), bounded()) != ""
    assert found(make_episode(make_trajectory(num_sampled=21)), bounded(), "e1.0.0") == ""


def test_a_trajectory_longer_than_the_models_context_is_refused() -> None:
    limits = bounded(max_tokens=64)
    assert found(make_episode(make_trajectory(num_prompt=60)), limits) == ""
    for lease_id in ("5.1.0", "e1.0.0"):
        assert "65 tokens, but the context of policy 'actor' holds 64" in found(
            make_episode(make_trajectory(num_prompt=61)), limits, lease_id
        )


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (make_episode(changed(reward=1e39)), r"reward 1e\+39 is not within"),
        (make_episode(changed(reward=-1.6e308)), r"reward -1.6e\+308 is not within"),
        (make_episode(changed(turns=(Turn(start=3, end=7, reward=1e308),))), r"reward 1e\+308 of turn 0"),
        (make_episode(make_trajectory(), score=1e200), r"score 1e\+200 is not within"),
        (
            msgspec.structs.replace(make_episode(), metrics=(MetricItem("x", 1e16),)),
            r"metric 'x' is 1e\+16",
        ),
        (
            msgspec.structs.replace(make_episode(), metrics=(MetricItem("a\x1b[2J", 1.0),)),
            "unprintable characters",
        ),
        (make_episode(changed(role="[2J\x1b")), "unprintable characters"),
        (
            make_episode(*[changed(turns=tuple(Turn(start=0, end=0) for _ in range(4096)))] * 17),
            "69649 turns, version spans and media",
        ),
    ],
)
def test_a_figure_that_could_end_the_run_is_refused(episode: Episode, message: str) -> None:
    with pytest.raises(WireError, match=message):
        check(episode)


def test_the_largest_figures_pass() -> None:
    trajectory = changed(reward=MAX_REWARD, turns=(Turn(start=3, end=7, reward=-MAX_REWARD),))
    episode = make_episode(trajectory, score=-MAX_REWARD)
    check(msgspec.structs.replace(episode, metrics=(MetricItem("x", MAX_METRIC),)))


def test_a_manifest_says_the_same_of_its_bytes_everywhere() -> None:
    sound = msgspec.structs.replace(
        make_tensor_manifest("actor", 1), chunks=(Chunk("0" * 32, VOCAB * 32),), num_bytes=VOCAB * 32
    )
    check_publication(sound, make_tensor_manifest("actor", 0))
    (tensor,) = sound.tensors
    huge = msgspec.structs.replace(tensor, num_bytes=2**42)
    for broken, message in (
        (msgspec.structs.replace(sound, num_bytes=2**42), "num_bytes says"),
        (msgspec.structs.replace(sound, tensors=(huge,)), "needs 1024"),
        (
            msgspec.structs.replace(sound, chunks=(Chunk("0" * 32, 2**42),), num_bytes=2**42),
            "expected 32 hexadecimal digits",
        ),
        (msgspec.structs.replace(sound, chunks=(Chunk("0" * 32, 2**20),), num_bytes=2**20), "tensors need"),
        (msgspec.structs.replace(sound, chunks=(), tensors=(huge,)), "needs 1024"),
        (make_tensor_manifest("actor", 1, vocab=2**37), "are not those of version 0"),
    ):
        with pytest.raises(WeightsError, match=message):
            check_publication(broken, make_tensor_manifest("actor", 0))
