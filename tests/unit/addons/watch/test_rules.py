"""The rules of the watchdog: each sees its fault, names it with its numbers, and is silent about others."""

import dataclasses
from typing import Literal

import msgspec
import pytest
from msgspec.structs import replace

from astraflow.addons.watch.rules import RULES
from astraflow.recipe.service_state import ServiceState
from astraflow.report.watch.run_snapshot import Disk, LauncherState, RunSnapshot, StepMemory
from astraflow.types import (
    FateCounts,
    GroupOutcome,
    ScalingAdvice,
    StepRecord,
    WaitReason,
    WeightTransfer,
)
from astraflow.types.waits import PERSON, POOL, RUN, Party
from drivers.run_snapshots import (
    NOW_S,
    TRAINER,
    make_policy_status,
    make_snapshot,
    make_steps,
    make_wait,
    make_worker,
)

W0 = Party(kind="service", name="w0")
SILENT = WaitReason(kind="silent")


def found_in(snapshot: RunSnapshot) -> dict[str, list[str]]:
    """Rule -> what it says, for the rules that say something."""
    texts = {rule.name: [finding.evidence for finding in rule.find(snapshot)] for rule in RULES}
    return {name: said for name, said in texts.items() if said}


def only(snapshot: RunSnapshot, rule: str) -> str:
    """What a rule says, which is the only one that says something."""
    found = found_in(snapshot)
    assert list(found) == [rule], found
    (text,) = found[rule]
    return text


def coming(**changes: object) -> WeightTransfer:
    """A version that has come halfway in 10 s."""
    usual: dict[str, object] = {
        "policy": "actor", "version": 10, "num_bytes": 40_000_000, "arrived_bytes": 20_000_000, "age_s": 10.0,
        "quiet_s": 0.1,
    }  # fmt: skip
    return WeightTransfer(**(usual | changes))  # type: ignore[arg-type]


def with_rewards(rewards: list[float], **metrics: float) -> list[StepRecord]:
    steps = make_steps(len(rewards), **metrics)
    return [msgspec.structs.replace(s, reward_mean=r) for s, r in zip(steps, rewards, strict=True)]


def test_a_healthy_run_is_silent_at_its_start_in_its_course_and_at_its_end() -> None:
    assert found_in(make_snapshot()) == {}
    starting = (ServiceState("rollout-0", state="running", age_s=3.0),)
    assert found_in(make_snapshot(workers=(), steps={}, services=starting)) == {}
    assert found_in(make_snapshot(status=None, steps={})) == {}
    status = make_snapshot(workers=()).status
    assert status is not None
    assert found_in(make_snapshot(status=msgspec.structs.replace(status, state="finished"))) == {}


def test_a_batch_that_waits_for_a_person_is_named_with_what_the_person_can_do() -> None:
    reason = WaitReason(kind="batch_failed", policy="actor", step=3, num=2, detail="the loss is not finite")
    wait = make_wait(3.0, reason, whom=PERSON)
    text = only(make_snapshot(waits=(wait,)), "held_batch")
    assert "batch of step 4 could not be trained 2 times in a row: the loss is not finite" in text
    assert "`astraflow drop-batch RUN actor`" in text


def test_a_process_in_trouble_is_named_with_its_remedy() -> None:
    stopped = ServiceState(
        "rollout-0", state="running", silent_s=9.0, is_silent=True, trouble="it is stopped; `kill -CONT 7`"
    )
    text = only(make_snapshot(services=(stopped,)), "stopped_process")
    assert text == "rollout-0 has shown no sign of life for 9 s: it is stopped; `kill -CONT 7`"


def test_a_process_that_gets_no_processor_is_not_called_stopped() -> None:
    trouble = "it gets no CPU time (it is ready to run, and got 2% of a core); end other programs"
    starved = ServiceState(
        "rollout-0", state="running", silent_s=9.0, is_silent=True, trouble=trouble, is_starved=True
    )
    text = only(make_snapshot(services=(starved,)), "starved_process")
    assert text == f"rollout-0 has shown no sign of life for 9 s: {trouble}"


