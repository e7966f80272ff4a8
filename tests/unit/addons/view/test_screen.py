"""The live screen: pure text from what is known of a run."""

import errno
import io
import re

import msgspec
from rich.console import Console

from astraflow.addons.view.answer import answer_of_overview
from astraflow.addons.view.screen import LiveView, episodes_text, numbers_text, render
from astraflow.recipe.service_state import ServiceState
from astraflow.report.overview import RunOverview, step_line
from astraflow.report.watch.run_snapshot import RunSnapshot
from astraflow.report.watch.watchdog import alarms_now
from astraflow.types import Load, MetricItem, PushedTasks, StatusReply, Wait, WaitReason, WorkerStatus
from astraflow.types.alarm import Alarm
from astraflow.types.waits import POOL, Party
from drivers.shown_runs import (
    GROUPS,
    TICKETS,
    TRAINER,
    make_eval,
    make_silent,
    make_status,
    make_step,
    make_waiting,
)


def shown(state: RunOverview, width: int = 160, unanswered_s: float = 0.0) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(state, 142.0, unanswered_s=unanswered_s))
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def test_the_screen_shows_steps_scores_queues_and_waits() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    state.status = make_status()
    state.services = (
        ServiceState("dataflow", state="running", restarts=2),
        ServiceState("rollout-0", state="running", restarts=1),
    )
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
        "trainer actor waits for rollout (step 3: 0 groups ready, 4 make a batch, 2.0 s)",
        "dataflow running (2 restarts)",
        "rollout-0 running (1 restart)",
    ):
        assert part in text, f"{part!r} is not in\n{text}"


def test_nothing_is_cut_where_80_columns_are_all_there_are() -> None:
    state = RunOverview("quickstart", "runs/quickstart", 100.0)
    policy = msgspec.structs.replace(
        make_status().policies[0], step=100, num_steps=150, num_tickets=192, max_tickets=192
    )
    (worker,) = make_status().workers
    reason = WaitReason(kind="tickets", policy="actor", num=192)
    worker = msgspec.structs.replace(worker, load=msgspec.structs.replace(worker.load, waits_for=(reason,)))
    state.status = msgspec.structs.replace(make_status(), policies=(policy,), workers=(worker,))
    for step in range(3):
        state.add_step(make_step(step, num_trained_tokens=21_598, staleness_mean=2.0, staleness_max=2))
    state.add_eval(make_eval(0, 0.31))
    state.add_eval(make_eval(3, 0.96))
    lines = shown(state, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines)
    first = next(idx for idx, line in enumerate(lines) if line.startswith("policy"))
    own = [line for line in lines[first : first + 6] if not line.startswith("actor:")]
    tables = [re.split(r"  +", line.strip()) for line in own]
    assert tables == [
        ["policy", "step", "reward", "held-out", "staleness"],
        ["actor", "100/150", "0.500", "0.310 -> 0.960", "2.00, max 2 of 2"],
        ["policy", "tickets", "ready", "committed", "gradient", "dropped"],
        ["actor", "192/192", "3/4", "21,598 tok/s", "-", "3"],
        ["rollout service", "episodes", "tok/s", "heard of", "versions", "waits for"],
    ]
    assert ["rollout-0", "7", "1,500", "1 s ago", "actor:3", "trainer actor"] in [
        re.split(r"  +", line.strip()) for line in lines
    ]


def test_the_screen_begins_with_the_answer_and_its_four_figures() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    state.status = make_status()
    state.add_eval(make_eval(0, 0.31))
    state.add_eval(make_eval(3, 0.62))
    answer = answer_of_overview(state, 142.0)
    _, sentence, figures, *_ = shown(state, width=300).splitlines()
    assert sentence.rstrip() == answer.sentence
    assert figures.startswith("Held-out 0.620 from 0.310, heldout   Progress 30% step 3 of 10")
    assert all(f"{figure.name} {figure.value}" in figures for figure in answer.figures)


def test_many_scores_take_more_lines_rather_than_being_cut() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    state.status = make_status()
    for number in range(6):
        state.add_eval(msgspec.structs.replace(make_eval(0, 0.1), eval_set=f"set-{number}"))
        state.add_eval(msgspec.structs.replace(make_eval(3, 0.2), eval_set=f"set-{number}"))
    text = shown(state, width=80)
    assert text.count("->") == 6
    for heading in ("policy", "step", "reward", "held-out", "staleness", "tickets", "ready", "gradient"):
        assert heading in text


