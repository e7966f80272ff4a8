"""The text of `astraflow status`."""

from msgspec.structs import replace

from astraflow.addons.view.status_lines import episodes_text, status_lines
from astraflow.report.overview import RunOverview
from drivers.shown_runs import make_status, make_step


def test_slots_are_shown_if_the_load_of_the_engines_leaves_fewer_than_the_recipe() -> None:
    status = make_status()
    [worker] = status.workers
    assert episodes_text(worker) == "7"
    load = replace(worker.load, num_slots=40, max_slots=64)
    assert episodes_text(replace(worker, load=load)) == "7 (slots: 40 of 64)"
    load = replace(worker.load, num_slots=0, max_slots=64)
    assert episodes_text(replace(worker, load=load)) == "7 (a trainer has its device)"
    load = replace(worker.load, num_slots=64, max_slots=64)
    assert episodes_text(replace(worker, load=load)) == "7"


def test_the_status_is_said_in_one_line_per_policy_and_service() -> None:
    run = RunOverview("demo", "runs/demo", 58.0, status=make_status())
    first, policy, service, wait = status_lines(run, make_status())
    assert first == "astraflow demo  running  0:42  runs/demo  generating 1,500 tok/s"
    assert policy == "actor at step 3/10; staleness bound 2, 5/8 tickets, 3/4 groups ready, 3 dropped"
    assert service == "rollout-0: 7 episodes, 1,500 tok/s, heard of 1 s ago, versions actor:3, waits for -"
    assert wait.startswith("trainer actor waits for rollout")
    run.add_step(make_step(3))
    assert status_lines(run, make_status())[1].startswith("actor step 4/10: reward 0.500, held-out -")
