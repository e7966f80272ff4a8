from astraflow.addons.view.conversation import blocks_of_trajectory
from astraflow.addons.view.trajectory_tree import Branch, Origin, branches_of
from astraflow.types import Trajectory
from drivers.talk_runs import decode, said, talk


def origins(*trajectories: Trajectory) -> tuple[Origin, ...]:
    return branches_of([Branch(each, blocks_of_trajectory(each, decode)) for each in trajectories])


def test_a_fork_names_the_turn_after_which_it_left() -> None:
    first = talk("2 + 3?<assistant>", said("six"), "No.<assistant>", said("four"))
    fork = talk("2 + 3?<assistant>sixNo.<assistant>", said("five"), is_fork=True)
    none, found = origins(first, fork)
    assert none == Origin()
    assert (found.parent, found.relation) == (0, "forks from sequence 1 after turn 1")
    assert found.num_shared >= len("2 + 3?<assistant>sixNo.<assistant>")


def test_a_rewritten_history_is_called_so() -> None:
    first = talk("A long story.<assistant>", said("one"), "And?<assistant>", said("two"))
    cut = talk("In short.<assistant>", said("three"), is_fork=True)
    assert origins(first, cut)[1].relation == "rewrites the history of sequence 1, which was cut or compacted"


def test_helpers_and_those_who_read_an_answer_follow_it() -> None:
    first = talk("Solve it.<assistant>", said("<task>add 2 and 3</task>"), policy="agent")
    helper = talk("add 2 and 3<assistant>", said("it is 5"), policy="helper")
    judge = talk("Is this right: it is 5<assistant>", said("yes"), policy="judge")
    other = talk("Solve it.<assistant>", said("7"), policy="agent")
    found = origins(first, helper, judge, other)
    assert [origin.parent for origin in found] == [-1, 0, 1, -1]
    assert found[1].relation == "started by sequence 1 in turn 1"
    assert found[2].relation == "was shown turn 1 of sequence 2"


def test_a_sequence_that_read_several_answers_follows_all_of_them() -> None:
    solvers = [talk("Solve it.<assistant>", said(text), policy="solver") for text in ("it is 5", "it is 6")]
    selector = talk("Choose: it is 5 or it is 6<assistant>", said("the first"), policy="selector")
    *_, found = origins(*solvers, selector)
    assert found.parents == (1, 0)
    assert found.relation == "was shown turn 1 of sequence 1 and turn 1 of sequence 2"
