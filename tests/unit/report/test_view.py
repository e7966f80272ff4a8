"""The plain lines that a person sees of a run."""

import errno
import io

import msgspec

from astraflow.recipe.service_state import ServiceState
from astraflow.report.overview import RunOverview, eval_line, step_line
from astraflow.report.view import PlainView
from astraflow.report.watch.run_snapshot import RunSnapshot
from astraflow.report.watch.watchdog import Watchdog
from astraflow.types import MetricItem, StatusReply
from drivers.shown_runs import make_eval, make_silent, make_status, make_step


def test_a_line_says_nothing_of_gradients_that_no_trainer_reports() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    state.status = make_status()
    for step in range(2):
        state.add_step(make_step(step))
    assert "committed 300 tok/s, ETA" in step_line(state, make_step(2), 142.0)


def test_a_plain_line_has_the_step_of_how_many() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    state.status = make_status()
    line = step_line(state, make_step(3), 161.0)
    assert line.startswith("1:01 actor step 4/10: reward 0.500")
    assert line.endswith("trainer actor waits for rollout")


def test_an_incomplete_evaluation_says_what_is_missing_and_shows_no_score() -> None:
    values = {"unfinished": 3.0, "unfinished_begun": 2.0, "partial_score_mean": 0.75}
    values |= {"longest_finished_s": 120.4, "longest_finished_tokens": 3812.0}
    record = msgspec.structs.replace(
        make_eval(3, 0.5),
        score_mean=None,
        num_samples=13,
        num_failed=3,
        metrics=tuple(MetricItem(name, value) for name, value in values.items()),
    )
    assert eval_line(record) == (
        "actor version 3 on heldout: incomplete, so it has no score: 2 episodes ran out of time and 1 never "
        "began; the 13 finished ones took up to 120 s and 3812 tokens, with a mean of 0.750. Raise "
        "eval.deadline_s or rollout.episode_timeout_s (16 tasks, 3 failed)"
    )


def test_an_evaluation_line_counts_failures_only_if_there_are_any() -> None:
    assert (
        eval_line(make_eval(3, 0.5)) == "actor version 3 on heldout: 0.500 +- 0.010 (16 tasks, 16 episodes)"
    )


def test_a_line_names_the_evaluation_sets_if_there_are_several() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    for version, score in ((0, 0.25), (3, 0.5)):
        state.add_eval(make_eval(version, score))
    assert "held-out 0.250 -> 0.500, " in step_line(state, make_step(3), 161.0)
    state.add_eval(msgspec.structs.replace(make_eval(3, 0.75), eval_set="trivia"))
    assert "held-out heldout 0.250 -> 0.500, trivia 0.750, " in step_line(state, make_step(3), 161.0)


def test_plain_lines_come_at_most_every_two_seconds() -> None:
    now, out = [100.0], io.StringIO()
    view = PlainView("demo", "runs/demo", out, clock=lambda: now[0])
    for step in range(6):
        view.step(make_step(step))
        now[0] += 0.9
    assert [line.split()[3] for line in out.getvalue().splitlines()] == ["1:", "4:"]


class Gone(io.StringIO):
    """An output whose reader went away."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_run_outlives_the_reader_of_its_lines() -> None:
    view = PlainView("demo", "runs/demo", Gone())
    view.step(make_step(0))
    view.note("stopping")


def test_a_restart_is_said_once() -> None:
    out = io.StringIO()
    view = PlainView("demo", "runs/demo", out)
    crashed = ServiceState("rollout-0", state="restarting", restarts=1, exit_code=-9)
    for _ in range(3):
        view.status(None, [crashed])
    assert out.getvalue() == "rollout-0 ended with code -9; restart 1\n"
    failed = ServiceState("trainer", state="restarting", restarts=1, exit_code=1, last_line="ValueError: no")
    view.status(None, [crashed, failed])
    assert out.getvalue().endswith("restart 1\ntrainer ended with code 1; restart 1: ValueError: no\n")


def plain_lines(status: StatusReply | None, services: tuple[ServiceState, ...], seconds: int) -> list[str]:
    """What a plain view prints in that time, if it is told the same twice per second."""
    now, out = [100.0], io.StringIO()
    view = PlainView("demo", "runs/demo", out, clock=lambda: now[0])
    for _ in range(2 * seconds):
        now[0] += 0.5
        view.status(status, services)
    return out.getvalue().splitlines()


def test_plain_lines_say_what_is_waited_for_while_no_step_comes() -> None:
    lines = plain_lines(make_status(), (), 150)
    wait = "trainer actor waits for rollout (step 3: 0 groups ready, 4 make a batch, 2.0 s)"
    assert lines[0] == f"0:15 actor at step 3/10: {wait}"
    assert [line.split()[0] for line in lines] == ["0:15", "0:45", "1:45"]


def test_plain_lines_say_what_is_starting_before_the_dataflow_answers() -> None:
    starting = (ServiceState("dataflow", state="running", age_s=9.0),)
    assert plain_lines(None, starting, 20) == ["0:15 starting: dataflow"]


def test_plain_lines_name_a_process_in_trouble_once_and_say_when_it_is_well_again() -> None:
    now, out, watchdog = [100.0], io.StringIO(), Watchdog()
    view = PlainView("demo", "runs/demo", out, clock=lambda: now[0])
    well = ServiceState("dataflow", state="running", silent_s=0.1)
    for service in (make_silent("dataflow", 9.0), make_silent("dataflow", 9.5), *[well] * 6):
        now[0] += 1.0
        view.status(None, (service,), watchdog.look(RunSnapshot(now_s=now[0], services=(service,))))
    first, second = out.getvalue().splitlines()
    assert first.startswith(
        "warning (stopped_process): dataflow has shown no sign of life for 9 s: it is stopped"
    )
    assert second == "dataflow has recovered (stopped_process)"
