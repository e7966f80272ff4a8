"""What the core answers, to the letter: refusals, receipts, leases, waits and wake-ups."""

from collections.abc import Callable
from typing import ClassVar

import msgspec
import pytest

from astraflow.config import Use
from astraflow.dataflow.core.commands import (
    AddTasks,
    AddWorker,
    AttemptFailed,
    EvalFinished,
    ExpireLeases,
    FateDecided,
    LeaseView,
    PublishVersion,
    ResultDropped,
    StopRun,
)
from astraflow.dataflow.core.context import derive_seed
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import EvalSetPlan
from astraflow.dataflow.core.snapshot import SNAPSHOT_FORMAT
from astraflow.errors import DataError, FencedError, RefusedError
from astraflow.types import EpisodeReceipt, MetricItem, ServedVersions, Task, Wait, WaitReason
from astraflow.types.facts import GroupFacts, Outcome
from astraflow.types.waits import POOL, RUN, Party
from drivers.core_driver import Driver, make_chunk_manifest, make_core_plan, make_facts, make_meta, make_table

_HELDOUT = {"heldout": EvalSetPlan(num_tasks=2, samples=2)}


def started(**plan: object) -> Driver:
    """A run whose version 0 is published, with service w0."""
    driver = Driver(make_core_plan(**plan))  # type: ignore[arg-type]
    driver.start()
    return driver


def over(**plan: object) -> Driver:
    """A run of one step that was stopped after its first take."""
    driver = started(**plan)
    driver.finish_groups(2)
    driver.take(0)
    driver.publish(1)
    driver.apply(StopRun(reason="enough", is_failure=False))
    return driver


# --- refusals -------------------------------------------------------------------------------------


def publish(driver: Driver, step: int, version: int, *, policy: str = "actor", **manifest: object) -> None:
    """A publication by the current session of actor."""
    made = make_chunk_manifest(policy, version, **manifest)  # type: ignore[arg-type]
    epoch = driver.sessions["actor"].epoch
    driver.apply(PublishVersion(policy="actor", epoch=epoch, step=step, manifest=made))


def batch_of(driver: Driver) -> None:
    """Step 0 has its batch."""
    driver.finish_groups(2)
    driver.take(0)


_REFUSALS: list[tuple[Callable[[Driver], object], tuple[str, int, str]]] = [
    (
        lambda d: d.finish("7.0.0"),
        ("unknown_lease", 404, "lease '7.0.0' was never issued by this run"),
    ),
    (
        lambda d: d.attach("nobody"),
        ("unknown_policy", 404, "policy 'nobody' is not trained in this run (trained: actor)"),
    ),
    (
        lambda d: d.lease(1, "w9"),
        ("unknown_worker", 404, "worker 'w9' is not registered; register again"),
    ),
    (
        lambda d: publish(d, 0, 1, policy="judge"),
        ("wrong_policy", 422, "policy 'actor': the manifest is of policy 'judge'"),
    ),
    (
        lambda d: publish(d, 1, 3),
        ("wrong_version", 409, "policy 'actor': version 3 is not next; the newest is 0, so 1 is"),
    ),
    (
        lambda d: publish(d, 2, 1),
        ("wrong_step", 409, "policy 'actor': version 1 of this session holds 1 steps, not 2"),
    ),
    (
        lambda d: publish(d, 1, 1),
        ("out_of_order", 409, "policy 'actor': version 1 holds 1 steps, but only 0 have their batch"),
    ),
    (
        lambda d: (batch_of(d), publish(d, 1, 1, kind="delta", base=5)),
        ("unknown_base", 422, "policy 'actor': version 1 is a delta to 5, which is not kept (kept: 0)"),
    ),
    (
        lambda d: (d.attach(), publish(d, 0, 1, kind="delta", base=0)),
        ("not_full", 422, "policy 'actor': version 1 begins a session, so it must be full, not a delta"),
    ),
    (
        lambda d: d.commit(1),
        (
            "out_of_order",
            409,
            "policy 'actor': step 2 cannot be committed; this session committed the first 0 steps, and "
            "0 have their batch",
        ),
    ),
    (
        lambda d: (batch_of(d), d.commit(0, version=1)),
        (
            "unpublished",
            409,
            "policy 'actor': step 1 makes version 1; version 1 was given and 0 is the newest published",
        ),
    ),
    (
        lambda d: d.release(2),
        ("out_of_order", 409, "policy 'actor': 2 steps cannot be released; this session committed 0"),
    ),
    (
        lambda d: (d.run_step(), d.release(1), d.take(0)),
        ("released", 409, "policy 'actor': step 1 was released, the first 1 steps are gone"),
    ),
    (
        lambda d: d.take(2),
        (
            "out_of_order",
            409,
            "policy 'actor': step 3 is not next; the session began after 0 steps and 0 steps have their "
            "batch",
        ),
    ),
    (
        lambda d: d.take(4),
        ("finished", 409, "policy 'actor' takes 4 steps; there is no step 5"),
    ),
]