def test_a_process_that_crashes_again_and_again_is_named_with_its_last_words() -> None:
    state = ServiceState(
        "trainer-actor", state="restarting", restarts=2, exit_code=1, last_line="ValueError: no"
    )
    text = only(make_snapshot(services=(state,)), "crashing_process")
    assert "restarted 2 times; it last ended with code 1: ValueError: no" in text
    assert found_in(make_snapshot(services=(replace(state, restarts=1),))) == {}
    well = replace(state, state="running", age_s=31.0, silent_s=0.1)
    assert found_in(make_snapshot(services=(well,))) == {}


def test_a_silent_service_elsewhere_is_named_and_one_that_came_back_is_not() -> None:
    wait = make_wait(9.0, SILENT, who=RUN, whom=W0)
    others = (make_worker("w0", unheard_s=9.0), make_worker("w1"))
    text = only(make_snapshot(workers=others, waits=(wait,)), "silent_service")
    assert text == "rollout service w0 has given no sign of life for 9 s"
    again = (*others, make_worker("w0"))
    assert found_in(make_snapshot(workers=again, waits=(wait,))) == {}
    alive = ServiceState("w0", state="running", age_s=90.0, silent_s=1.0)  # the launcher knows better
    assert found_in(make_snapshot(workers=others, waits=(wait,), services=(alive,))) == {}


def test_a_pool_without_a_service_that_is_heard_of_is_named() -> None:
    text = only(make_snapshot(workers=()), "no_rollout_service")
    assert text == "no rollout service is left; 6 groups are unfinished"
    new = make_policy_status(fates=FateCounts(), num_running_groups=0)
    assert (
        found_in(make_snapshot(workers=(), policy=new, waits=(make_wait(20.0, who=RUN, whom=TRAINER),))) == {}
    )
    late = make_snapshot(workers=(), policy=new, waits=(make_wait(61.0, who=RUN, whom=TRAINER),))
    assert "no rollout service has joined" in only(late, "no_rollout_service")
    wait = make_wait(9.0, SILENT, who=RUN, whom=W0)
    text = only(
        make_snapshot(workers=(make_worker("w0", unheard_s=9.0),), waits=(wait,)), "no_rollout_service"
    )
    assert (
        text == "no rollout service is left: the last one, w0, fell silent 9 s ago; 6 groups are unfinished"
    )
    old = ServiceState("rollout-0", state="running", age_s=61.0, silent_s=1.0)
    assert "has joined" in only(dataclasses.replace(late, services=(old,)), "no_rollout_service")


def test_a_service_that_is_set_aside_is_named_with_its_last_error() -> None:
    worker = msgspec.structs.replace(
        make_worker(), is_set_aside=True, failed_in_a_row=3, last_failure="OSError: no disk"
    )
    text = only(make_snapshot(workers=(worker, make_worker("w1"))), "failing_service")
    assert "after 3 failures in a row; its last error: OSError: no disk" in text
    failed = make_policy_status(fates=FateCounts(drawn=48, trained=36, failed=4, live=8))
    assert list(found_in(make_snapshot(workers=(worker,), policy=failed))) == ["failing_episodes"]


def test_failures_of_every_service_are_named_before_a_group_is_lost() -> None:
    nan = "RolloutError: the reward returned nan"
    failing = [
        msgspec.structs.replace(make_worker(name), failed_in_a_row=3, last_failure=nan)
        for name in ("w0", "w1")
    ]
    text = only(make_snapshot(workers=tuple(failing)), "failing_episodes")
    assert text == f"every rollout service has failed at least 3 times in a row; the last error: {nan}"
    healthy = (failing[0], make_worker("w1"))
    assert "failing_episodes" not in found_in(make_snapshot(workers=healthy))


def test_a_dataflow_that_does_not_answer_is_named_unless_its_process_says_why() -> None:
    snapshot = make_snapshot(status=None, unanswered_s=5.0)
    assert "has not answered for 5 s" in only(snapshot, "dataflow_silent")
    why = dataclasses.replace(snapshot, unanswered_reason="refused")
    assert only(why, "dataflow_silent") == "the dataflow does not answer (refused)"
    stopped = ServiceState("dataflow", state="running", silent_s=9.0, is_silent=True, trouble="it is stopped")
    assert list(found_in(dataclasses.replace(snapshot, services=(stopped,)))) == ["stopped_process"]


