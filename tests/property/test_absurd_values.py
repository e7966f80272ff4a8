"""Absurd and nearly right values in every field of every item on every route end nothing.

The values are made from the items' types, so that a new field or route is covered by itself. A real dataflow
with a real journal takes them: no status of 500, nothing holds up the event loop, what is refused changes
nothing; afterwards the run goes on, its journal opens again, and its audit holds.
"""

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from astraflow import wire
from astraflow.dataflow.api import ROUTES, Route
from astraflow.dataflow.audit import audit
from astraflow.dataflow.config import DataflowConfig
from astraflow.service.client import MemoryTransport
from astraflow.service.server import TokenAuth
from astraflow.types import DropRequest, ErrorReply
from drivers.absurd_driver import NAMES, NUMBERS, bodies
from drivers.dataflow_driver import (
    Run,
    ScriptedTrainer,
    ScriptedWorker,
    make_plan,
    make_trajectory,
    running,
)

TOKENS = {f"{role}-token": role for role in ("worker", "trainer", "viewer", "admin")}
MAX_BLOCK_S = 1.0
"""Longest block of the event loop, in CPU time, because a busy machine is not the dataflow's fault."""
PLAN = dataclasses.replace(
    make_plan(num_steps=4, group_size=2, groups_per_batch=2, eval_tasks=2, max_attempts=1000),
    frozen=("judge",),
)


class Arena:
    """A run under fire, and what it is asked with."""

    def __init__(self, run: Run, trainer: ScriptedTrainer, worker: ScriptedWorker) -> None:
        self.run, self.trainer, self.worker = run, trainer, worker
        self.transport = MemoryTransport(TokenAuth(run.service.app, TOKENS))
        self.num_sent = self.num_accepted = 0

    async def known(self, route: Route) -> dict[str, Any]:
        """What fits the run as it is now, so that one changed field stands among sound ones."""
        await self.trainer.attach()
        if route.name == "commit":
            step = self.trainer.session.step
            await batch_taken(self.trainer, self.worker, step)
            await self.trainer.publish(self.trainer.version + 1, step + 1)
        step = self.trainer.session.step
        if route.name in {"drop_batch", "step_failed"}:  # of the oldest step that is not committed
            step = (await self.run.client.status()).policies[0].step
            await batch_taken(self.trainer, self.worker, step)
        sample = make_trajectory()
        known: dict[str, Any] = {
            "policy": "actor", "role": "actor", "hosts": ["actor"], "kind": "full", "protocol": 1,
            "recipe": "r1", "code": "", "epoch": self.trainer.session.epoch, "wait_s": 0.0,
            "worker_id": self.worker.id, "peer_url": "", "token_ids": sample.token_ids, "mask": sample.mask,
            "behavior_logprobs": sample.behavior_logprobs, "data": bytes(28), "temperature": 1.0,
            "turns": [{"start": 3, "end": 7, "reward": 1.0, "state_key": ""}], "num_slots": 4,
            "step": step, "version": self.trainer.version, "durable_step": 0,
        }  # fmt: skip
        if route.name == "publish":  # of a frozen policy: each publication takes the place of the one before
            known |= {"policy": "judge", "version": 0, "shape": [32, 8], "num_bytes": 512, "hash": "0" * 32}
            known |= {"chunk": ["0" * 32, 0], "shortcut": None, "table": ""}
            known["files"] = [{"name": "config.json", "chunk": ["0" * 32, 0]}]
        if route.name == "episodes":
            leases = await self.worker.lease(1)
            known |= {"lease_id": leases[0].id if leases else "0.0.0", "versions": [[3, 4, 0]]}
        return known

    async def drop_held(self) -> None:
        """What a person does about a batch that failed too often."""
        (status,) = (await self.run.client.status()).policies[:1]
        await self.run.client.drop_batch("actor", DropRequest(step=status.step, epoch=status.epoch))

    async def send(self, route: Route, target: str, media_type: str, body: bytes, about: str) -> None:
        """One request with a token that the route allows."""
        headers = {
            "content-type": media_type,
            "accept": wire.JSON,
            "authorization": f"Bearer {route.roles[0]}-token",
        }
        core = self.run.service._dispatcher.core  # what no answer shows must not change either
        before = (self.run.journal.seq, core.policy_status(), core.pushed, core.workers())
        started_s = time.thread_time()
        async with asyncio.timeout(30.0):
            reply = await self.transport.request(
                route.method, target, headers=headers, body=body, timeout_s=30.0
            )
        took_s = time.thread_time() - started_s
        where = f"{route.name} {target[:80]} ({media_type}): {about}"
        assert reply.status < 500, where
        assert took_s < MAX_BLOCK_S, f"{where} took {took_s:.2f} s"
        assert not self.run.service.fatal.is_set(), where
        self.num_sent += 1
        self.num_accepted += reply.status < 400
        if reply.status >= 400:
            error = wire.decode(reply.body, ErrorReply, reply.media_type)
            assert error.code, where
            assert 0 < len(error.message) < 10_000, where
            after = (self.run.journal.seq, core.policy_status(), core.pushed, core.workers())
            assert after == before, where


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Arena]]:
    """A run with a trainer, a version and a worker; its loop. Checks at the end that the run is whole."""
    folder = tmp_path_factory.mktemp("run")
    stack = AsyncExitStack()

    async def started() -> Arena:
        config = DataflowConfig(lease_timeout_s=1e6)  # nothing happens by itself, however long a test takes
        run = await stack.enter_async_context(running(folder, PLAN, frozen=("judge",), config=config))
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        return Arena(run, trainer, worker)

    with asyncio.Runner() as runner:
        arena = runner.run(started())
        yield runner, arena
        runner.run(goes_on(arena))
        runner.run(stack.aclose())
        runner.run(opens_again(folder))
    assert audit(folder).problems == ()


