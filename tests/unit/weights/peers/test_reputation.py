"""What a receiver remembers of its sources."""

from astraflow.weights.peers.reputation import Reputation

URL = "http://10.0.0.7:8500"


def pauses(reputation: Reputation, *, is_lie: bool, count: int, from_s: float = 0.0) -> list[float]:
    """How long it is left out, blamed anew whenever that is over."""
    now_s, found = from_s, list[float]()
    for _ in range(count):
        reputation.blame(URL, now_s, is_lie=is_lie)
        began_s = now_s
        while reputation.is_paused(URL, now_s):
            now_s += 1.0
        found.append(now_s - began_s)
    return found


def test_who_fails_again_is_left_out_for_longer() -> None:
    assert pauses(Reputation(), is_lie=False, count=4) == [15, 60, 60, 60]
    assert pauses(Reputation(), is_lie=True, count=6) == [15, 60, 240, 960, 3600, 3600]


def test_who_delivers_has_its_good_name_back() -> None:
    reputation = Reputation()
    assert pauses(reputation, is_lie=False, count=2) == [15, 60]
    reputation.note_delivery(URL)
    assert pauses(reputation, is_lie=False, count=1, from_s=100.0) == [15]


def test_blame_while_it_is_left_out_adds_nothing() -> None:
    reputation = Reputation()
    reputation.blame(URL, 0.0, is_lie=False)
    reputation.blame(URL, 1.0, is_lie=False)
    assert not reputation.is_paused(URL, 15.0)


def test_seconds_in_vain_add_up_over_versions_and_count_once() -> None:
    reputation = Reputation()
    assert not reputation.note_waste(URL, 0.0, 1.5)
    assert not reputation.note_waste(URL, 0.0, 1.5)  # another chunk waited at the same time
    assert reputation.note_waste(URL, 10.0, 10.6)
    assert reputation.is_paused(URL, 11.0)
    assert not reputation.is_paused(URL, 25.6)


def test_what_it_delivers_outweighs_what_it_cost() -> None:
    reputation = Reputation()
    assert not reputation.note_waste(URL, 0.0, 1.9)
    for _ in range(4):
        reputation.note_delivery(URL)
    assert not reputation.note_waste(URL, 10.0, 11.8)


def test_a_speed_follows_what_is_measured() -> None:
    reputation = Reputation()
    assert reputation.speed(URL) == 0.0
    reputation.measure(URL, 100, 1.0)
    assert reputation.speed(URL) == 100.0
    reputation.measure(URL, 200, 1.0)
    assert reputation.speed(URL) == 130.0
