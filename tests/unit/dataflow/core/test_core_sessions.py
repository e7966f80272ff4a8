"""Trainers that attach, publish, commit, release, die and come back."""

import pytest

from astraflow.dataflow.core.commands import CommitStep, PublishVersion, StepRedone, VersionPublished
from astraflow.dataflow.core.plan import EvalSetPlan
from astraflow.errors import FencedError, RefusedError
from drivers.core_driver import Driver, make_chunk_manifest, make_core_plan, make_table


def started(**plan: object) -> Driver:
    """A run whose version 0 is published, with service w0."""
    driver = Driver(make_core_plan(**plan))  # type: ignore[arg-type]
    driver.start()
    return driver


def refused_code(action: object, *args: object, **kwargs: object) -> str:
    """The code of the refusal that the action meets."""
    with pytest.raises(RefusedError) as refused:
        action(*args, **kwargs)  # type: ignore[operator]
    return refused.value.code


def test_the_first_session_publishes_version_0_and_takes_step_0():
    driver = Driver(make_core_plan())
    session = driver.attach()
    assert (session.epoch, session.step, session.next_version, session.num_steps) == (1, 0, 0, 4)


def test_a_version_must_be_the_next_number():
    driver = started()
    assert refused_code(driver.publish, 1, version=5) == "wrong_version"
    assert driver.status().newest_version == 0


def test_a_version_must_hold_the_steps_that_the_session_has_done():
    driver = started()
    driver.finish_groups(2)
    driver.take(0)
    assert refused_code(driver.publish, 2) == "wrong_step"
    assert refused_code(driver.publish, 0) == "wrong_step"


def test_a_version_of_a_step_without_a_batch_is_refused():
    driver = started()
    assert refused_code(driver.publish, 1) == "out_of_order"


def test_a_manifest_of_another_policy_is_refused():
    driver = started()
    command = PublishVersion(policy="actor", epoch=1, step=1, manifest=make_chunk_manifest("critic", 1))
    assert refused_code(driver.apply, command) == "wrong_policy"


def test_publishing_the_newest_manifest_again_changes_nothing():
    driver = started()
    command = PublishVersion(
        policy="actor", epoch=1, step=0, manifest=make_chunk_manifest("actor", 0, has_files=True)
    )
    decision = driver.apply(command)
    assert decision.events == ()
    assert decision.answer.needed == (0,)


def test_publishing_other_contents_under_the_newest_number_is_refused():
    driver = started()
    assert refused_code(driver.publish, 0, version=0) == "wrong_version"


def test_a_new_session_fences_the_old_one():
    driver = started()
    driver.attach()
    with pytest.raises(FencedError):
        driver.apply(
            PublishVersion(policy="actor", epoch=1, step=1, manifest=make_chunk_manifest("actor", 1))
        )
    with pytest.raises(FencedError):
        driver.apply(CommitStep(policy="actor", epoch=1, step=0, version=1, metrics=()))


def test_a_step_is_committed_only_when_its_version_is_published():
    driver = started()
    driver.finish_groups(2)
    driver.take(0)
    assert refused_code(driver.commit, 0) == "unpublished"
    assert refused_code(driver.commit, 0, version=1) == "unpublished"
    driver.publish(1)
    assert refused_code(driver.commit, 0, version=0) == "unpublished"
    driver.commit(0)
    assert driver.status().step == 1


def test_committing_the_same_step_again_changes_nothing():
    driver = started()
    driver.run_step()
    driver.commit(0)
    assert driver.last.events == ()
    assert len(driver.core.steps("actor")) == 1


def test_steps_are_committed_in_order():
    driver = started()
    driver.run_step()
    assert refused_code(driver.commit, 2) == "out_of_order"
    assert refused_code(driver.commit, 1) == "out_of_order"


# --- restarts -------------------------------------------------------------------------------------


def test_a_restarted_trainer_gets_the_same_batches_for_the_steps_after_its_checkpoint():
    driver = started(table=make_table(max_staleness=3))
    driver.run_step()
    driver.release(1)
    originals = [driver.run_step(), driver.run_step()]
    session = driver.attach(durable_step=1)
    assert (session.epoch, session.step, session.next_version) == (2, 1, 4)
    driver.publish(1)
    for step, original in zip((1, 2), originals, strict=True):
        again = driver.take(step)
        assert again is not None
        assert (again.samples, again.totals, again.staleness_max) == (
            original.samples,
            original.totals,
            original.staleness_max,
        )
        assert again.is_redo
        driver.publish(step + 1)
        driver.commit(step)
        assert driver.last.events == (StepRedone(policy="actor", step=step, version=step + 4),)
    assert driver.status().redone_steps == 2
    assert driver.fates().trained == 6
    assert len(driver.core.steps("actor")) == 3