@pytest.mark.parametrize(("action", "expected"), _REFUSALS)
def test_a_refusal_has_a_code_a_status_and_says_what_was_expected(
    action: Callable[[Driver], object], expected: tuple[str, int, str]
):
    driver = started()
    with pytest.raises(RefusedError) as refused:
        action(driver)
    assert (refused.value.code, refused.value.status, str(refused.value)) == expected


@pytest.mark.parametrize(
    "action",
    [
        lambda d: d.commit(0),
        lambda d: d.attach(),
        lambda d: publish(d, 2, 2),
        lambda d: d.take(0),
        lambda d: d.apply(AddTasks(tasks=(Task(id="x", source="", prompt="?"),))),
    ],
)
def test_after_the_end_the_refusal_names_the_reason(action: Callable[[Driver], object]):
    driver = over()
    with pytest.raises(RefusedError) as refused:
        action(driver)
    assert (refused.value.code, str(refused.value)) == ("finished", "the run is over: enough")


@pytest.mark.parametrize("action", [lambda d: d.commit(0), lambda d: d.release(0), lambda d: d.take(0)])
def test_a_fenced_session_is_told_who_holds_the_policy(action: Callable[[Driver], object]):
    driver = started()
    old = driver.sessions["actor"]
    driver.attach()
    driver.sessions["actor"] = old
    with pytest.raises(FencedError, match=r"^policy 'actor': session 1 is over, session 2 holds the policy$"):
        action(driver)


def test_tokens_of_a_version_that_does_not_exist_are_refused_with_the_versions():
    driver = started()
    lease = driver.lease(1)[0]
    with pytest.raises(RefusedError) as refused:
        driver.result(lease.id, make_facts(make_meta(), make_meta(versions=(0, 1))))
    assert (refused.value.code, refused.value.status) == ("invalid", 422)
    assert str(refused.value) == (
        "lease '0.0.0', trajectory 1: tokens of versions 0 to 1 of policy 'actor', whose newest version is 0"
    )


def test_a_snapshot_that_does_not_fit_says_why():
    data = started().core.snapshot()
    with pytest.raises(DataError) as error:
        Core.from_snapshot(make_core_plan(policies=("a", "b")), data)
    assert str(error.value) == "the snapshot is of a run that trains actor; the recipe trains a, b"
    two = started(policies=("a", "b")).core.snapshot()
    with pytest.raises(DataError, match=r"trains a, b; the recipe trains actor$"):
        Core.from_snapshot(make_core_plan(), two)
    with pytest.raises(DataError, match=r"^the snapshot cannot be read: "):
        Core.from_snapshot(make_core_plan(), data[:-1])
    with pytest.raises(
        DataError, match=rf"^the snapshot has format 99, this version reads {SNAPSHOT_FORMAT}$"
    ):
        Core.from_snapshot(make_core_plan(), b"\x81\xa6format\x63")


# --- receipts and leases --------------------------------------------------------------------------