def test_the_screen_shows_the_loss_and_when_training_will_be_done() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    state.status = make_status()
    metrics = (MetricItem("loss", 0.125), MetricItem("episode/turns", 2.5))
    for step in range(3):
        state.add_step(make_step(step, metrics=metrics))
    assert "actor: ETA 0:07  loss 0.125  turns 2.5" in shown(state)
    assert "loss 0.125, ETA 0:07" in step_line(state, make_step(2, metrics=metrics), 142.0)


def test_the_screen_tells_committed_tokens_from_those_with_a_gradient() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    state.status = make_status()
    for step in range(2):
        state.add_step(make_step(step, metrics=(MetricItem("num_gradient_tokens", 75.0, "sum"),)))
    assert "committed 300 tok/s (25% with a gradient)" in step_line(state, make_step(2), 142.0)
    text = shown(state)
    assert "25%" in text
    assert ("committed" in text, "trained" in text) == (True, False)


def test_the_screen_stands_before_the_dataflow_answers() -> None:
    text = shown(RunOverview("demo", "runs/demo", 142.0))
    assert "starting" in text
    assert "nobody waits" in text


def test_the_screen_counts_pushed_tasks_if_there_are_any() -> None:
    state = RunOverview("demo", "runs/demo", started_s=0.0)
    state.status = make_status()
    assert "pushed" not in shown(state)
    pushed = PushedTasks(num_accepted=7, num_waiting=2, num_refused=3)
    state.status = msgspec.structs.replace(make_status(), pushed=pushed)
    assert "pushed tasks: 7 accepted, 2 waiting, 3 refused" in shown(state)


def test_the_screen_counts_scores_that_did_not_come_if_there_are_any() -> None:
    state = RunOverview("demo", "runs/demo", started_s=0.0)
    state.status = make_status()
    assert "too late" not in shown(state)
    (worker, *others) = state.status.workers
    load = msgspec.structs.replace(worker.load, num_late_scores=1_200, num_scorer_errors=3)
    worker = msgspec.structs.replace(worker, load=load)
    state.status = msgspec.structs.replace(state.status, workers=(worker, *others))
    assert f"{worker.name}: 1,200 scores came too late, 3 scorer errors" in shown(state)


