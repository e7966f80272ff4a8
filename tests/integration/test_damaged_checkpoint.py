"""A damaged checkpoint with the real trainer loop, dataflow and journal together."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from astraflow.dataflow.audit import audit
from astraflow.trainer.checkpoint import CheckpointStore
from astraflow.trainer.loop import Trainer, TrainerSettings
from astraflow.types import Manifest
from astraflow.types.host_tensors import HostTensor
from drivers.dataflow_driver import Run, ScriptedWorker, make_plan, make_tensor_manifest, running
from drivers.trainer_fakes import CountingLearner, MemoryPublisher


class Publishing(MemoryPublisher):
    """Its manifests are of a model with an embedding table, as the dataflow expects."""

    async def publish(
        self, policy: str, version: int, tensors: Sequence[HostTensor], files: Mapping[str, Path]
    ) -> Manifest:
        await super().publish(policy, version, tensors, files)
        return make_tensor_manifest(policy, version)


async def trained(run: Run, folder: Path, backend: CountingLearner, *, kill_at: int = -1) -> None:
    """A trainer from its newest checkpoint to the end of the run, or until it has published a version."""
    publisher = Publishing()
    trainer = Trainer(
        TrainerSettings(policy="actor", trainer_id="me", checkpoint_every=2, files={}),
        learner=backend,
        link=run.client,
        publisher=publisher,
        checkpoints=CheckpointStore(folder, policy="actor", keep=2),
    )
    work = asyncio.create_task(trainer.run(asyncio.Event()))
    async with asyncio.timeout(30.0):
        if kill_at < 0:
            await work
            return
        while await publisher.asked.get() != kill_at:
            pass
    work.cancel()
    await asyncio.wait({work})


async def test_after_a_flipped_bit_in_the_newest_checkpoint_its_steps_are_redone_and_the_audit_holds(
    tmp_path: Path,
) -> None:
    journal, checkpoints = tmp_path / "journal", tmp_path / "checkpoints"
    first, second = CountingLearner(), CountingLearner()
    async with running(journal, make_plan(num_steps=8)) as run:
        worker = asyncio.create_task(ScriptedWorker(run.client).run())
        await trained(run, checkpoints, first, kill_at=5)
        weight = checkpoints / "step-00000004" / "weight"
        weight.write_bytes(bytes([weight.read_bytes()[0] ^ 1]) + weight.read_bytes()[1:])
        await trained(run, checkpoints, second)
        async with asyncio.timeout(10.0):
            await worker
        (policy,) = (await run.client.status()).policies
        reason = (await run.client.status()).reason
    assert reason == "all steps are done"
    assert (checkpoints / "damaged-step-00000004").is_dir()
    assert second.trained == [2, 3, 4, 5, 6, 7]
    assert first.trained[:5] == [0, 1, 2, 3, 4]
    assert policy.redone_steps >= 2
    report = audit(journal)
    assert report.problems == ()
    assert report.policies[0].redone_steps == policy.redone_steps