def test_a_batch_that_was_taken_and_not_committed_is_served_to_the_next_session():
    driver = started()
    driver.finish_groups(2)
    original = driver.take(0)
    driver.attach()
    driver.publish(0)
    assert driver.take(0) == original
    driver.publish(1)
    driver.commit(0)
    assert driver.fates().trained == 2


def test_a_session_takes_nothing_before_its_base_version_is_published():
    driver = started(table=make_table(max_staleness=2))
    driver.finish_groups(2)
    driver.attach()
    assert driver.take(0) is None
    driver.publish(0)
    assert "batch/actor" in driver.last.wakes
    assert driver.take(0) is not None


def test_groups_that_a_restart_made_too_old_are_swept_with_fifo_too():
    driver = started(table=make_table(max_staleness=0))
    driver.finish_groups(2)
    driver.attach()
    driver.publish(0)
    assert driver.take(0) is None
    assert driver.fates().stale == 2
    driver.finish_groups(2)
    batch = driver.take(0)
    assert batch is not None
    assert (batch.trainer_version, batch.staleness_max) == (1, 0)


def test_while_steps_are_repeated_no_group_is_drawn_that_would_be_too_old_at_its_take():
    driver = started(table=make_table(max_staleness=1), num_steps=8)
    for _ in range(4):
        driver.run_step()
    driver.attach(durable_step=0)
    driver.publish(0)
    assert driver.lease(1) == ()
    assert [reason.kind for reason in driver.core.why_no_lease(driver.served())] == ["repeats_steps"]
    for step in range(3):
        driver.take(step)
        driver.publish(step + 1)
        driver.commit(step)
    assert len(driver.lease(1)) == 1


def test_starting_over_without_a_checkpoint_works_while_all_batches_are_there():
    driver = started()
    driver.run_step()
    assert driver.attach(durable_step=0).step == 0
    driver.publish(0)
    assert driver.take(0) is not None


def test_starting_over_after_a_release_is_refused_with_the_remedy():
    driver = started()
    driver.run_step()
    driver.release(1)
    with pytest.raises(RefusedError, match="at least 1 steps") as refused:
        driver.attach(durable_step=0)
    assert refused.value.code == "batches_released"
    assert driver.status().epoch == 1


def test_a_checkpoint_that_is_ahead_of_the_run_is_refused():
    driver = started()
    assert refused_code(driver.attach, durable_step=1) == "checkpoint_ahead"


def test_a_released_step_is_not_served_again_and_only_committed_steps_are_released():
    driver = started()
    driver.run_step()
    assert refused_code(driver.release, 2) == "out_of_order"
    driver.release(1)
    assert driver.status().durable_step == 1
    assert refused_code(driver.take, 0) == "released"


def test_the_version_that_begins_a_session_must_be_full():
    driver = started()
    driver.run_step()
    driver.attach(durable_step=1)
    assert refused_code(driver.publish, 1, kind="delta", base=1) == "not_full"
    driver.publish(1)
    events = [e for e in driver.events if isinstance(e, VersionPublished)]
    assert [(e.version, e.step, e.epoch) for e in events] == [(0, 0, 1), (1, 1, 1), (2, 1, 2)]


# --- versions that someone needs ------------------------------------------------------------------


def train(driver: Driver, step: int, **manifest: object) -> tuple[int, ...]:
    """One step; the versions that are needed after its publication."""
    driver.finish_groups(2)
    driver.take(step)
    reply = driver.publish(step + 1, **manifest)
    driver.commit(step)
    return reply.needed


def test_versions_within_reach_and_the_one_with_the_models_files_are_needed():
    driver = started(table=make_table(engine_lag=1))
    assert [train(driver, step) for step in range(4)][-1] == (0, 2, 3, 4)
    reply = driver.core.versions("actor", after=2)
    assert [manifest.version for manifest in reply.manifests] == [3, 4]
    assert reply.newest == 4


def test_the_bases_of_needed_deltas_are_needed():
    driver = started(num_steps=8)
    needed = [train(driver, step, kind="delta", base=step) for step in range(4)]
    assert needed[-1] == (0, 1, 2, 3, 4)
    assert train(driver, 4) == (0, 1, 2, 3, 4, 5)
    assert train(driver, 5) == (0, 5, 6)


def test_a_delta_to_a_forgotten_version_is_refused():
    driver = started(num_steps=8)
    for step in range(4):
        train(driver, step)
    driver.finish_groups(2)
    driver.take(4)
    assert refused_code(driver.publish, 5, kind="delta", base=1) == "unknown_base"


def test_versions_pinned_by_evaluation_are_needed():
    sets = {"heldout": EvalSetPlan(num_tasks=1, samples=1)}
    driver = started(eval_sets=sets, eval_every=2, num_steps=8)
    driver.lease(1)  # the round of version 0, which stays open
    train(driver, 0)
    train(driver, 1)
    driver.lease(1)  # that of version 2
    train(driver, 2)
    assert train(driver, 3) == (0, 2, 3, 4)
    assert driver.core.versions("actor").pinned == (0, 2, 4)
