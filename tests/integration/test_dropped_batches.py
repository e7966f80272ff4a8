"""A batch that cannot be trained is dropped by the command, of a live run and of one that stopped."""

import asyncio
from pathlib import Path

import pytest

from astraflow.dataflow.audit import audit
from astraflow.dataflow.core.plan import RunPlan
from astraflow.errors import FencedError, TrainingError
from astraflow.protocols import StepResult
from astraflow.recipe.run_folder import RunFolder, RunRecord
from astraflow.recipe.run_plan import run_plan
from astraflow.trainer.checkpoint import CheckpointStore
from astraflow.trainer.loop import Trainer, TrainerSettings
from astraflow.types import Batch, DropRequest, Fingerprints, StepFailure, Wait
from astraflow.types.waits import PERSON, Party
from drivers.dataflow_driver import (
    Run,
    ScriptedTrainer,
    ScriptedWorker,
    kept,
    make_plan,
    play_run,
    refused,
    running,
)
from drivers.recipe_builders import make_digit_recipe
from drivers.system_driver import astraflow
from drivers.trainer_fakes import CountingLearner, MemoryPublisher


async def taken(run: Run) -> ScriptedTrainer:
    """A trainer that holds the batch of step 0."""
    trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
    await trainer.attach()
    await worker.register()
    await worker.send(*[await worker.answer(lease) for lease in await worker.lease(100)])
    assert await run.client.batch("actor", 0, epoch=trainer.session.epoch) is not None
    return trainer


async def test_a_run_goes_on_with_another_batch_and_its_audit_holds(tmp_path: Path) -> None:
    plan = make_plan(num_steps=4)
    async with running(tmp_path, plan, http=True) as run:
        trainer = await taken(run)
        done = await asyncio.to_thread(astraflow, "drop-batch", run.url, "actor", "--reason", "too long")
        assert done.returncode == 0, done.stderr
        assert "the batch of step 1 is dropped (4 groups are evicted)" in done.stdout
        error = await refused(trainer.commit(0))
        assert isinstance(error, FencedError)
        before = await run.client.status()
    async with running(tmp_path, plan, snapshot_every=3) as run:
        after = await run.client.status()
        assert kept(after.policies) == kept(before.policies)
        assert after.policies[0].fates.evicted == 4
        await play_run(run)
    report = audit(tmp_path)
    assert report.problems == ()
    (policy,) = report.policies
    assert (policy.dropped_batches, policy.steps, policy.fates.evicted, policy.fates.trained) == (1, 4, 4, 16)


