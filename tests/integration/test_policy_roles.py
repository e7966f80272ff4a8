"""Policies without a trainer: a frozen one keeps its version, a follower serves older ones of another."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.audit import audit
from astraflow.errors import RefusedError
from astraflow.rollout.policy_host import PolicyHost
from astraflow.types import Manifest, PolicyInfo, Publication, Sampling, VersionsReply
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.weights.arrival import Arrival
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, make_plan, make_tensor_manifest, running
from drivers.rollout_fakes import CharRenderer, ScriptedEngine, make_empty_manifest


class Shelf:
    """Announces versions 0 to `newest` of one policy; keeps those from `oldest` on."""

    def __init__(self) -> None:
        self.newest, self.oldest = -1, 0
        self.published = asyncio.Condition()
        self.num_polls = 0

    async def publish(self, newest: int) -> None:
        async with self.published:
            self.newest = newest
            self.published.notify_all()

    async def versions(self, policy: str, *, after: int, wait_s: float = 25.0) -> VersionsReply:
        assert policy == "solver"
        self.num_polls += 1
        async with self.published:
            if wait_s:
                await self.published.wait_for(lambda: self.newest > after)
            kept = range(max(after + 1, self.oldest), self.newest + 1)
            manifests = tuple(make_empty_manifest("solver", version) for version in kept)
            return VersionsReply(newest=self.newest, manifests=manifests, pinned=(), state="running")


class Weights:
    """Fetches at once; raises what it is told to."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    async def fetch(self, manifest: Manifest) -> WeightSnapshot:
        if self.errors:
            raise self.errors.pop()
        return WeightSnapshot("solver", manifest.version, (), Path())

    def arrival(self, policy: str) -> Arrival:
        return Arrival()


async def test_a_follower_serves_the_version_that_many_behind() -> None:
    shelf, weights, changed = Shelf(), Weights(), asyncio.Event()
    engine = ScriptedEngine()
    info = PolicyInfo(name="past", is_trained=False, sampling=Sampling(), max_lag=1, follows="solver", lag=3)
    link: Any = shelf
    host = PolicyHost(
        info,
        link=link,
        weights=weights,
        make_engine=lambda _: engine,
        make_renderer=lambda *_: CharRenderer(),
        changed=changed.set,
    )
    following = asyncio.create_task(host.follow())
    seen: list[int] = []
    for newest in (0, 1, 4, 9):
        changed.clear()
        if newest == 9:
            weights.errors.append(OSError("the link is down"))
        await shelf.publish(newest)
        async with asyncio.timeout(10):
            while host.live_version != max(0, newest - 3):
                await changed.wait()
                changed.clear()
        seen.append(host.live_version)
    assert seen == [0, 0, 1, 6]
    assert host.served_versions.versions == (6,)
    await asyncio.sleep(0.3)
    assert shelf.num_polls < 20  # it waits, it does not ask again and again
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_followed_versions_are_kept_as_long_as_a_follower_needs_them(tmp_path: Path) -> None:
    for lag, oldest in ((0, 3), (4, 0)):
        plan = make_plan(num_steps=10)
        policies = {"actor": replace(plan.policies["actor"], follower_lag=lag)}
        async with running(tmp_path / str(lag), replace(plan, policies=policies)) as run:
            trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
            await trainer.attach()
            await worker.register()
            for step in range(5):
                for lease in await worker.lease(8):
                    await worker.send(await worker.answer(lease))
                await trainer.train_step(step)
            reply = await run.client.versions("actor", after=-1, wait_s=0.0)
        assert [m.version for m in reply.manifests if not m.files] == list(range(oldest, 6))


async def test_a_frozen_policy_has_one_version_and_no_table(tmp_path: Path) -> None:
    plan = replace(make_plan(), frozen=("teacher",))
    manifest = make_tensor_manifest("teacher", 0)
    async with running(tmp_path, plan, frozen=("teacher",)) as run:
        assert (await run.client.versions("teacher", after=-1, wait_s=0.0)).newest == -1
        waiting = asyncio.create_task(run.client.versions("teacher", after=-1, wait_s=20.0))
        await run.client.publish("teacher", Publication(epoch=0, step=0, manifest=manifest))
        assert (await waiting).manifests == (manifest,)
        await run.client.publish("teacher", Publication(epoch=0, step=0, manifest=manifest))
        assert (await run.client.versions("teacher", after=0, wait_s=0.0)).manifests == ()
        newer = make_tensor_manifest("teacher", 1)
        with pytest.raises(RefusedError, match="version 0 only"):
            await run.client.publish("teacher", Publication(epoch=0, step=0, manifest=newer))
        status = await run.client.status()
        assert [policy.name for policy in status.policies] == ["actor"]
    async with running(tmp_path, plan, frozen=("teacher",)) as run:
        assert (await run.client.versions("teacher", after=-1, wait_s=0.0)).manifests == (manifest,)
    assert audit(tmp_path).ok
