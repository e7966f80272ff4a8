import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow import wire
from astraflow.dataflow.service.partial_episodes import EpisodeKey, ProgressKeeper, episode_of
from astraflow.types import Episode, MetricItem, PastCompletion, Progress, Stream, VersionSpan
from astraflow.wire import column


def past(name: str, num_tokens: int = 2) -> PastCompletion:
    return PastCompletion(
        policy="actor",
        request=name,
        token_ids=column(range(num_tokens), "int32"),
        logprobs=column([-1.0] * num_tokens, "float32"),
        versions=(VersionSpan(0, num_tokens, 0),),
        finish_reason="stop",
    )


def part(lease_id: str, num_before: int, *names: str) -> Progress:
    return Progress(lease_id=lease_id, num_before=num_before, completions=tuple(past(name) for name in names))


def keeper(**bounds: int) -> ProgressKeeper:
    return ProgressKeeper(lambda _: True, **bounds)


def names_of(kept: ProgressKeeper, lease_id: str) -> list[str]:
    return [completion.request for completion in kept.completions(episode_of(lease_id))]


def test_reports_add_up_and_the_next_attempt_gets_them_in_order() -> None:
    kept = keeper()
    assert kept.add(part("17.3.0", 0, "a")) == "kept"
    assert kept.add(part("17.3.0", 1, "b", "c")) == "kept"
    assert names_of(kept, "17.3.1") == ["a", "b", "c"]
    assert kept.add(part("17.3.1", 3, "d")) == "kept", "the next attempt adds to it"
    assert names_of(kept, "17.3.2") == ["a", "b", "c", "d"]
    assert names_of(kept, "17.2.1") == []


def test_a_report_that_does_not_fit_what_is_kept_asks_for_all_again() -> None:
    kept = keeper()
    kept.add(part("1.0.0", 0, "a", "b"))
    assert kept.add(part("1.0.0", 1, "b")) == "missing", "sent again after a lost answer"
    assert kept.add(part("2.0.0", 3, "x")) == "missing", "of before a restart"
    assert names_of(kept, "1.0.1") == ["a", "b"]
    assert kept.add(part("1.0.0", 0, "c")) == "kept"
    assert names_of(kept, "1.0.1") == ["c"]


def test_what_has_no_room_changes_nothing() -> None:
    kept = keeper(max_bytes=5_000, max_episode_bytes=2_500)
    assert kept.add(part("1.0.0", 0, "a", "b")) == "kept"
    assert kept.add(part("1.0.0", 2, "c")) == "refused", "the episode is full"
    assert kept.add(part("1.0.0", 0, "a", "b", "c")) == "refused"
    assert kept.add(part("2.0.0", 0, "a", "b")) == "kept"
    assert kept.add(part("3.0.0", 0, "a")) == "refused", "the whole is full"
    assert names_of(kept, "1.0.1") == names_of(kept, "2.0.1") == ["a", "b"]
    kept.forget((1, 0))
    assert kept.add(part("3.0.0", 0, "a")) == "kept"


def test_forgotten_episodes_free_their_memory() -> None:
    kept = keeper()
    kept.add(part("1.0.0", 0, "a"))
    assert kept.totals.num_bytes > 0
    kept.forget((1, 0))
    kept.forget((1, 0))
    assert (kept.totals.num_bytes, kept.totals.num_episodes) == (0, 0)


def test_episodes_of_groups_that_were_given_up_are_swept() -> None:
    over: set[EpisodeKey] = set()
    kept = ProgressKeeper(lambda episode: episode not in over)
    kept.add(part("1.0.0", 0, "a"))
    over.add((1, 0))
    for group in range(2, 260):
        kept.add(part(f"{group}.0.0", 0, "a"))
    assert kept.completions((1, 0)) == ()
    assert kept.completions((2, 0)) != ()


@pytest.mark.parametrize(("value", "counted"), [(12.0, 12), (-3.0, 0)])
def test_tokens_that_were_resumed_are_counted(value: float, counted: int) -> None:
    kept = keeper()
    metrics = (MetricItem("resumed_tokens", value, "sum"), MetricItem("resampled_tokens", 5.0, "sum"))
    kept.count_tokens(Episode(trajectories=(), score=0.0, metrics=metrics))
    assert (kept.totals.num_resumed_tokens, kept.totals.num_resampled_tokens) == (counted, 5)


def test_no_report_of_a_service_makes_the_totals_more_than_an_answer_can_say() -> None:
    kept = keeper()
    metrics = tuple(MetricItem("resumed_tokens", 1e15, "sum") for _ in range(20))
    kept.count_tokens(Episode(trajectories=(), score=0.0, metrics=metrics))
    assert wire.checked(kept.totals).num_resumed_tokens == 2**53


def test_what_describes_a_completion_counts_as_much_as_its_tokens() -> None:
    plain, detailed = keeper(), keeper()
    plain.add(part("1.0.0", 0, "a"))
    spans = tuple(VersionSpan(idx, 1, idx) for idx in range(2))
    stream = Stream(name="x", dtype="uint8", data=b"12")
    past_ = msgspec.structs.replace(past("a"), versions=spans, streams=(stream,))
    detailed.add(Progress(lease_id="1.0.0", num_before=0, completions=(past_,)))
    assert detailed.totals.num_bytes >= plain.totals.num_bytes + 600


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=60)
)
def test_what_is_kept_is_a_prefix_of_what_was_told_and_its_size_is_exact(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    """Reports in any order, with any gap, again and again, and results between them."""
    kept = keeper(max_bytes=9_000, max_episode_bytes=4_000)
    model: dict[int, list[str]] = {}
    for number, (group, num_before, num, ends) in enumerate(steps):
        if ends:
            kept.forget((group, 0))
            model.pop(group, None)
            continue
        names = [f"{number}/{idx}" for idx in range(num)]
        verdict = kept.add(part(f"{group}.0.0", num_before, *names))
        known = model.get(group, [])
        assert (verdict == "missing") == (num_before not in (0, len(known)))
        if verdict == "kept":
            model[group] = [*known, *names] if num_before else names
    for group in range(3):
        assert names_of(kept, f"{group}.0.1") == model.get(group, [])
    assert kept.totals.num_bytes == sum(len(names) for names in model.values()) * (1024 + 128 + 16)
    assert kept.totals.num_bytes <= 9_000