async def test_only_the_newest_session_is_named_and_only_once(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        trainer = await taken(run)
        request = DropRequest(step=0, epoch=trainer.session.epoch)
        await run.client.drop_batch("actor", request)
        assert isinstance(await refused(run.client.drop_batch("actor", request)), FencedError)


class Picky(CountingLearner):
    """It cannot train batches with a group below `first_good`."""

    first_good = 4

    def train_step(self, batch: Batch) -> StepResult:
        if any(sample.group_id < self.first_good for sample in batch.samples):
            raise TrainingError("the loss of 3 tokens is not finite, in group 0/episode 1")
        return super().train_step(batch)


async def supervised(run: Run, folder: Path) -> int:
    """A trainer that is started again when it ends with an error, as its supervisor would do. Returns: how
    often it ended so."""
    (folder / "config.json").write_text("{}")
    num_ended = 0
    while True:
        plan = TrainerSettings(
            policy="actor",
            trainer_id="me",
            checkpoint_every=1,
            files={"config.json": folder / "config.json"},
            fingerprints=Fingerprints(recipe="r1"),
        )
        trainer = Trainer(
            plan,
            learner=Picky(),
            link=run.client,
            publisher=MemoryPublisher(),
            checkpoints=CheckpointStore(folder / "checkpoints", policy="actor", keep=2),
        )
        try:
            await trainer.run(asyncio.Event())
        except (TrainingError, FencedError):
            num_ended += 1
        else:
            return num_ended


async def held_back(run: Run) -> Wait:
    """The wait for a person, once there is one."""
    async with asyncio.timeout(20):
        while True:
            for wait in (await run.client.status()).waits:
                if wait.whom == PERSON:
                    return wait
            await asyncio.sleep(0.02)


async def test_a_batch_that_fails_twice_is_held_back_until_it_is_dropped_and_other_policies_go_on(
    tmp_path: Path,
) -> None:
    plan = make_plan(policies=("actor", "critic"), num_steps=3)
    both = ("actor", "critic")
    async with running(tmp_path / "journal", plan, http=True) as run, asyncio.TaskGroup() as tasks:
        training = tasks.create_task(supervised(run, tmp_path))
        other = tasks.create_task(ScriptedTrainer(run.client, "critic").run())
        for name in ("w0", "w1"):
            tasks.create_task(ScriptedWorker(run.client, name, both).run())
        wait = await held_back(run)
        assert wait.who == Party(kind="trainer", name="actor")
        (reason,) = wait.reasons
        assert (reason.kind, reason.step, reason.num) == ("batch_failed", 0, 2)
        assert "TrainingError" in reason.detail
        async with asyncio.timeout(20):
            await other
        assert not training.done()
        status = {policy.name: policy for policy in (await run.client.status()).policies}
        assert (status["actor"].step, status["critic"].step) == (0, 3)
        done = await asyncio.to_thread(astraflow, "drop-batch", run.url, "actor", "--reason", "poisoned")
        assert done.returncode == 0, done.stderr
        async with asyncio.timeout(20):
            num_ended = await training
        assert num_ended == 3  # two failures, and the session that the drop ended
        assert not any(w.whom == PERSON for w in (await run.client.status()).waits)
    report = audit(tmp_path / "journal")
    assert report.problems == ()
    actor = next(policy for policy in report.policies if policy.name == "actor")
    assert (actor.steps, actor.dropped_batches) == (3, 1)


async def test_only_the_newest_session_can_say_that_a_step_failed(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        trainer = await taken(run)
        old = trainer.session.epoch
        await trainer.attach()
        failure = StepFailure(step=0, epoch=old, reason="TrainingError: too late")
        assert isinstance(await refused(run.client.step_failed("actor", failure)), FencedError)


async def test_a_step_that_succeeds_after_a_failure_is_forgotten(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        trainer = await taken(run)
        for _ in range(3):
            failure = StepFailure(step=0, epoch=trainer.session.epoch, reason="out of memory")
            await run.client.step_failed("actor", failure)
        assert [wait.whom for wait in (await run.client.status()).waits].count(PERSON) == 1
        await trainer.commit(0)  # it held the batch, and found a way
        assert PERSON not in [wait.whom for wait in (await run.client.status()).waits]


def make_folder(path: Path) -> tuple[RunFolder, RunPlan]:
    """The folder of a run that stopped; nobody listens at its address."""
    model = path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 64}')
    recipe = make_digit_recipe(path, model)
    folder = RunFolder(path / "run")
    folder.create()
    folder.save_recipe(recipe)
    folder.save_record(RunRecord(name="digits", state="stopped", url="http://127.0.0.1:9"))
    return folder, run_plan(recipe, {"sums": 64})


@pytest.mark.timeout(180)
async def test_the_folder_of_a_run_that_stopped_can_be_mended(tmp_path: Path) -> None:
    folder, plan = make_folder(tmp_path)
    async with running(folder.journal, plan) as run:
        await taken(run)
    command = ("drop-batch", str(folder.path), "actor")

    async def asked(*arguments: str) -> tuple[int, str]:
        done = await asyncio.to_thread(astraflow, *command, *arguments)
        return done.returncode, done.stdout + done.stderr

    code, said = await asked("--step", "2")
    assert (code, "only that of the oldest step that is not committed (step 1)" in said) == (1, True), said
    code, said = await asked()
    assert (code, "`astraflow run` with the same recipe continues the run, with other groups" in said) == (
        0,
        True,
    ), said
    code, said = await asked()
    assert (code, "(none now)" in said) == (1, True), said
    async with running(folder.journal, plan) as run:
        await play_run(run)
    report = audit(folder.journal)
    assert report.problems == ()
    assert (report.policies[0].dropped_batches, report.policies[0].steps) == (1, 3)


@pytest.mark.timeout(60)
async def test_a_policy_without_a_trainer_is_named(tmp_path: Path) -> None:
    async with running(tmp_path, http=True) as run:
        done = await asyncio.to_thread(astraflow, "drop-batch", run.url, "critic")
    assert (done.returncode, "'critic' has no trainer (choices: actor)" in done.stderr) == (2, True)
