from astraflow.report.overview import eta_s, eta_text
from drivers.shown_runs import make_step


def test_the_eta_follows_from_the_pace_of_the_newest_steps() -> None:
    records = [make_step(step, at_s=1000.0 + 20.0 * step) for step in range(3)]
    assert eta_s(records, 10) == 140.0
    assert eta_text(records, 10) == "ETA 2:20"
    assert eta_text(records, 1000) == "ETA 5:32:20"


def test_there_is_no_eta_before_the_second_step_and_after_the_last() -> None:
    assert eta_s([make_step(0)], 10) is None
    assert eta_text([make_step(0)], 10) == ""
    assert eta_text([make_step(8, at_s=1.0), make_step(9, at_s=2.0)], 10) == ""
