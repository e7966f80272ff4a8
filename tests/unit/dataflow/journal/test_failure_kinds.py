"""Failed attempts are counted by what they have in common."""

from astraflow.dataflow.journal.failure_kinds import FailureKind, count_failure


def test_failures_that_differ_in_task_and_numbers_are_one_kind() -> None:
    kinds: dict[str, FailureKind] = {}
    for number in range(5):
        count_failure(kinds, f"RolloutError: task sums/basic-{number}: the reward took {number} s")
    count_failure(kinds, "worker_lost")
    assert [(kind.num, kind.example) for kind in kinds.values()] == [
        (5, "RolloutError: the reward took 0 s"),
        (1, "worker_lost"),
    ]


def test_failures_that_differ_after_the_first_line_are_one_kind() -> None:
    kinds: dict[str, FailureKind] = {}
    for answer in ("x+1", "x+2"):
        count_failure(kinds, f"LateScoreError: task s/1: it took 4 s\nIt compared {answer}.")
    assert [(kind.num, kind.example) for kind in kinds.values()] == [(2, "LateScoreError: it took 4 s")]


def test_past_a_number_of_kinds_all_others_are_one() -> None:
    kinds: dict[str, FailureKind] = {}
    for number in range(200):
        count_failure(kinds, f"ValueError: {chr(200 + number) * 1000}")
    assert len(kinds) == 31
    assert sum(kind.num for kind in kinds.values()) == 200
    assert max(len(kind.example) for kind in kinds.values()) == 300
    assert kinds["failures of other kinds"].num == 170
