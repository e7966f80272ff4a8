"""What a service tells of weights on their way: bytes, ages, and why the latest try failed."""

from astraflow.rollout.policy_host import WeightArrivals
from astraflow.rollout.scoring import OpenCalls
from astraflow.weights.arrival import Arrival


def test_nothing_is_told_before_a_transfer_and_after_it() -> None:
    arrivals = WeightArrivals()
    assert arrivals.make_report("actor", Arrival(), 1.0) is None
    arrivals.begin(7, Arrival(), 1.0)
    assert arrivals.make_report("actor", Arrival(num_bytes=10), 2.0) is not None
    assert arrivals.make_report("actor", Arrival(received_bytes=10), 3.0) is None  # it is whole
    arrivals.end()
    assert arrivals.make_report("actor", Arrival(), 3.0) is None


def test_bytes_count_as_they_come_and_silence_since_the_last_of_them() -> None:
    arrivals = WeightArrivals()
    arrivals.begin(7, Arrival(received_bytes=500), 10.0)
    arrivals.make_report("actor", Arrival(num_bytes=1000, received_bytes=800), 12.0)
    told = arrivals.make_report("actor", Arrival(num_bytes=1000, received_bytes=800), 19.0)
    assert told is not None
    assert (told.policy, told.version, told.num_bytes, told.arrived_bytes) == ("actor", 7, 1000, 300)
    assert (told.age_s, told.quiet_s, told.problem) == (9.0, 7.0, "")


def test_a_source_without_http_counts_by_whole_ranges_and_bytes_read_twice_are_not_more_than_all() -> None:
    arrivals = WeightArrivals()
    arrivals.begin(7, Arrival(), 0.0)
    told = arrivals.make_report("actor", Arrival(num_bytes=1000, arrived_bytes=400), 1.0)
    assert told is not None
    assert (told.arrived_bytes, told.quiet_s) == (400, 0.0)
    twice = arrivals.make_report(
        "actor", Arrival(num_bytes=1000, arrived_bytes=400, received_bytes=5000), 2.0
    )
    assert twice is not None
    assert twice.arrived_bytes == 1000


def test_further_tries_go_on_with_the_age_of_the_first_and_say_why_it_failed() -> None:
    arrivals = WeightArrivals()
    arrivals.begin(7, Arrival(), 0.0)
    arrivals.fail("refused\n" + "x" * 500)
    arrivals.begin(7, Arrival(), 4.0)
    told = arrivals.make_report("actor", Arrival(), 6.0)
    assert told is not None
    assert told.age_s == 6.0
    assert told.problem.startswith("refused x")
    assert len(told.problem) == 200
    arrivals.begin(9, Arrival(), 8.0)  # a newer version takes its place
    newer = arrivals.make_report("actor", Arrival(num_bytes=10), 9.0)
    assert newer is not None
    assert (newer.version, newer.age_s, newer.problem) == (9, 9.0, "")


def test_open_calls_are_counted_with_the_age_of_the_oldest() -> None:
    now = [0.0]
    calls = OpenCalls(clock=lambda: now[0])
    assert (calls.num, calls.oldest_s) == (0, 0.0)
    with calls.one():
        now[0] = 3.0
        with calls.one():
            assert (calls.num, calls.oldest_s) == (2, 3.0)
        now[0] = 4.0
        assert (calls.num, calls.oldest_s) == (1, 4.0)
    assert calls.num == 0