def test_a_dropped_result_says_which_lease_and_why():
    driver = started(table=make_table(group_size=2, groups_per_batch=1, max_failed=1), num_steps=2)
    first, second = driver.lease(2)
    driver.expire(first)
    (again,) = driver.lease(1)
    driver.finish(again)
    late = driver.finish(first)
    reason = "attempt 1 of the episode won"
    assert late == EpisodeReceipt(lease_id="0.0.0", status="dropped", reason=reason)
    assert driver.last.events == (ResultDropped(lease_id="0.0.0", reason=reason),)
    driver.finish(second)
    reason = "its group is complete or has failed"
    assert driver.finish(first) == EpisodeReceipt(lease_id="0.0.0", status="dropped", reason=reason)
    first, second = driver.lease(2)
    driver.fail(first, is_retryable=False)
    assert driver.finish(first).reason == "the episode has failed"
    driver.expire(second)
    assert driver.fail(second).reason == "the lease had expired before it failed"


def test_an_expired_lease_names_itself_and_what_happened():
    driver = started(num_steps=9, table=make_table(groups_per_batch=40, group_size=2), num_tasks=500)
    while driver.core.state == "running":
        driver.now_s += 60.0
        driver.finish(driver.lease(1)[0])
        for attempt in range(3):
            lease = driver.lease(1)[0]
            driver.apply(ExpireLeases(lease_ids=(lease.id,)))
            assert driver.last.events[0] == AttemptFailed(
                lease_id=lease.id, error_class="lease_expired", is_final=attempt == 2
            )
    assert driver.fates().failed == 80, "2 batches' worth, as it is more than 64"
    assert driver.core.reason.endswith(
        "80 groups in a row failed; the last error: lease_expired: its heartbeats stopped"
    )


def test_a_lost_service_is_the_error_of_its_leases():
    driver = started(max_attempts=1, num_steps=99, table=make_table(groups_per_batch=32, group_size=1))
    for number in range(64):
        driver.join(f"x{number}")
        driver.lease(1, f"x{number}")
        driver.drop(f"x{number}")
    assert driver.core.reason.endswith("64 groups in a row failed; the last error: worker_lost: killed")


def test_leases_carry_seeds_of_run_kind_task_and_sample_and_nothing_else():
    driver = started(eval_sets=_HELDOUT, seed=5)
    leases = driver.lease(6)
    assert leases[3] == LeaseView(
        id="e0.3.0",
        kind="eval",
        group_id=0,
        episode_idx=3,
        attempt=0,
        source="heldout",
        task_idx=1,
        seed=derive_seed(5, "eval", "heldout", 1, 1),
        pinned=(ServedVersions(policy="actor", versions=(0,)),),
        eval_set="heldout",
    )
    assert leases[5].seed == derive_seed(5, "train", 0, 1)
    assert driver.core.lease("e0.3.0") == leases[3]
    driver.expire(leases[3], leases[5])
    again = {lease.id: lease.seed for lease in driver.lease(2)}
    assert again == {"e0.3.1": leases[3].seed, "0.1.1": leases[5].seed}


def test_the_services_are_listed_as_they_joined_and_a_stranger_holds_nothing():
    driver = started()
    command = AddWorker(worker_id="w7", name="seven", hosts=("actor", "judge"))
    driver.apply(command)
    assert driver.core.workers()[-1] == command
    assert driver.core.worker_leases("nobody") == ()


def test_pushed_tasks_are_drawn_in_order_and_forgotten_with_their_group():
    driver = started(table=make_table(group_size=1, groups_per_batch=3), num_steps=9)
    tasks = tuple(Task(id=name, source="", prompt="?") for name in "abc")
    driver.apply(AddTasks(tasks=tasks[:2]))
    assert driver.last.wakes == ("leases",)
    reply = driver.apply(AddTasks(tasks=tasks)).answer
    assert (reply.num_accepted, reply.num_known) == (1, 2)
    driver.apply(AddTasks(tasks=tasks))
    assert driver.last.wakes == ()
    leases = driver.lease(4)
    assert [(lease.source, lease.task_idx) for lease in leases[:3]] == [("", 0), ("", 1), ("", 2)]
    assert [driver.core.pushed_task(n).id for n in range(3)] == ["a", "b", "c"]
    assert leases[3].source == "train"
    driver.finish(leases[1])
    with pytest.raises(KeyError):
        driver.core.pushed_task(1)
    assert driver.core.pushed_task(2).id == "c"


# --- what its own parts are told ------------------------------------------------------------------


