"""Failed attempts are counted by the class of their error and the line of code that raised it."""

from astraflow.dataflow.journal.ledger import FailureKind, count_failure
from astraflow.types import Failure


def test_failures_of_one_class_and_place_are_one_kind_whatever_their_messages_say() -> None:
    kinds: dict[str, FailureKind] = {}
    for message in ("task s/1: the reward took 4 s", "the engine is gone", "", "two\nlines"):
        count_failure(kinds, Failure(error_class="RolloutError", message=message, place="my_rewards:12"))
    count_failure(kinds, Failure(error_class="worker_lost", message=""))
    assert [(kind.num, kind.example) for kind in kinds.values()] == [
        (4, "RolloutError: task s/1: the reward took 4 s"),
        (1, "worker_lost"),
    ]


def test_failures_with_the_same_message_from_two_places_are_two_kinds() -> None:
    kinds: dict[str, FailureKind] = {}
    for place in ("my_rewards:12", "my_rewards:30", ""):
        count_failure(kinds, Failure(error_class="RolloutError", message="it failed", place=place))
    assert [kind.num for kind in kinds.values()] == [1, 1, 1]


def test_past_a_number_of_kinds_all_others_are_one() -> None:
    kinds: dict[str, FailureKind] = {}
    for number in range(200):
        count_failure(kinds, Failure(error_class="ValueError", message="x" * 1000, place=f"m:{number}"))
    assert len(kinds) == 31
    assert sum(kind.num for kind in kinds.values()) == 200
    assert max(len(kind.example) for kind in kinds.values()) == 300
    assert kinds["failures of other kinds"].num == 170