async def batch_taken(trainer: ScriptedTrainer, worker: ScriptedWorker, step: int) -> None:
    """The trainer takes a step's batch, which the worker's episodes fill."""
    taking = asyncio.create_task(trainer.client.batch(trainer.policy, step, epoch=trainer.session.epoch))
    async with asyncio.timeout(30.0):
        while not taking.done():
            if leases := await worker.lease(4):
                await worker.send(*[await worker.answer(lease) for lease in leases])
            await asyncio.sleep(0)
    assert await taking is not None


async def goes_on(arena: Arena) -> None:
    """Another trainer and another service train a step."""
    trainer, worker = ScriptedTrainer(arena.run.client), ScriptedWorker(arena.run.client, "healthy")
    await trainer.attach()
    await worker.register()
    step = trainer.session.step
    await batch_taken(trainer, worker, step)
    await trainer.commit(step)
    (status,) = (await arena.run.client.status()).policies
    fates = {name: getattr(status.fates, name) for name in status.fates.__struct_fields__}
    assert fates.pop("drawn") == sum(fates.values())
    assert status.step == step + 1


async def opens_again(folder: Path) -> None:
    async with running(folder, PLAN, frozen=("judge",)) as run:
        assert (await run.client.status()).policies[0].step > 0


def path_of(route: Route, worker_id: str) -> str:
    policy = "judge" if route.name == "publish" else "actor"
    path = route.path.replace("{policy}", policy).replace("{worker_id}", worker_id)
    return path.replace("{step:int}", "0")


@pytest.mark.parametrize(
    "route", [r for r in ROUTES if r.body is not None and r.name != "stop"], ids=lambda route: route.name
)
@pytest.mark.timeout(180)
def test_no_field_of_a_body_ends_anything(arena: tuple[asyncio.Runner, Arena], route: Route) -> None:
    runner, fight = arena
    assert route.body is not None
    known = runner.run(fight.known(route))
    target = path_of(route, fight.worker.id)

    async def all_of_them() -> None:
        for about, media_type, body in bodies(route.body or object, known):
            await fight.send(route, target, media_type, body, about)

    accepted = fight.num_accepted
    runner.run(all_of_them())
    assert fight.num_accepted > accepted, f"{route.name}: not even sound bodies are accepted"
    if route.name == "step_failed":
        runner.run(fight.drop_held())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "route", [r for r in ROUTES if "{" in r.path or r.params], ids=lambda route: route.name
)
def test_no_parameter_ends_anything(arena: tuple[asyncio.Runner, Arena], route: Route) -> None:
    runner, fight = arena
    plain = path_of(route, fight.worker.id)
    targets = [
        route.path.replace("{policy}", name).replace("{worker_id}", name).replace("{step:int}", name)
        for name in NAMES
        if "{" in route.path
    ]
    targets += [plain.replace("/0", f"/{name}") for name in (*NAMES, *NUMBERS) if "{step" in route.path]
    needed = "&".join(f"{name}=0" for name, param in route.params.items() if param.default is None)
    for name in (*route.params, "unknown"):
        wait = "" if name == "wait_s" else "&wait_s=0"
        values = [v for v in NUMBERS if name != "wait_s" or not is_a_wait(v)]
        targets += [f"{plain}?{needed}&{name}={quote(value)}{wait}" for value in values]
        targets += [f"{plain}?{name}={quote(value)}{wait}" for value in values]

    async def all_of_them() -> None:
        for target in targets:
            if route.name == "drain" and target.split("/")[3] == fight.worker.id:
                continue
            await fight.send(route, target, wire.JSON, b"", target[:60])

    runner.run(all_of_them())


def is_a_wait(text: str) -> bool:
    """Whether a long-poll would really wait for so long."""
    try:
        return float(text) != 0.0
    except ValueError:
        return False


@pytest.mark.timeout(60)
async def test_no_reason_to_stop_ends_more_than_the_run(tmp_path: Path) -> None:
    async with running(tmp_path, PLAN, frozen=("judge",)) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        fight = Arena(run, trainer, worker)
        (stop,) = (route for route in ROUTES if route.name == "stop")
        assert stop.body is not None
        for about, media_type, body in bodies(stop.body, {}):
            await fight.send(stop, stop.path, media_type, body, about)
        assert (await run.client.status()).state == "finished"
    assert audit(tmp_path).problems == ()
