"""Sentences about waits: a party that waits for itself, and one that is silent."""

from astraflow.recipe.service_state import ServiceState
from astraflow.report.silence import waits_text
from astraflow.types import StatusReply, Wait, WaitReason
from astraflow.types.waits import Party

SERVICE = Party(kind="service", name="rollout-0")
BEHIND = WaitReason(kind="behind", policy="actor", version=4, served=3)


def make_status(*waits: Wait) -> StatusReply:
    return StatusReply(
        name="demo", state="running", reason="", now_s=100.0, policies=(), workers=(), waits=waits
    )


def test_a_service_that_waits_for_itself_is_named_once() -> None:
    status = make_status(Wait(who=SERVICE, whom=SERVICE, reasons=(BEHIND,), since_s=95.0))
    assert waits_text(status, ()) == (
        "rollout-0 waits (it serves version 3 of actor, and needs 4 or newer, 5.0 s)",
    )


def test_a_silent_service_is_not_also_said_to_wait_for_itself() -> None:
    status = make_status(Wait(who=SERVICE, whom=SERVICE, reasons=(BEHIND,), since_s=95.0))
    stopped = ServiceState("rollout-0", state="running", silent_s=14.0, is_silent=True, age_s=90.0)
    assert waits_text(status, (stopped,)) == ()