def test_a_launcher_that_writes_no_more_is_named() -> None:
    text = only(
        make_snapshot(launcher=LauncherState(pid=7, state="stopped", silent_s=40.0)), "launcher_silent"
    )
    assert text.startswith("the launcher (process 7) has shown no sign of life for 40 s: it is stopped")
    assert found_in(make_snapshot(launcher=LauncherState(pid=7, state="running", silent_s=3.0))) == {}


@pytest.mark.parametrize(
    ("free_bytes", "said"),
    [
        (1000, "is full (1,000 bytes free), so it can record nothing new"),
        (500_000_000, "has 500 MB left"),
        (3_000_000_000, "has 3,000 MB left, but the next checkpoints take about 4,000 MB"),
    ],
)
def test_a_disk_that_is_soon_full_is_named(free_bytes: int, said: str) -> None:
    disk = Disk("runs/x", free_bytes, checkpoint_bytes=4_000_000_000 if free_bytes > 1e9 else 0)
    assert said in only(make_snapshot(disk=disk), "disk_low")


def test_a_disk_with_room_is_not_named() -> None:
    assert found_in(make_snapshot(disk=Disk("runs/x", 5_000_000_000, checkpoint_bytes=4_000_000_000))) == {}


def test_weights_of_which_no_byte_comes_are_missing_and_slow_ones_are_late() -> None:
    stuck = make_worker(transfers=(coming(quiet_s=9.0),))
    text = only(make_snapshot(workers=(stuck,)), "weights_missing")
    assert "no byte has arrived for 9 s (20 of 40 MB in 10 s)" in text
    failing = make_worker(transfers=(coming(age_s=6.0, arrived_bytes=0, problem="refused"),))
    assert text != (other := only(make_snapshot(workers=(failing,)), "weights_missing"))
    assert other.endswith("the last try failed: refused")
    slow = make_worker(transfers=(coming(arrived_bytes=1_000_000),))
    text = only(make_snapshot(workers=(slow,)), "slow_link")
    assert "1 of 40 MB in 10 s (0.1 MB/s), so it takes about 400 s; a step takes 1 s" in text


def test_a_transfer_that_keeps_up_with_the_steps_or_waits_to_be_verified_is_no_alarm() -> None:
    quick = make_worker(transfers=(coming(),))
    assert found_in(make_snapshot(workers=(quick,), steps={"actor": make_steps(every_s=20.0)})) == {}
    whole = make_worker(transfers=(coming(arrived_bytes=40_000_000, quiet_s=30.0),))
    assert found_in(make_snapshot(workers=(whole,))) == {}
    first = make_worker(transfers=(coming(),))
    assert found_in(make_snapshot(workers=(first,), steps={})) == {}


def test_a_scorer_that_hangs_is_told_from_one_that_is_always_slow() -> None:
    hangs = make_worker(num_scoring=12, scoring_s=6.0)
    text = only(make_snapshot(workers=(hangs,)), "scoring_hangs")
    assert (
        "12 of its 16 episodes wait for their score, the oldest for 6 s; scoring usually takes 0.01 s" in text
    )
    slow = {"actor": make_steps(**{"episode/score_s": 4.0})}
    assert found_in(make_snapshot(workers=(hangs,), steps=slow)) == {}
    few = make_worker(num_scoring=2, scoring_s=60.0)
    assert found_in(make_snapshot(workers=(few,))) == {}
    assert "scoring_hangs" in found_in(
        make_snapshot(workers=(make_worker(num_scoring=12, scoring_s=9.0),), steps={})
    )


def test_groups_that_fail_are_named_with_the_last_error() -> None:
    worker = msgspec.structs.replace(make_worker(), last_failure="RolloutError: the reward is nan")
    policy = make_policy_status(fates=FateCounts(drawn=48, trained=36, failed=4, live=8))
    text = only(make_snapshot(workers=(worker,), policy=policy), "failing_episodes")
    assert text == "actor: 4 of 40 groups failed; the last error: RolloutError: the reward is nan"
    one = make_policy_status(fates=FateCounts(drawn=45, trained=36, failed=1, live=8))
    assert found_in(make_snapshot(workers=(worker,), policy=one)) == {}


