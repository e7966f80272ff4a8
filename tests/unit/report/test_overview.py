import msgspec

from astraflow.report.overview import RunOverview, eta_s, eta_text, speed_text
from astraflow.types import MetricItem
from drivers.shown_runs import make_eval, make_status, make_step


def test_the_eta_follows_from_the_pace_of_the_newest_steps() -> None:
    records = [make_step(step, at_s=1000.0 + 20.0 * step) for step in range(3)]
    assert eta_s(records, 10) == 140.0
    assert eta_text(records, 10) == "ETA 2:20"
    assert eta_text(records, 1000) == "ETA 5:32:20"


def test_there_is_no_eta_before_the_second_step_and_after_the_last() -> None:
    assert eta_s([make_step(0)], 10) is None
    assert eta_text([make_step(0)], 10) == ""
    assert eta_text([make_step(8, at_s=1.0), make_step(9, at_s=2.0)], 10) == ""


def test_held_out_shows_the_first_and_the_newest_score_of_each_set() -> None:
    run = RunOverview("demo", "runs/demo", 90.0)
    assert run.held_out("actor") == "-"
    run.add_eval(make_eval(0, 0.25))
    assert run.held_out("actor") == "0.250"
    run.add_eval(make_eval(2, 0.5))
    run.add_eval(msgspec.structs.replace(make_eval(3, 0.9), score_mean=None))
    assert run.held_out("actor") == "0.250 -> 0.500"
    run.add_eval(msgspec.structs.replace(make_eval(1, 0.75), eval_set="code"))
    assert run.held_out("actor") == "heldout 0.250 -> 0.500, code 0.750"
    assert run.held_out("judge") == "-"


def test_speeds_follow_from_what_trainers_and_services_report() -> None:
    run = RunOverview("demo", "runs/demo", 90.0)
    assert (run.committed_tokens_per_s("actor"), run.generated_tokens_per_s()) == (None, 0.0)
    run.add_step(make_step(0, num_trained_tokens=900))
    assert (run.committed_tokens_per_s("actor"), run.gradient_frac("actor")) == (None, None)
    metrics = (MetricItem("num_gradient_tokens", 75.0),)
    run.add_step(make_step(2, num_trained_tokens=300, metrics=metrics))
    assert (run.committed_tokens_per_s("actor"), run.gradient_frac("actor")) == (150.0, 0.25)
    run.update(make_status(), ())
    run.update(None, ())
    assert run.generated_tokens_per_s() == 1500.0


def test_the_speed_of_generation_covers_the_pauses_of_slow_steps() -> None:
    run = RunOverview("demo", "runs/demo", 0.0)
    for second in range(0, 121, 5):
        # The service generates 600 tokens within 5 s, then waits for 55 s until the trainer has finished.
        generated = 600 * (1 + second // 60)
        status = make_status()
        load = msgspec.structs.replace(status.workers[0].load, generated_tokens=generated, tokens_per_s=0.0)
        workers = (msgspec.structs.replace(status.workers[0], load=load),)
        run.update(msgspec.structs.replace(status, now_s=float(second), workers=workers), ())
    run.add_step(make_step(0, at_s=60.0))
    assert round(run.generated_tokens_per_s()) == 10


def test_a_speed_below_one_token_per_second_is_not_shown_as_zero() -> None:
    assert [speed_text(speed) for speed in (None, 0.0, 0.04, 0.4, 12.6, 1250.0)] == [
        "-",
        "0 tok/s",
        "0.040 tok/s",
        "0.4 tok/s",
        "13 tok/s",
        "1,250 tok/s",
    ]


def test_steps_of_one_moment_have_no_speed() -> None:
    run = RunOverview("demo", "runs/demo", 90.0)
    for step in range(2):
        run.add_step(make_step(step, at_s=100.0))
    assert run.committed_tokens_per_s("actor") is None
