"""Batches that could not be trained."""

from astraflow.dataflow.service.failed_steps import FailedSteps
from astraflow.types import StepFailure, WaitReason
from astraflow.types.waits import PERSON, Party


def failure(step: int, reason: str = "TrainingError: the loss is not finite") -> StepFailure:
    return StepFailure(step=step, epoch=1, reason=reason)


def test_a_batch_that_failed_once_is_tried_again() -> None:
    failed = FailedSteps()
    failed.note("actor", failure(4), 10.0)
    assert failed.wait("actor", 4) is None
    assert failed.waits() == ()


def test_a_batch_that_failed_twice_is_held_back_with_the_command_that_drops_it() -> None:
    failed = FailedSteps()
    failed.note("actor", failure(4), 10.0)
    failed.note("actor", failure(4, "WireError: line one\nline two"), 20.0)
    wait = failed.wait("actor", 4)
    assert wait is not None
    assert (wait.who, wait.whom, wait.since_s) == (Party(kind="trainer", name="actor"), PERSON, 10.0)
    detail = "WireError: line one line two"
    assert wait.reasons == (WaitReason(kind="batch_failed", policy="actor", step=4, num=2, detail=detail),)
    assert failed.waits() == (wait,)
    assert failed.wait("actor", 5) is None
    assert failed.wait("critic", 4) is None


def test_another_step_in_between_starts_the_count_again() -> None:
    failed = FailedSteps()
    for step in (4, 5, 4):
        failed.note("actor", failure(step), 10.0)
    assert failed.waits() == ()


def test_a_commit_of_an_earlier_step_forgets_nothing() -> None:
    failed = FailedSteps()
    failed.note("actor", failure(4), 10.0)
    failed.forget("actor", 3)
    failed.note("actor", failure(4), 10.0)
    assert failed.wait("actor", 4) is not None
    failed.forget("actor", 4)
    assert failed.wait("actor", 4) is None


def test_a_dropped_batch_is_forgotten_and_so_is_that_of_a_policy_without_failures() -> None:
    failed = FailedSteps()
    for policy in ("actor", "actor", "critic"):
        failed.note(policy, failure(4), 10.0)
    failed.forget("actor")
    failed.forget("judge")
    failed.note("critic", failure(4), 11.0)
    assert [wait.who.name for wait in failed.waits()] == ["critic"]