def test_a_trainer_without_a_batch_is_told_what_became_of_the_groups() -> None:
    ready = GroupOutcome(fate="ready", num=1)
    filtered = GroupOutcome(fate="filtered", by="zero_variance", num=40)
    policy = make_policy_status(outcomes=(ready, filtered), num_episodes=160, score_mean=0.0)
    text = only(make_snapshot(policy=policy, waits=(make_wait(6.0),)), "nothing_to_train")
    assert "had no batch for 6 s: 40 of 41 groups were filtered by zero_variance" in text
    assert "the mean score of 160 episodes is 0" in text
    failed = make_policy_status(outcomes=(GroupOutcome(fate="failed", num=40),))
    assert found_in(make_snapshot(policy=failed, waits=(make_wait(6.0),))) == {}
    half = (msgspec.structs.replace(ready, num=20), msgspec.structs.replace(filtered, num=20))
    mixed = make_policy_status(outcomes=half)
    assert found_in(make_snapshot(policy=mixed, waits=(make_wait(6.0),))) == {}
    assert found_in(make_snapshot(policy=policy, waits=(make_wait(2.0),))) == {}


def test_a_starved_table_is_named_once_its_wait_is_unusual_and_not_during_evaluation() -> None:
    idle = make_worker(tokens_per_s=0.0)
    text = only(make_snapshot(workers=(idle,), waits=(make_wait(11.0),)), "starved_table")
    assert (
        "has waited 11 s for step 10 (usually 0.2 s); 2 of 4 groups are ready, and 6 are in progress" in text
    )
    assert text.endswith("1 rollout service runs 16 episodes and generates 0 tokens/s")
    assert found_in(make_snapshot(waits=(make_wait(11.0),))) == {}  # tokens are generated
    assert "starved_table" in found_in(make_snapshot(waits=(make_wait(31.0),)))
    slow = {"actor": make_steps(batch_wait_s=9.0)}
    assert found_in(make_snapshot(workers=(idle,), waits=(make_wait(11.0),), steps=slow)) == {}
    evaluating = (make_wait(11.0), make_wait(11.0, who=Party(kind="eval", name="actor")))
    assert found_in(make_snapshot(workers=(idle,), waits=evaluating)) == {}
    assert found_in(make_snapshot(workers=(idle,), waits=(make_wait(50.0),), steps={})) == {}


def test_a_trainer_much_slower_than_the_pool_is_named_with_its_times() -> None:
    held = make_wait(1.0, WaitReason(kind="tickets", policy="actor", num=12), who=POOL, whom=TRAINER)
    idle = ScalingAdvice(rollout_wait_frac=0.9)
    text = only(make_snapshot(waits=(held,), scaling=idle), "slow_trainer")
    assert "90% of the rollout slots have been empty" in text
    assert text.endswith("a step takes 1 s, of which training takes 0.5 s")
    assert found_in(make_snapshot(waits=(held,), scaling=ScalingAdvice(rollout_wait_frac=0.6))) == {}
    last = make_policy_status(step=98)
    assert found_in(make_snapshot(waits=(held,), scaling=idle, policy=last)) == {}


def test_a_trainer_that_is_overdue_is_named() -> None:
    reason = WaitReason(kind="overdue", policy="actor", seconds=200.0, usual_s=2.0)
    wait = make_wait(20.0, reason, who=POOL, whom=TRAINER)
    assert "it is overdue: it has been silent" in only(make_snapshot(waits=(wait,)), "overdue_trainer")


