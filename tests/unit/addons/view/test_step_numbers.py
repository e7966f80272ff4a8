from astraflow.addons.view.step_numbers import numbers_text
from astraflow.types import MetricItem
from drivers.shown_runs import make_step


def test_the_numbers_are_those_that_tell_how_training_goes() -> None:
    metrics = (
        MetricItem("grad_norm", 1.0),
        MetricItem("loss", -0.01234),
        MetricItem("episode/truncated_frac", 0.25),
    )
    assert numbers_text(make_step(0, metrics=metrics)) == "loss -0.01234  truncated 25%"


def test_a_few_metrics_of_the_users_own_are_shown_as_text() -> None:
    own = [MetricItem(f"episode/mine\x1b[31m{n}", float(n)) for n in range(9)]
    text = numbers_text(make_step(0, metrics=(MetricItem("episode/turns", 2.0), *own)))
    assert text.startswith("turns 2.0  mine")
    assert "\x1b" not in text
    assert text.count("mine") == 4
