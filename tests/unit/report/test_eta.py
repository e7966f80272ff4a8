from astraflow.report.eta import eta_s, eta_text, numbers_text
from astraflow.types import MetricItem, StepRecord


def make_step(step: int, *metrics: MetricItem, at_s: float = 0.0) -> StepRecord:
    return StepRecord(
        policy="actor", step=step, version=step + 1, at_s=at_s, reward_mean=0.5, staleness_mean=0.0,
        staleness_max=0, num_groups=1, num_samples=2, num_trained_tokens=3, num_discarded_groups=0,
        metrics=metrics,
    )  # fmt: skip


def test_the_eta_follows_from_the_pace_of_the_newest_steps() -> None:
    records = [make_step(step, at_s=1000.0 + 20.0 * step) for step in range(3)]
    assert eta_s(records, 10) == 140.0
    assert eta_text(records, 10) == "ETA 2:20"
    assert eta_text(records, 1000) == "ETA 5:32:20"


def test_there_is_no_eta_before_the_second_step_and_after_the_last() -> None:
    assert eta_s([make_step(0)], 10) is None
    assert eta_text([make_step(0)], 10) == ""
    assert eta_text([make_step(8, at_s=1.0), make_step(9, at_s=2.0)], 10) == ""


def test_the_numbers_are_those_that_tell_how_training_goes() -> None:
    record = make_step(
        0,
        MetricItem("grad_norm", 1.0),
        MetricItem("loss", -0.01234),
        MetricItem("episode/truncated_frac", 0.25),
    )
    assert numbers_text(record) == "loss -0.01234  truncated 25%"


def test_a_few_metrics_of_the_users_own_are_shown_as_text() -> None:
    own = [MetricItem(f"episode/mine\x1b[31m{n}", float(n)) for n in range(9)]
    text = numbers_text(make_step(0, MetricItem("episode/turns", 2.0), *own))
    assert text.startswith("turns 2.0  mine")
    assert "\x1b" not in text
    assert text.count("mine") == 4