@pytest.mark.parametrize("process", ["trainer-actor", "publisher-actor"])
@pytest.mark.parametrize("kind", ["overdue", "not_asking"])
def test_a_trainer_whose_process_is_stopped_is_not_also_overdue(
    process: str, kind: Literal["overdue", "not_asking"]
) -> None:
    wait = make_wait(20.0, WaitReason(kind=kind, policy="actor"), who=POOL, whom=TRAINER)
    stopped = ServiceState(process, state="running", silent_s=9.0, is_silent=True, trouble="it is stopped")
    only(make_snapshot(waits=(wait,), services=(stopped,)), "stopped_process")
    other = replace(stopped, name="trainer-verifier")
    assert set(found_in(make_snapshot(waits=(wait,), services=(other,)))) == {
        "stopped_process",
        "overdue_trainer",
    }
    anew = ServiceState(process, state="running", restarts=1, age_s=5.0)
    assert found_in(make_snapshot(waits=(wait,), services=(anew,))) == {}
    soon_named = ServiceState(process, state="running", silent_s=3.0, age_s=90.0)
    assert found_in(make_snapshot(waits=(wait,), services=(soon_named,))) == {}


def test_what_waits_for_a_stopped_process_is_not_named_beside_it() -> None:
    publisher = ServiceState("publisher-actor", state="running", is_silent=True, trouble="it is stopped")
    stuck = make_worker(transfers=(coming(quiet_s=9.0),))
    only(make_snapshot(workers=(stuck,), services=(publisher,)), "stopped_process")
    slow = make_worker(transfers=(coming(arrived_bytes=1_000_000),))
    only(make_snapshot(workers=(slow,), services=(publisher,)), "stopped_process")
    scorer = ServiceState("rollout-0", state="running", trouble="a process that it started is stopped")
    hangs = make_worker(num_scoring=12, scoring_s=6.0)
    only(make_snapshot(workers=(hangs,), services=(scorer,)), "stopped_process")


def test_a_service_much_slower_than_its_peers_is_named() -> None:
    pool = (make_worker("a"), make_worker("b"), make_worker("c", tokens_per_s=100.0))
    text = only(make_snapshot(workers=pool), "slow_service")
    assert text == "c generates 100 tokens/s; the median of its 2 peers is 1,500"
    mixed = (make_worker("a"), make_worker("b"), make_worker("c", tokens_per_s=300.0))
    assert found_in(make_snapshot(workers=mixed)) == {}
    waiting = (
        make_worker("a"),
        make_worker("b"),
        make_worker("c", tokens_per_s=0.0, waits_for=(WaitReason(kind="first_version", policy="actor"),)),
    )
    assert found_in(make_snapshot(workers=waiting)) == {}


def test_a_run_that_makes_no_step_for_long_is_named_with_its_waits() -> None:
    old = [msgspec.structs.replace(record, at_s=record.at_s - 130.0) for record in make_steps()]
    wait = make_wait(130.0, WaitReason(kind="not_attached", policy="actor"), who=RUN, whom=TRAINER)
    text = only(make_snapshot(steps={"actor": old}, waits=(wait,)), "no_progress")
    assert (
        "no step for 130 s (usually 1 s): run waits for trainer actor: it has not attached yet (for 130 s)"
        in text
    )


def test_the_pause_before_a_run_was_continued_is_no_lack_of_progress() -> None:
    old = [msgspec.structs.replace(record, at_s=record.at_s - 1500.0) for record in make_steps()]
    wait = make_wait(20.0, WaitReason(kind="not_attached", policy="actor"), who=RUN, whom=TRAINER)
    services = (ServiceState("trainer-actor", state="running", age_s=20.0),)
    assert found_in(make_snapshot(steps={"actor": old}, waits=(wait,), services=services)) == {}
    services = (ServiceState("trainer-actor", state="running", age_s=130.0),)
    text = only(make_snapshot(steps={"actor": old}, waits=(wait,), services=services), "no_progress")
    assert "no step for 130 s" in text


def test_rewards_that_never_differ_are_named_after_five_steps() -> None:
    none = {"num_gradient_tokens": 0.0}
    text = only(make_snapshot(steps={"actor": with_rewards([0.0] * 5, **none)}), "reward_constant")
    assert text == "actor: the mean reward was always 0 in all 5 steps, so there is nothing to learn"
    later = only(
        make_snapshot(steps={"actor": with_rewards([0.2, 0.1, *[0.0] * 6], **none)}), "reward_constant"
    )
    assert later.startswith("actor: the mean reward was always 0 in the last 6 steps")
    assert found_in(make_snapshot(steps={"actor": with_rewards([0.0] * 4, **none)})) == {}


