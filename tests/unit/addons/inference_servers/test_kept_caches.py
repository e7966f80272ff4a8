"""`astraflow audit` says how many tokens were sampled with a KV cache from before an update."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from astraflow.addons.inference_servers.kept_caches import audit_kept_caches
from astraflow.types import Episode, EpisodeResult, Lease, Stream
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, make_plan, running


class KeepingWorker(ScriptedWorker):
    """A service whose engine kept its cache: each last token has the old one, and so has the prompt."""

    async def answer(self, lease: Lease) -> EpisodeResult:
        result = await super().answer(lease)
        assert isinstance(result.outcome, Episode)
        (trajectory,) = result.outcome.trajectories
        is_kept = np.ones(len(trajectory.mask), np.uint8)
        is_kept[3:-1] = 0
        stream = Stream(name="kept_kv", dtype="uint8", data=is_kept.tobytes())
        kept = msgspec.structs.replace(trajectory, streams=(stream,))
        outcome = msgspec.structs.replace(result.outcome, trajectories=(kept,))
        return msgspec.structs.replace(result, outcome=outcome)


async def play(folder: Path, on_update: str, snapshot_every: int) -> None:
    """Two steps of four groups of two."""
    recipe = f'{{"rollout": {{"engine": {{"name": "vllm", "on_update": "{on_update}"}}}}}}'
    plan = make_plan(num_steps=2)
    async with running(folder / "journal", plan, recipe=recipe, snapshot_every=snapshot_every) as run:
        trainer = ScriptedTrainer(run.client)
        await trainer.attach()
        worker = KeepingWorker(run.client)
        await worker.register()
        for step in range(2):
            for lease in await worker.lease(8):
                await worker.send(await worker.answer(lease))
            assert await trainer.train_step(step)


@pytest.mark.parametrize("snapshot_every", [20_000, 5])
async def test_the_audit_counts_sampled_tokens_in_batches(tmp_path: Path, snapshot_every: int) -> None:
    await play(tmp_path, "keep", snapshot_every)
    lines, problems = audit_kept_caches(tmp_path)
    num_sampled = sum(2 * (2 + group % 5) for group in range(8))
    assert lines == [f"KV caches kept over updates, actor: 16 of {num_sampled} sampled tokens in batches"]
    assert not problems


async def test_a_run_that_computes_its_caches_again_has_no_such_line(tmp_path: Path) -> None:
    await play(tmp_path, "recompute", 20_000)
    assert audit_kept_caches(tmp_path) == ((), ())


def test_a_damaged_journal_is_left_to_the_audit(tmp_path: Path) -> None:
    assert audit_kept_caches(tmp_path) == ((), ())