class Gone(io.StringIO):
    """An output whose reader went away."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_run_outlives_its_terminal() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    view = LiveView("demo", "runs/demo", console)
    console.file = Gone()
    view.note("stopping")
    view.close()


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


def test_a_stopped_trainer_is_named_and_nobody_is_advised_to_change_the_recipe() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    state.status = make_waiting(POOL, TRAINER, TICKETS)
    state.services = (make_silent("trainer-actor", 14.0), ServiceState("rollout-0", state="running"))
    state.alarms = alarms_now(RunSnapshot(now_s=114.0, status=state.status, services=state.services))
    text = shown(state)
    for part in (
        "trainer-actor has shown no sign of life for 14 s: it is stopped; `kill -CONT 7` lets it continue",
        "rollout waits for trainer actor (trainer-actor is silent for 14 s, 14.0 s)",
        "no advice while trainer-actor is silent",
        "trainer-actor silent, alive 14 s ago  rollout-0 running",
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    assert "max_staleness" not in text
    assert "tickets of policy" not in text


def test_every_wait_for_a_stopped_trainer_says_that_it_is_stopped() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    status = make_waiting(Party(kind="service", name="rollout-0"), TRAINER, TICKETS)
    (worker,) = status.workers
    worker = msgspec.structs.replace(worker, load=msgspec.structs.replace(worker.load, waits_for=(TICKETS,)))
    state.status = msgspec.structs.replace(status, workers=(worker,))
    said = "rollout-0 waits for trainer actor (all 8 tickets of policy 'actor' are charged, 14.0 s)"
    assert said in shown(state)
    state.services = (make_silent("trainer-critic", 14.0),)
    assert said in shown(state), "another policy's trainer"
    state.services = (make_silent("trainer-actor", 14.0),)
    text = shown(state)
    assert "rollout-0 waits for trainer actor (trainer-actor is silent for 14 s, 14.0 s)" in text
    assert "trainer actor, which is silent" in text
    assert "are charged" not in text


def test_a_stopped_publisher_explains_what_waits_for_its_trainer() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    state.status = make_waiting(POOL, TRAINER, TICKETS)
    state.services = (make_silent("publisher-actor", 14.0),)
    assert "rollout waits for trainer actor (publisher-actor is silent for 14 s" in shown(state)


def test_a_stopped_rollout_service_is_what_the_trainer_waits_for() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    state.status = make_waiting(TRAINER, POOL, GROUPS)
    state.services = (make_silent("rollout-0", 14.0),)
    assert "(step 3: 0 groups ready, 4 make a batch; rollout-0 is silent for 14 s, 14.0 s)" in shown(state)


def test_old_figures_are_said_to_be_old() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    state.update(make_status(), ())
    text = shown(state, unanswered_s=14.0)
    assert "what waits for what: not known for 14 s" in text
    assert "trainer actor waits for rollout" not in text


def test_a_rollout_service_that_is_not_heard_of_is_marked() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    (worker,) = make_status().workers
    worker = msgspec.structs.replace(worker, last_seen_s=80.0)
    service = Party(kind="service", name="rollout-0")
    missed = Wait(who=service, whom=service, reasons=(WaitReason(kind="silent"),), since_s=80.0)
    for waits, marks in (((missed,), True), ((), False)):  # in a large pool, 20 s may be one interval
        state.status = msgspec.structs.replace(make_status(), workers=(worker,), waits=waits)
        (line,) = [line for line in shown(state).splitlines() if line.startswith("rollout-0")]
        assert "20 s ago" in line
        assert (line.split()[-1] == "silent") is marks


def test_what_is_wrong_stands_on_the_screen_with_what_to_do() -> None:
    state = RunOverview("demo", "runs/demo", 100.0)
    state.alarms = (
        Alarm(
            rule="disk_low", subject="disk", since_s=1.0, evidence="5 MB are \x1b[2J left", advice="free some"
        ),
    )
    assert "5 MB are \\x1b[2J left; free some" in shown(state)


EVIL = "[/x][bold]\x1b[2J\x1b]52;c;aGk=\x07\u202e\x9b31m"
EVIL_REASON = WaitReason(kind="scoring", detail=EVIL)


def evil_status() -> StatusReply:
    worker = WorkerStatus(
        id="w", name=EVIL, engine="torch", hosts=("actor",), num_leases=0, last_seen_s=0.0,
        load=Load(waits_for=(EVIL_REASON,)),
    )  # fmt: skip
    party = Party(kind="service", name=EVIL)
    wait = Wait(who=party, whom=party, reasons=(EVIL_REASON,), since_s=0.0)
    return StatusReply(
        name="run", state="running", reason="", now_s=1.0, policies=(), workers=(worker,), waits=(wait,)
    )


def test_markup_and_escapes_of_a_service_are_shown_as_text() -> None:
    state = RunOverview("run", "runs/run", 0.0)
    state.status = evil_status()
    console = Console(width=400, force_terminal=False, file=io.StringIO())
    with console.capture() as captured:
        console.print(render(state, 1.0, notes=(EVIL,)))
    text = captured.get()
    assert text.count("[/x][bold]\\x1b[2J") >= 4
    assert "\x1b" not in text
    assert "\u202e" not in text


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


def test_slots_are_shown_if_the_load_of_the_engines_leaves_fewer_than_the_recipe() -> None:
    status = make_status()
    [worker] = status.workers
    assert episodes_text(worker) == "7"
    load = msgspec.structs.replace(worker.load, num_slots=40, max_slots=64)
    assert episodes_text(msgspec.structs.replace(worker, load=load)) == "7 (slots: 40 of 64)"
    load = msgspec.structs.replace(worker.load, num_slots=0, max_slots=64)
    assert episodes_text(msgspec.structs.replace(worker, load=load)) == "7 (a trainer has its device)"
    load = msgspec.structs.replace(worker.load, num_slots=64, max_slots=64)
    assert episodes_text(msgspec.structs.replace(worker, load=load)) == "7"