class Notebook:
    """A curator that goes through the tasks in order and writes down what it is told."""

    seen: ClassVar[list[tuple[int, list[float]]]] = []

    def __init__(self, *, num_tasks: int, seed: int) -> None:
        self._next = -1
        Notebook.seen = []

    def next(self) -> int:
        self._next += 1
        return self._next

    def observe(self, outcome: Outcome) -> None:
        Notebook.seen.append((outcome.task_idx, [t.reward for t in outcome.groups[""].trajectories]))

    def state(self) -> dict[str, int]:
        return {"next": self._next}

    def restore(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def test_a_curator_hears_the_scores_of_the_good_episodes_of_every_task_drawn_from_a_source():
    table = make_table(group_size=3, max_failed=2)
    driver = started(table=table, curators=(Use(use=f"{__name__}:Notebook"),))
    driver.apply(AddTasks(tasks=(Task(id="pushed", source="", prompt="?"),)))
    driver.finish_groups(1)
    assert Notebook.seen == []
    leases = driver.lease(6)
    for lease in (leases[0], leases[2]):
        driver.result(lease.id, make_facts(make_meta(), score=0.25 * (1 + lease.episode_idx)))
    driver.fail(leases[1], is_retryable=False)
    for lease in leases[3:]:
        driver.finish(lease)
    assert Notebook.seen == [(0, [0.25, 0.75]), (1, [0.0, 1.0, 0.0])]


facts_seen: list[GroupFacts] = []


def look(facts: GroupFacts) -> bool:
    """Keeps all, and what it saw."""
    facts_seen.append(facts)
    return True


def cut_short(facts: GroupFacts) -> list[tuple[float, ...]]:
    """An advantage for a turn that is not there."""
    return [(1.0, 2.0) for _ in facts.trajectories]


def test_advantages_for_turns_that_are_not_there_end_the_run_with_their_number():
    credit = Use(use=f"{__name__}:cut_short").model_dump()
    driver = started(table=make_table(credit=credit))
    driver.finish_groups(1)
    assert driver.core.reason == "policy 'actor', group 0: credit gave 2 advantages for 1 turns"


def test_a_filter_gets_every_fact_about_the_trajectories():
    facts_seen.clear()
    driver = started(table=make_table(group_size=2, filters=[Use(use=f"{__name__}:look").model_dump()]))
    meta = make_meta(
        reward=0.5, role="solver", num_tokens=9, num_trained=5, turn_spans=((4, 9),), turn_rewards=(2.0,)
    )
    for lease in driver.lease(2):
        driver.result(lease.id, make_facts(meta))
    (facts,) = facts_seen
    assert (facts.policy, facts.group_id) == ("actor", 0)
    seen = facts.trajectories[1]
    assert (seen.episode_idx, seen.role, seen.reward, seen.turn_rewards) == (1, "solver", 0.5, (2.0,))
    assert (seen.turn_spans, seen.num_tokens, seen.num_trained_tokens, seen.is_truncated) == (
        ((4, 9),),
        9,
        5,
        False,
    )


# --- groups that lose episodes --------------------------------------------------------------------


def test_a_group_may_lose_what_its_table_allows_and_is_judged_by_the_rest():
    driver = started(table=make_table(group_size=4, groups_per_batch=1, max_failed=2), num_steps=1)
    leases = driver.lease(4)
    driver.finish(leases[0])
    driver.fail(leases[1], is_retryable=False)
    driver.fail(leases[2], is_retryable=False)
    assert driver.status().num_ready_groups == 0
    driver.finish(leases[3])
    batch = driver.take(0)
    assert batch is not None
    assert [sample.episode_idx for sample in batch.samples] == [0, 3]


def test_the_last_episode_of_a_group_may_be_the_one_that_fails():
    driver = started(table=make_table(group_size=3, groups_per_batch=1, max_failed=1), num_steps=1)
    leases = driver.lease(3)
    driver.finish(leases[0])
    driver.finish(leases[1])
    driver.fail(leases[2], is_retryable=False)
    assert driver.status().num_ready_groups == 1
    assert driver.finish(leases[2]).reason == "its group is complete or has failed"


def test_a_group_that_loses_too_many_says_how_many_tokens_are_lost_with_it():
    driver = started(table=make_table(group_size=4, groups_per_batch=1, max_failed=1), num_steps=1)
    leases = driver.lease(4)
    driver.result(leases[0].id, make_facts(make_meta(num_tokens=7), make_meta("judge", num_tokens=100)))
    driver.fail(leases[1], is_retryable=False)
    assert driver.fate_of(0) == []
    driver.fail(leases[2], is_retryable=False)
    assert driver.last.events[-1] == FateDecided(policy="actor", group_id=0, fate="failed", num_tokens=7)


# --- waits and wake-ups ---------------------------------------------------------------------------


def trainer(policy: str) -> Party:
    return Party(kind="trainer", name=policy)


def groups(policy: str, num: int, total: int) -> WaitReason:
    return WaitReason(kind="groups", policy=policy, num=num, total=total)


def tickets(policy: str, num: int) -> WaitReason:
    return WaitReason(kind="tickets", policy=policy, num=num)


def test_every_wait_says_what_for_and_since_when():
    driver = Driver(make_core_plan(num_steps=1, eval_sets=_HELDOUT))
    driver.join()
    driver.attach()
    unpublished = WaitReason(kind="unpublished", policy="actor", version=0)
    assert driver.core.waits() == (
        Wait(who=POOL, whom=trainer("actor"), reasons=(unpublished,), since_s=2.0),
    )
    driver.publish(0)
    driver.finish(driver.lease(4)[0])
    episodes = WaitReason(kind="eval_episodes", name="heldout", num=1, total=4, pinned=(("actor", 0),))
    assert driver.core.waits() == (
        Wait(who=trainer("actor"), whom=POOL, reasons=(groups("actor", 0, 2),), since_s=3.0),
        Wait(who=Party(kind="eval", name="actor"), whom=POOL, reasons=(episodes,), since_s=3.0),
    )


def test_a_policy_without_a_trainer_is_waited_for_by_the_run_until_its_steps_are_done():
    driver = Driver(make_core_plan(policies=("a", "b"), eval_sets=_HELDOUT))
    driver.attach("a")
    driver.publish(0, "a")
    not_attached = WaitReason(kind="not_attached", policy="b")
    version = WaitReason(kind="eval_version", policy="b", version=0)
    assert driver.core.waits() == (
        Wait(who=trainer("a"), whom=POOL, reasons=(groups("a", 0, 2),), since_s=2.0),
        Wait(who=RUN, whom=trainer("b"), reasons=(not_attached,), since_s=0.0),
        Wait(who=Party(kind="eval", name="a"), whom=trainer("b"), reasons=(version,), since_s=2.0),
    )
    driver.attach("b")
    driver.publish(0, "b")
    (episodes,) = driver.core.waits()[-1].reasons
    assert (episodes.num, episodes.total, episodes.pinned) == (0, 4, (("a", 0), ("b", 0)))


def test_a_trainer_at_work_makes_services_wait_only_while_it_has_no_room():
    driver = started(num_steps=2, table=make_table(max_staleness=0))
    driver.finish_groups(2)
    driver.take(0)
    full = (tickets("actor", 2),)
    assert driver.core.waits() == (Wait(who=POOL, whom=trainer("actor"), reasons=full, since_s=driver.now_s),)
    assert driver.core.why_no_lease(driver.served()) == full
    assert driver.core.is_held_back(driver.served())
    driver.publish(1)
    driver.commit(0)
    assert driver.core.why_no_lease(driver.served()) == ()
    assert not driver.core.is_held_back(driver.served())
    assert [wait.who for wait in driver.core.waits()] == [trainer("actor")]


def test_a_service_waits_for_nobody_while_there_are_episodes_to_run():
    driver = started(policies=("a", "b"), table=make_table(max_staleness=0))
    leases = driver.lease(9)
    assert driver.core.why_no_lease(driver.served()) == (tickets("a", 2), tickets("b", 2))
    driver.expire(leases[0])
    assert driver.core.why_no_lease(driver.served()) == ()
    lagging = (ServedVersions(policy="a", versions=(0,)),)
    behind = WaitReason(kind="behind", policy="b", version=0, served=-1)
    assert driver.core.why_no_lease(lagging) == (behind,)
    assert not driver.core.is_held_back(lagging)


def test_a_version_to_evaluate_wakes_services_and_those_who_follow_any_pinned_policy():
    driver = started(policies=("a", "b"), num_steps=2, eval_sets=_HELDOUT, eval_every=1)
    assert {"leases", "versions/a", "versions/b"} <= set(driver.last.wakes)
    for lease in driver.lease(4):
        driver.finish(lease)
    (record,) = [event.record for event in driver.last.events if isinstance(event, EvalFinished)]
    assert (record.num_tasks, record.num_samples, record.at_s) == (2, 4, driver.now_s)
    assert {"evals", "versions/a", "versions/b"} <= set(driver.last.wakes)


def test_the_end_wakes_everybody_and_cancels_with_the_tokens_that_are_given_up():
    driver = started(table=make_table(max_staleness=2), num_steps=9)
    driver.finish_groups(3)
    driver.take(0)
    driver.lease(1)
    driver.apply(StopRun(reason="enough", is_failure=False))
    cancelled = [(e.group_id, e.num_tokens) for e in driver.last.events if isinstance(e, FateDecided)]
    assert cancelled == [(0, 20), (1, 20), (2, 20), (3, 0)]
    wakes = {"leases", "evals", "run", "batch/actor", "versions/actor", "steps/actor"}
    assert set(driver.last.wakes) == wakes
    assert driver.core.versions("actor").state == "finished"


def test_a_round_of_one_task_has_no_error_and_a_round_without_any_says_so():
    driver = started(eval_sets={"one": EvalSetPlan(1, 2), "two": EvalSetPlan(2, 1)}, max_attempts=1)
    leases = driver.lease(4)
    for lease, value in zip(leases[:2], (0.25, 0.75), strict=True):
        facts = make_facts(score=value)
        metrics = (MetricItem("turns", 2.0 + value, "mean"), MetricItem("calls", 3.0, "sum"))
        driver.result(lease.id, type(facts)(trajectories=(), score=value, metrics=metrics, duration_s=1.0))
    driver.fail(leases[2])
    driver.fail(leases[3])
    one, two = driver.core.evals()
    assert (one.score_mean, one.score_stderr, one.num_failed) == (0.5, 0.0, 0)
    assert one.metrics[:2] == (MetricItem("turns", 2.5, "mean"), MetricItem("calls", 6.0, "sum"))
    assert (two.score_mean, two.score_stderr, two.num_samples, two.num_failed) == (None, 0.0, 0, 2)


def test_the_standard_error_is_over_tasks():
    driver = started(eval_sets={"three": EvalSetPlan(3, 1)})
    for lease, value in zip(driver.lease(3), (0.0, 1.0, 0.5), strict=True):
        driver.result(lease.id, make_facts(score=value))
    assert driver.core.evals()[0].score_stderr == pytest.approx((0.25 / 3) ** 0.5)


def test_the_end_of_a_round_takes_back_its_own_leases_and_no_others():
    driver = started(eval_sets={"one": EvalSetPlan(1, 1), "two": EvalSetPlan(1, 1)})
    one, two, train = driver.lease(3)
    driver.finish(one)
    assert driver.core.worker_leases("w0") == (two.id, train.id)
    assert driver.core.lease(two.id) == two


def test_an_episode_that_hit_the_length_limit_is_truncated_data():
    facts_seen.clear()
    driver = started(table=make_table(group_size=1, filters=[Use(use=f"{__name__}:look").model_dump()]))
    meta = msgspec.structs.replace(make_meta(), finish_reason="length")
    driver.result(driver.lease(1)[0].id, make_facts(meta))
    assert [seen.is_truncated for facts in facts_seen for seen in facts.trajectories] == [True]


def test_a_publication_wakes_all_who_may_go_on():
    driver = started()
    assert set(driver.last.wakes) == {"versions/actor", "batch/actor", "leases"}
    assert driver.status().num_steps == 4


def test_a_late_result_leaves_nothing_to_lease_of_its_episode():
    driver = started(table=make_table(groups_per_batch=1, max_staleness=0))
    late, _ = driver.lease(2)
    driver.expire(late)
    assert driver.core.why_no_lease(driver.served()) == ()
    assert driver.finish(late).status == "accepted"
    assert driver.core.why_no_lease(driver.served()) == (tickets("actor", 1),)
    assert driver.lease(1) == ()
