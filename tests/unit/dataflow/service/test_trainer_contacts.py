"""What is known of trainers by their requests alone."""

import pytest

from astraflow.dataflow.service.trainer_contacts import TrainerContacts
from astraflow.errors import FencedError
from astraflow.types import Wait, WaitReason
from astraflow.types.waits import POOL, RUN, Party

TRAINER = Party(kind="trainer", name="actor")
OVERDUE = WaitReason(kind="overdue", policy="actor", seconds=50.0, usual_s=2.0)
WAITS = Wait(
    who=TRAINER, whom=POOL, reasons=(WaitReason(kind="groups", step=2, num=4, total=4),), since_s=50.0
)
TRAINS = Wait(who=POOL, whom=TRAINER, reasons=(OVERDUE,), since_s=50.0)


def made() -> TrainerContacts:
    """Of a dataflow that started at 40; a pause of 10 s is a surprise."""
    return TrainerContacts(["actor"], heartbeat_s=2.0, started_s=40.0)


def test_the_newest_request_is_remembered_with_its_time() -> None:
    contacts = made()
    assert contacts.last("actor", 41.0) == ("", 0.0)
    with contacts.request("actor", "commit", lambda: 60.0):
        pass
    assert contacts.last("actor", 99.0) == ("commit", 60.0)


def test_a_request_that_waits_for_its_answer_is_heard_now() -> None:
    contacts = made()
    with contacts.request("actor", "batch", lambda: 60.0):
        assert contacts.last("actor", 55.0) == ("batch", 55.0)
        assert contacts.explain(WAITS, 100.0) == WAITS


def test_a_trainer_that_asks_for_nothing_is_what_the_run_waits_for() -> None:
    contacts = made()
    with contacts.request("actor", "commit", lambda: 60.0):
        pass
    assert contacts.explain(WAITS, 69.9) == WAITS
    told = contacts.explain(WAITS, 75.0)
    reason = WaitReason(kind="not_asking", policy="actor", name="commit", seconds=15.0)
    assert told == Wait(who=RUN, whom=TRAINER, reasons=(reason,), since_s=60.0)


def test_one_that_was_never_heard_of_counts_from_the_start_of_the_dataflow() -> None:
    told = made().explain(WAITS, 75.0)
    assert told.reasons == (WaitReason(kind="not_asking", policy="actor", seconds=35.0),)
    assert told.since_s == 40.0


def test_one_that_is_overdue_is_named_with_its_last_request() -> None:
    contacts = made()
    with contacts.request("actor", "batch", lambda: 60.0):
        pass
    told = contacts.explain(TRAINS, 100.0)
    last = WaitReason(kind="last_request", policy="actor", name="batch", seconds=40.0)
    assert told == Wait(who=POOL, whom=TRAINER, reasons=(OVERDUE, last), since_s=50.0)


def test_a_refused_request_is_no_sign_of_life() -> None:
    contacts = made()
    with pytest.raises(FencedError), contacts.request("actor", "commit", lambda: 60.0):
        raise FencedError("a newer session has taken over")
    assert contacts.last("actor", 99.0) == ("", 0.0)


def test_policies_of_strangers_are_not_remembered() -> None:
    contacts = made()
    with contacts.request("unknown", "commit", lambda: 60.0):
        pass
    assert contacts.last("unknown", 99.0) == ("", 0.0)
    service = Party(kind="service", name="w0")
    other = Wait(who=RUN, whom=service, reasons=(WaitReason(kind="silent"),), since_s=1.0)
    assert contacts.explain(other, 99.0) == other