def test_small_batches_whose_mean_reward_is_the_same_by_chance_are_not_named() -> None:
    some = {"num_gradient_tokens": 100.0}
    assert found_in(make_snapshot(steps={"actor": with_rewards([0.5] * 9, **some)})) == {}
    assert found_in(make_snapshot(steps={"actor": with_rewards([0.5] * 9)})) == {}
    assert list(found_in(make_snapshot(steps={"actor": with_rewards([0.0] * 20)}))) == ["reward_constant"]


def test_steps_without_a_gradient_are_named() -> None:
    text = only(make_snapshot(steps={"actor": make_steps(num_gradient_tokens=6.0)}), "no_gradient")
    assert "2.0% of the committed tokens had a gradient in the last 8 steps" in text
    assert found_in(make_snapshot(steps={"actor": make_steps(num_gradient_tokens=60.0)})) == {}


def test_trajectories_that_are_cut_off_are_named_unless_training_has_just_begun() -> None:
    cut = {"episode/truncated_frac": 0.7}
    assert found_in(make_snapshot(steps={"actor": make_steps(4, **cut)})) == {}
    assert "70% of the trajectories reached" in only(
        make_snapshot(steps={"actor": make_steps(**cut)}), "truncation"
    )


def test_calls_that_are_not_read_are_named_after_eight_episodes_or_a_step() -> None:
    policy = make_policy_status(num_episodes=8, unread_calls_frac=0.5)
    said = "actor: 50% of the turns look like a tool call, but no call was read from them"
    assert only(make_snapshot(policy=policy), "unread_calls") == said
    steps = {"actor": make_steps(**{"episode/turns": 4.0, "episode/unread_calls": 2.0})}
    assert only(make_snapshot(steps=steps), "unread_calls") == said
    assert found_in(make_snapshot(policy=msgspec.structs.replace(policy, num_episodes=7))) == {}
    few = {"actor": make_steps(**{"episode/turns": 4.0, "episode/unread_calls": 0.04})}
    assert (
        found_in(make_snapshot(policy=make_policy_status(num_episodes=8, unread_calls_frac=0.01), steps=few))
        == {}
    )


def test_an_entropy_that_collapsed_is_named_only_if_nothing_was_won_by_it() -> None:
    before, after = make_steps(20, entropy=0.5)[:10], make_steps(20, entropy=0.01)[10:]
    assert found_in(make_snapshot(steps={"actor": [*before, *after]})) == {}
    worse = [msgspec.structs.replace(record, reward_mean=0.05 + record.step * 1e-4) for record in after]
    text = only(make_snapshot(steps={"actor": [*before, *worse]}), "entropy_collapse")
    assert "the entropy fell from 0.5 to 0.01 nats per token" in text


def test_a_deep_model_that_always_rounded_as_much_raises_no_alarm_until_the_gap_grows() -> None:
    first, newest = make_steps(20, logprob_mismatch=0.04)[:10], make_steps(20, logprob_mismatch=0.14)[10:]
    assert found_in(make_snapshot(steps={"actor": [*first, *newest]})) == {}
    grown = make_steps(20, logprob_mismatch=0.17)[10:]
    assert "differ by 0.17 nats" in only(make_snapshot(steps={"actor": [*first, *grown]}), "logprob_gap")
    always = {"actor": make_steps(20, logprob_mismatch=0.21)}
    assert "differ by 0.21 nats" in only(make_snapshot(steps=always), "logprob_gap")


def test_logprobs_that_disagree_are_named_and_stale_ones_only_if_they_are_far_apart() -> None:
    fresh = {"actor": make_steps(logprob_mismatch=0.3)}
    assert "differ by 0.3 nats on average for tokens of the newest version" in only(
        make_snapshot(steps=fresh), "logprob_gap"
    )
    stale = {"actor": make_steps(behavior_gap=0.8)}
    assert "by at least 0.8 nats on average in each of the last 3 steps" in only(
        make_snapshot(steps=stale), "logprob_gap"
    )
    assert (
        found_in(make_snapshot(steps={"actor": make_steps(behavior_gap=0.05, logprob_mismatch=1e-3)})) == {}
    )


