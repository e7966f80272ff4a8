"""What a person sees: pure text from what was told."""

import errno
import io

import msgspec
from rich.console import Console

from astraflow.launch.screen import LiveView, PlainView, ScreenState, plain_eval, plain_step, render
from astraflow.launch.supervisor import ServiceState
from astraflow.types import (
    EvalRecord,
    FateCounts,
    Load,
    PolicyStatus,
    PushedTasks,
    ServedVersions,
    StatusReply,
    StepRecord,
    Wait,
    WorkerStatus,
)


def make_step(step: int, **changes: object) -> StepRecord:
    fields: dict[str, object] = {
        "policy": "actor",
        "step": step,
        "version": step + 1,
        "at_s": 100.0 + step,
        "reward_mean": 0.5,
        "staleness_mean": 0.25,
        "staleness_max": 1,
        "num_groups": 4,
        "num_samples": 16,
        "num_trained_tokens": 300,
        "num_discarded_groups": 0,
        "metrics": (),
    }
    return StepRecord(**(fields | changes))  # type: ignore[arg-type]


def make_eval(version: int, score: float) -> EvalRecord:
    return EvalRecord(
        policy="actor", version=version, step=version, eval_set="heldout", num_tasks=16, num_samples=16,
        num_failed=0, score_mean=score, score_stderr=0.01, at_s=100.0,
    )  # fmt: skip


def make_status() -> StatusReply:
    policy = PolicyStatus(
        name="actor", step=3, num_steps=10, newest_version=3, durable_step=2, epoch=1, num_tickets=5,
        max_tickets=8, num_running_groups=2, num_ready_groups=3, groups_per_batch=4, staleness_bound=2,
        redone_steps=0, fates=FateCounts(drawn=20, trained=12, filtered=3, live=5),
    )  # fmt: skip
    load = Load(tokens_per_s=1500.0, versions=(ServedVersions(policy="actor", versions=(3,)),))
    worker = WorkerStatus(
        id="r.1",
        name="rollout-0",
        engine="torch",
        hosts=("actor",),
        num_leases=7,
        load=load,
        last_seen_s=99.0,
    )
    wait = Wait(who="trainer actor", whom="rollout", what="batch of step 3", since_s=98.0)
    return StatusReply(
        name="demo", state="running", reason="", now_s=100.0, policies=(policy,), workers=(worker,),
        waits=(wait,),
    )  # fmt: skip


def shown(state: ScreenState) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(render(state, 142.0))
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def test_the_screen_shows_steps_scores_queues_and_waits() -> None:
    state = ScreenState("demo", "runs/demo", 100.0)
    state.status = make_status()
    state.services = (ServiceState("dataflow", state="running", restarts=2),)
    for step in range(3):
        state.add_step(make_step(step))
    state.add_eval(make_eval(0, 0.31))
    state.add_eval(make_eval(3, 0.62))
    text = shown(state)
    for part in (
        "astraflow demo  running  0:42",
        "3/10",
        "0.310 -> 0.620",
        "0.25, max 1 of 2",
        "5/8",
        "3/4",
        "300 tok/s",
        "1,500",
        "actor:3",
        "trainer actor waits for rollout (batch of step 3, 2.0 s)",
        "dataflow running (2 restarts)",
    ):
        assert part in text, f"{part!r} is not in\n{text}"


def test_the_screen_stands_before_the_dataflow_answers() -> None:
    text = shown(ScreenState("demo", "runs/demo", 142.0))
    assert "starting" in text
    assert "nobody waits" in text


def test_the_screen_counts_pushed_tasks_if_there_are_any() -> None:
    state = ScreenState("demo", "runs/demo", started_s=0.0)
    state.status = make_status()
    assert "pushed" not in shown(state)
    pushed = PushedTasks(num_accepted=7, num_waiting=2, num_refused=3)
    state.status = msgspec.structs.replace(make_status(), pushed=pushed)
    assert "pushed tasks: 7 accepted, 2 waiting, 3 refused" in shown(state)


def test_a_plain_line_has_the_step_of_how_many() -> None:
    state = ScreenState("demo", "runs/demo", 100.0)
    state.status = make_status()
    line = plain_step(state, make_step(3), 161.0)
    assert line.startswith("1:01 actor step 4/10: reward 0.500")
    assert line.endswith("trainer actor waits for rollout")


def test_an_evaluation_line_counts_failures_only_if_there_are_any() -> None:
    assert (
        plain_eval(make_eval(3, 0.5)) == "actor version 3 on heldout: 0.500 +- 0.010 (16 tasks, 16 episodes)"
    )


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


def test_a_run_outlives_its_terminal() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    view = LiveView("demo", "runs/demo", console)
    console.file = Gone()
    view.note("stopping")
    view.close()


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


def test_the_live_view_draws_what_it_was_told() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system=None)
    view = LiveView("demo", "runs/demo", console)
    view.step(make_step(0))
    view.evaluated(make_eval(0, 0.25))
    view.status(make_status(), [ServiceState("dataflow", state="running", restarts=2, exit_code=-9)])
    view.note("stopping")
    view.close()
    out = console.file
    assert isinstance(out, io.StringIO)
    assert "0.250" in out.getvalue()
    assert "stopping" in out.getvalue()
    assert "dataflow ended with code -9; restart 2" in out.getvalue()
