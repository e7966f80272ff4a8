"""Merged busy intervals."""

from astraflow.rollout.engines.spans import BusyClock
from astraflow.types import BusySpan


def test_a_closed_interval_is_reported_once() -> None:
    clock = BusyClock("generate")
    clock.start(10.0)
    clock.stop(12.5)
    assert clock.take(13.0) == (BusySpan("generate", 10.0, 12.5),)
    assert clock.take(14.0) == ()


def test_a_running_interval_is_cut_and_goes_on() -> None:
    clock = BusyClock("generate")
    clock.start(10.0)
    assert clock.take(11.0) == (BusySpan("generate", 10.0, 11.0),)
    clock.stop(12.0)
    assert clock.take(13.0) == (BusySpan("generate", 11.0, 12.0),)


def test_intervals_with_a_negligible_gap_are_merged() -> None:
    clock = BusyClock("generate")
    for start, stop in ((1.0, 2.0), (2.001, 3.0), (4.0, 5.0)):
        clock.start(start)
        clock.start(start + 0.5)
        clock.stop(stop)
        clock.stop(stop + 0.5)
    assert clock.take(9.0) == (BusySpan("generate", 1.0, 3.0), BusySpan("generate", 4.0, 5.0))