def test_the_memory_keeps_the_first_steps_and_the_newest() -> None:
    memory = StepMemory()
    for record in make_steps(100):
        memory.add(record)
    numbers = [record.step for record in memory.steps["actor"]]
    assert numbers[:5] == [0, 1, 2, 3, 4]
    assert numbers[5:] == list(range(68, 100))
    assert memory.steps["actor"][-1].at_s == NOW_S


def dated(snapshot: RunSnapshot) -> tuple[str, float]:
    """The subject of the only finding, and the seconds since its condition began; 0 if that is unknown."""
    (finding,) = [finding for rule in RULES for finding in rule.find(snapshot)]
    return finding.subject, NOW_S - finding.since_s if finding.since_s else 0.0


def test_process_alarms_name_their_subject_and_say_since_when() -> None:
    quiet = ServiceState("rollout-0", state="running", silent_s=9.0, is_silent=True, trouble="it is stopped")
    assert dated(make_snapshot(services=(quiet,))) == ("rollout-0", 9.0)
    unknown = ServiceState("rollout-0", state="running", silent_s=None, trouble="it is stopped")
    assert dated(make_snapshot(services=(unknown,))) == ("rollout-0", 0.0)
    starved = replace(quiet, is_starved=True)
    assert dated(make_snapshot(services=(starved,))) == ("rollout-0", 9.0)
    silent = make_wait(9.0, SILENT, who=RUN, whom=W0)
    pool = (make_worker("w0", unheard_s=9.0), make_worker("w1"))
    assert dated(make_snapshot(workers=pool, waits=(silent,))) == ("w0", 9.0)
    assert dated(make_snapshot(workers=pool[:1], waits=(silent,))) == ("rollout", 9.0)
    assert dated(make_snapshot(workers=())) == ("rollout", 0.0)
    assert dated(make_snapshot(status=None, unanswered_s=5.0)) == ("dataflow", 5.0)
    hung = LauncherState(pid=7, state="running", silent_s=40.0)
    assert dated(make_snapshot(launcher=hung)) == ("launcher", 40.0)
    assert dated(make_snapshot(disk=Disk("runs/x", 1000, checkpoint_bytes=0))) == ("disk", 0.0)


def test_flow_alarms_name_their_subject_and_say_since_when() -> None:
    held = make_wait(3.0, WaitReason(kind="batch_failed", policy="actor", step=3, num=2), whom=PERSON)
    assert dated(make_snapshot(waits=(held,))) == ("trainer actor", 3.0)
    stuck = make_worker(transfers=(coming(quiet_s=9.0),))
    assert dated(make_snapshot(workers=(stuck,))) == ("rollout-0", 10.0)
    slow = make_worker(transfers=(coming(arrived_bytes=1_000_000),))
    assert dated(make_snapshot(workers=(slow,))) == ("rollout-0", 10.0)
    hangs = make_worker(num_scoring=12, scoring_s=6.0)
    assert dated(make_snapshot(workers=(hangs,))) == ("rollout-0", 6.0)
    filtered = GroupOutcome(fate="filtered", by="zero_variance", num=40)
    useless = make_policy_status(outcomes=(filtered,), num_episodes=160)
    assert dated(make_snapshot(policy=useless, waits=(make_wait(6.0),))) == ("trainer actor", 6.0)
    idle = make_worker(tokens_per_s=0.0)
    assert dated(make_snapshot(workers=(idle,), waits=(make_wait(11.0),))) == ("trainer actor", 11.0)
    overdue = WaitReason(kind="overdue", policy="actor", seconds=200.0, usual_s=2.0)
    late = make_wait(20.0, overdue, who=POOL, whom=TRAINER)
    assert dated(make_snapshot(waits=(late,))) == ("trainer actor", 20.0)
    old = [msgspec.structs.replace(record, at_s=record.at_s - 130.0) for record in make_steps()]
    wait = make_wait(130.0, WaitReason(kind="not_attached", policy="actor"), who=RUN, whom=TRAINER)
    subject, since_s = dated(make_snapshot(steps={"actor": old}, waits=(wait,)))
    assert (subject, since_s) == ("policy actor", NOW_S - old[-1].at_s)


