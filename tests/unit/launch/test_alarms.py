"""What a person is warned about while a run goes on."""

from astraflow.launch.alarms import Alarms, reward_alarm
from astraflow.types import FateCounts, Load, PolicyStatus, StatusReply, StepRecord, WorkerStatus


def make_step(step: int, reward: float) -> StepRecord:
    return StepRecord(
        policy="actor", step=step, version=step + 1, at_s=1.0, reward_mean=reward, staleness_mean=0.0,
        staleness_max=0, num_groups=1, num_samples=2, num_trained_tokens=3, num_discarded_groups=0,
        metrics=(),
    )  # fmt: skip


def make_status(*, failed: int, trained: int = 0, last_failure: str = "") -> StatusReply:
    fates = FateCounts(drawn=failed + trained + 8, failed=failed, trained=trained, live=8)
    policy = PolicyStatus(
        name="actor", step=0, num_steps=9, newest_version=0, durable_step=0, epoch=1, num_tickets=8,
        max_tickets=8, num_running_groups=8, num_ready_groups=0, groups_per_batch=4, staleness_bound=2,
        redone_steps=0, fates=fates,
    )  # fmt: skip
    worker = WorkerStatus(
        id="w", name="rollout-0", engine="torch", hosts=("actor",), num_leases=1, load=Load(),
        last_seen_s=1.0, last_failure=last_failure,
    )  # fmt: skip
    return StatusReply(
        name="n", state="running", reason="", now_s=1.0, policies=(policy,), workers=(worker,), waits=()
    )


def test_a_reward_that_is_always_0_is_named_once_after_five_steps() -> None:
    alarms = Alarms()
    told = [alarms.after_step(make_step(step, 0.0)) for step in range(7)]
    assert [len(texts) for texts in told] == [0, 0, 0, 0, 1, 0, 0]
    assert told[4][0].startswith("actor: the mean reward was always 0, in all 5 steps, so there is nothing")


def test_one_other_reward_is_enough_to_learn_from() -> None:
    alarms = Alarms()
    rewards = [0.0, 0.0, 0.1, 0.0, 0.0, 0.0]
    assert all(not alarms.after_step(make_step(step, reward)) for step, reward in enumerate(rewards))


def test_failed_groups_are_named_with_the_last_error_and_again_at_ten_times_as_many() -> None:
    alarms = Alarms()
    assert alarms.after_status(make_status(failed=0)) == ()
    (first,) = alarms.after_status(make_status(failed=2, trained=6, last_failure="ValueError: no key"))
    assert first == "actor: 2 of 8 groups failed; the last error: ValueError: no key"
    assert alarms.after_status(make_status(failed=19)) == ()
    assert alarms.after_status(make_status(failed=20)) == ("actor: 20 of 20 groups failed",)


def test_without_a_step_there_is_no_word_about_rewards() -> None:
    assert reward_alarm("actor", 0.0, 0.0, 0) == ""
    assert "always 1, in the only step" in reward_alarm("actor", 1.0, 1.0, 1)
