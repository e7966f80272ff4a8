"""How many episodes a service runs, step by step."""

from astraflow.protocols import Capacity
from astraflow.rollout.episode_limit import EpisodeLimit


def load(
    kv_frac: float | None = None, *, running: int = 0, waiting: int = 0, preempted: int = 0
) -> list[Capacity]:
    capacity = Capacity(
        num_slots=64,
        num_running=running,
        num_waiting=waiting,
        max_context=1024,
        generated_tokens=0,
        kv_frac=kv_frac,
        num_preemptions=preempted,
    )
    return [capacity]


def test_engines_that_cannot_run_out_of_cache_take_all_episodes_at_once() -> None:
    episode_limit = EpisodeLimit(64)
    episode_limit.observe(load(), num_running=0)
    assert (episode_limit.num_slots, episode_limit.num_free(0)) == (64, 64)


def test_a_bounded_cache_starts_small_and_doubles_with_each_replacement() -> None:
    episode_limit = EpisodeLimit(64)
    episode_limit.observe(load(0.0), num_running=0)
    assert episode_limit.num_free(0) == 16
    for _ in range(16):
        episode_limit.observe(load(0.2), num_running=episode_limit.num_slots - 1, num_ended=1)
    assert episode_limit.num_slots == 32
    for _ in range(200):
        episode_limit.observe(load(0.2), num_running=episode_limit.num_slots - 1, num_ended=1)
    assert episode_limit.num_slots == 64


def test_a_limit_that_is_not_reached_does_not_grow() -> None:
    episode_limit = EpisodeLimit(64)
    episode_limit.observe(load(0.0), num_running=0)
    for _ in range(100):
        episode_limit.observe(load(0.1), num_running=3, num_ended=1)
    assert episode_limit.num_slots == 16


def test_nothing_starts_while_the_cache_is_full() -> None:
    episode_limit = EpisodeLimit(64)
    episode_limit.observe(load(0.0), num_running=0)
    episode_limit.observe(load(0.97), num_running=15, num_ended=1)
    assert (episode_limit.num_slots, episode_limit.num_free(15)) == (15, 0)
    episode_limit.observe(load(0.97), num_running=10, num_ended=5)
    assert episode_limit.num_free(10) == 0
    # There is room again: as many start as end, and one more each time.
    episode_limit.observe(load(0.5), num_running=9, num_ended=1)
    assert episode_limit.num_free(9) == 2


def test_preemptions_cut_once_until_the_cut_has_been_obeyed() -> None:
    episode_limit = EpisodeLimit(40)
    episode_limit.observe(load(0.0), num_running=0)
    episode_limit.observe(load(0.8, preempted=5), num_running=10)
    assert (episode_limit.num_slots, episode_limit.num_free(10)) == (9, -1)
    episode_limit.observe(load(0.8, preempted=9), num_running=10)
    assert episode_limit.num_slots == 9
    episode_limit.observe(load(0.8, preempted=9), num_running=9, num_ended=1)
    episode_limit.observe(load(0.8, preempted=10), num_running=9)
    assert episode_limit.num_slots == 8


def test_what_always_queues_is_taken_off() -> None:
    episode_limit = EpisodeLimit(64)
    for _ in range(64):
        episode_limit.observe(load(running=32, waiting=31), num_running=63, num_ended=1)
    assert episode_limit.num_slots == 64 - (31 - 8)
    for _ in range(64):
        episode_limit.observe(
            load(running=32, waiting=8), num_running=episode_limit.num_slots - 1, num_ended=1
        )
    assert 41 <= episode_limit.num_slots <= 43


def test_a_queue_that_empties_at_times_is_kept() -> None:
    episode_limit = EpisodeLimit(64)
    for idx in range(200):
        episode_limit.observe(load(running=32, waiting=31 * (idx % 9 > 0)), num_running=63, num_ended=1)
    assert episode_limit.num_slots == 64


def test_the_fullest_engine_counts() -> None:
    episode_limit = EpisodeLimit(64)
    episode_limit.observe([*load(0.1), *load(0.97), *load()], num_running=10)
    assert episode_limit.num_free(10) == 0