def test_learning_alarms_say_with_which_step_they_began() -> None:
    same = with_rewards([0.2, *[0.0] * 6], num_gradient_tokens=0.0)
    assert dated(make_snapshot(steps={"actor": same})) == ("policy actor", NOW_S - same[1].at_s)
    flat = make_steps(num_gradient_tokens=6.0)
    assert dated(make_snapshot(steps={"actor": flat})) == ("policy actor", NOW_S - flat[-8].at_s)
    cut = make_steps(**{"episode/truncated_frac": 0.7})
    assert dated(make_snapshot(steps={"actor": cut})) == ("policy actor", NOW_S - cut[-5].at_s)
    before, after = make_steps(20, entropy=0.5)[:10], make_steps(20, entropy=0.01)[10:]
    worse = [*before, *(msgspec.structs.replace(record, reward_mean=0.05) for record in after)]
    assert dated(make_snapshot(steps={"actor": worse})) == ("policy actor", NOW_S - worse[-5].at_s)
    apart = make_steps(behavior_gap=0.8)
    assert dated(make_snapshot(steps={"actor": apart})) == ("policy actor", NOW_S - apart[-1].at_s)


def test_an_entropy_is_judged_only_with_the_first_steps_and_enough_of_both() -> None:
    low, lower = make_steps(20, entropy=0.5), make_steps(20, entropy=0.01)
    fell = [msgspec.structs.replace(record, reward_mean=0.05) for record in [*low[:5], *lower[5:10]]]
    assert list(found_in(make_snapshot(steps={"actor": fell}))) == ["entropy_collapse"]
    assert found_in(make_snapshot(steps={"actor": [*fell[:4], *fell[5:]]})) == {}
    assert found_in(make_snapshot(steps={"actor": fell[1:]})) == {}
    later = [msgspec.structs.replace(record, step=record.step + 1) for record in fell]
    assert found_in(make_snapshot(steps={"actor": later})) == {}


def test_scoring_is_compared_with_the_slowest_policy_and_half_of_the_episodes_is_not_enough() -> None:
    quick, slow = make_steps(**{"episode/score_s": 0.01}), make_steps(**{"episode/score_s": 4.0})
    hangs = make_worker(num_scoring=12, scoring_s=39.0)
    assert found_in(make_snapshot(workers=(hangs,), steps={"actor": quick, "critic": slow})) == {}
    half = make_worker(num_scoring=8, scoring_s=60.0)
    assert found_in(make_snapshot(workers=(half,))) == {}
    more = make_worker(num_scoring=9, scoring_s=60.0)
    assert list(found_in(make_snapshot(workers=(more,)))) == ["scoring_hangs"]


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"clip_frac": 1.0}, "cut off nearly every token"),
        ({"masked_frac": 0.995, "clip_frac": 0.1}, "cut off nearly every token"),
        ({"unbounded_frac": 0.75, "behavior_gap": 0.2}, "was infinite in most minibatches"),
    ],
)
def test_a_bound_that_cuts_everything_or_nothing_is_named(metrics: dict[str, float], text: str) -> None:
    assert text in only(make_snapshot(steps={"actor": make_steps(**metrics)}), "bad_bound")


@pytest.mark.parametrize(
    "metrics",
    [
        {"unbounded_frac": 1.0, "behavior_gap": 0.01},  # fresh data needs no bound
        {"unbounded_frac": 0.0, "behavior_gap": 0.3, "clip_frac": 0.4},
        {"clip_frac": 0.2, "masked_frac": 0.9},
    ],
)
def test_a_bound_that_works_raises_no_alarm(metrics: dict[str, float]) -> None:
    assert found_in(make_snapshot(steps={"actor": make_steps(**metrics)})) == {}
