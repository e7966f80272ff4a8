"""Sentences about waits: each one contains the names and numbers that its kind sets."""

from typing import get_args

import pytest

from astraflow.types import ScalingAdvice, Wait, WaitReason
from astraflow.types.status import ScalingVerdict
from astraflow.types.wait_words import party_text, reason_text, reasons_text, scaling_text, wait_line
from astraflow.types.waits import DATAFLOW, PERSON, POOL, RUN, Party, WaitKind

TRAINER = Party(kind="trainer", name="actor")
SHOWN: dict[WaitKind, tuple[str, ...]] = {
    "groups": ("step 42", "17 groups", "19 make"),
    "lost_groups": ("23 s", "17 of 19", "filtered", "by the-name"),
    "none_running": (),
    "no_service": (),
    "batch_failed": ("step 42", "17 times", "the detail", "drop-batch RUN actor"),
    "batch_too_large": ("step 42", "17 bytes", "19 can", "drop-batch RUN actor", "policies.actor.table"),
    "not_asking": ("`the-name`", "23 s"),
    "tickets": ("17 tickets", "actor"),
    "complete": ("actor",),
    "repeats_steps": ("actor",),
    "admission_all": (),
    "limiter_failed": ("the detail",),
    "not_attached": (),
    "unpublished": ("version 5 of actor",),
    "overdue": ("23 s", "29.0 s"),
    "last_request": ("`the-name`", "23 s"),
    "held_back": (),
    "eval_version": ("version 5", "version 0 of actor"),
    "eval_episodes": ("the-name", "17/19", "judge 7"),
    "silent": (),
    "behind": ("version 3 of actor", "5 or newer"),
    "set_aside": ("17 failures", "the detail"),
    "run_over": ("the detail",),
    "no_dataflow": (),
    "first_version": ("actor",),
    "weights_failed": ("actor", "the detail"),
    "scoring": ("the detail",),
}


@pytest.mark.parametrize("kind", get_args(WaitKind))
def test_a_reason_contains_the_names_and_numbers_of_its_kind(kind: WaitKind) -> None:
    reason = WaitReason(
        kind=kind, policy="actor", version=5, served=3, step=41, num=17, total=19, seconds=23.0, usual_s=29.0,
        fate="filtered", name="the-name", pinned=(("judge", 7),), detail="the detail",
    )  # fmt: skip
    text = reason_text(reason)
    assert text
    assert [part for part in SHOWN[kind] if part not in text] == []


def test_reasons_that_belong_together_are_joined() -> None:
    none, all_ = WaitReason(kind="none_running"), WaitReason(kind="admission_all")
    tickets = WaitReason(kind="tickets", policy="actor", num=8)
    assert (
        reasons_text([none, tickets]) == "none is on its way, and all 8 tickets of policy 'actor' are charged"
    )
    assert reasons_text([tickets, all_]) == f"{reason_text(tickets)}; {reason_text(all_)}"
    assert reasons_text([]) == "leases"


def test_a_side_that_waits_for_itself_is_named_once() -> None:
    service = Party(kind="service", name="rollout-0")
    reason = WaitReason(kind="first_version", policy="actor")
    own = Wait(who=service, whom=service, reasons=(reason,), since_s=0.0)
    assert wait_line(own) == "rollout-0 waits: the first version of actor"
    other = Wait(who=POOL, whom=TRAINER, reasons=(reason,), since_s=0.0)
    assert wait_line(other) == "rollout waits for trainer actor: the first version of actor"
    texts = [party_text(party) for party in (RUN, DATAFLOW, PERSON, Party(kind="eval", name="math"))]
    assert texts == ["run", "dataflow", "a person", "eval of math"]


@pytest.mark.parametrize("verdict", get_args(ScalingVerdict))
def test_each_verdict_on_the_pool_has_a_sentence(verdict: ScalingVerdict) -> None:
    assert bool(scaling_text(ScalingAdvice(verdict=verdict))) is (verdict != "none")


def test_the_advice_names_the_policy_that_waits_most_if_there_are_several() -> None:
    one = ScalingAdvice(verdict="too_few", trainer_wait_frac={"actor": 0.25}, missing_services=1)
    assert scaling_text(one) == "trainer waits 25%: about 1 more service"
    two = ScalingAdvice(
        verdict="too_few", trainer_wait_frac={"actor": 0.25, "judge": 0.5}, missing_services=3
    )
    assert scaling_text(two) == "trainer judge waits 50%: about 3 more services"
    many = ScalingAdvice(verdict="too_many", rollout_wait_frac=0.4, missing_services=-2)
    assert scaling_text(many) == "rollouts wait 40%: 2 services too many"
    unheard = ScalingAdvice(verdict="unheard", unheard=(TRAINER, Party(kind="service", name="rollout-0")))
    assert scaling_text(unheard) == "no advice while these are silent: trainer actor, rollout-0"
