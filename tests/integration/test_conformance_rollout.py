"""The conformance kit finds our rollout service sound, and each of its mutants broken on one rule."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from astraflow import wire
from astraflow.errors import RolloutError
from astraflow.service.client import HttpReply
from astraflow.types import (
    Episode,
    EpisodeReceipt,
    EpisodeResults,
    GenerateRequest,
    Generation,
    Heartbeat,
    HeartbeatReply,
    LeaseReply,
    Receipts,
    RegisterWorker,
    Registration,
    ServedVersions,
    Trajectory,
    VersionSpan,
    VersionsReply,
)
from astraflow.types.host_tensors import WeightSnapshot
from astraflow_conformance.report import Report
from drivers.conformance_driver import (
    ChangesAnswer,
    ChangesBody,
    InProcessRollout,
    Mutation,
    VersionedEngine,
    replaced,
    rollout_rig,
)

pytestmark = pytest.mark.timeout(240)
replace = msgspec.structs.replace


async def judged(folder: Path, mutation: Callable[[], Mutation] = Mutation, **options: Any) -> Report:
    async with rollout_rig(folder, mutation, **options) as rig:
        return await rig.kit.run("candidate")


async def test_ours_keeps_every_rule(tmp_path: Path) -> None:
    report = await judged(tmp_path)
    assert report.broken == ()
    assert report.unchecked == ()


# --- what the service says is changed on its way --------------------------------------------------


def trajectories(change: Callable[[Trajectory], Trajectory]) -> Callable[[], Mutation]:
    """Changes every trajectory."""

    def changed(results: EpisodeResults) -> EpisodeResults:
        return replace(results, results=tuple(changed_result(result) for result in results.results))

    def changed_result(result: Any) -> Any:
        if not isinstance(result.outcome, Episode):
            return result
        episode = replace(result.outcome, trajectories=tuple(map(change, result.outcome.trajectories)))
        return replace(result, outcome=episode)

    return lambda: ChangesBody("/v1/episodes", EpisodeResults, changed)


def logprobs(change: Callable[[Any, Any], Any]) -> Callable[[Trajectory], Trajectory]:
    def changed(item: Trajectory) -> Trajectory:
        values = wire.array(item.behavior_logprobs, "float32").copy()
        values = change(values, wire.array(item.mask, "uint8"))
        return replace(item, behavior_logprobs=wire.column(values, "float32"))

    return changed


def versions_ahead(item: Trajectory) -> Trajectory:
    return replace(
        item, versions=tuple(VersionSpan(s.start, s.length, s.version + 50) for s in item.versions)
    )


def body(ending: str, item: Any, change: Callable[[Any], Any]) -> Callable[[], Mutation]:
    return lambda: ChangesBody(ending, item, change)


class Babbles(Mutation):
    """Sends something that is no item, once."""

    has_babbled = False

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if path.endswith("/heartbeat") and not self.has_babbled:
            self.has_babbled = True
            fields = {"lease_ids": [], "load": {}, "mood": "good"}
            await self.ask(path, msgspec.msgpack.encode(fields))
        return reply

    async def ask(self, path: str, body: bytes) -> None:
        headers = {"Content-Type": wire.MSGPACK, "Authorization": "Bearer secret"}
        await self.inner.request("POST", path, headers=headers, body=body, timeout_s=60.0)


class SendsTwice(Babbles):
    """Sends all results again after their receipts."""

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if path == "/v1/episodes" and reply.status == 200:
            await self.ask(path, body)
        return reply


class ServesUnverified(Mutation):
    """Counts a version as served once it is announced."""

    newest = 0

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        if path.endswith("/heartbeat"):
            beat = wire.decode(body, Heartbeat)
            served = (ServedVersions(policy="actor", versions=(self.newest,)),)
            if beat.load.versions:
                return path, wire.encode(replace(beat, load=replace(beat.load, versions=served)))
        return path, body

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if "/versions" in path and reply.status == 200:
            self.newest = max(self.newest, wire.decode(reply.body, VersionsReply).newest)
        return reply


def train_instead(reply: LeaseReply) -> LeaseReply:
    """Evaluation is run like training, with whatever version is there."""
    return replace(reply, leases=tuple(replace(x, kind="train", pinned=()) for x in reply.leases))


class ForgetfulEngine(VersionedEngine):
    """A new version fails the next requests; the first one, before any request, fails none."""

    num_failing = 0
    has_begun = False

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        await super().load(snapshot, slot=slot)
        self.num_failing = 3 if self.has_begun else 0

    async def generate(self, request: GenerateRequest) -> Generation:
        self.has_begun = True
        if self.num_failing:
            self.num_failing -= 1
            raise RolloutError("aborted by an update")
        return await super().generate(request)


class BrokenEngine(VersionedEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        raise RolloutError("out of memory")


QUICK: dict[str, tuple[str, dict[str, Any]]] = {
    "cuts the mask": ("C1", {"mutation": trajectories(lambda x: replace(x, mask=x.mask[:-1]))}),
    "marks tokens with 2": (
        "C2",
        {"mutation": trajectories(lambda x: replace(x, mask=x.mask.replace(b"\1", b"\2")))},
    ),
    "reports logprobs of the prompt": (
        "C3",
        {"mutation": trajectories(logprobs(lambda x, mask: np.where(mask == 1, x, -1.0)))},
    ),
    "reports positive logprobs": ("C3", {"mutation": trajectories(logprobs(lambda x, mask: -x))}),
    "names versions that do not exist": ("C4", {"mutation": trajectories(versions_ahead)}),
    "names no turns": ("C5", {"mutation": trajectories(lambda x: replace(x, turns=()))}),
    "has another tokenizer": (
        "C6",
        {"mutation": trajectories(lambda x: replace(x, token_ids=b"\0\0\1\0" + x.token_ids[4:]))},
    ),
    "samples at another temperature": (
        "C7",
        {"mutation": trajectories(lambda x: replace(x, temperature=0.7))},
    ),
    "answers for another policy": ("C8", {"mutation": trajectories(lambda x: replace(x, policy="critic"))}),
    "has no slots": ("W1", {"mutation": body("/v1/workers", RegisterWorker, replaced(num_slots=0))}),
    "sends unknown fields": ("W2", {"mutation": Babbles}),
    "forgets the token": ("W3", {"token": ""}),
    "names no leases in heartbeats": (
        "W5",
        {"mutation": body("/heartbeat", Heartbeat, replaced(lease_ids=()))},
    ),
    "serves what it has not verified": ("W6", {"mutation": ServesUnverified}),
    "sends results twice": ("W9", {"mutation": SendsTwice}),
    "reports logprobs of a processed distribution": (
        "W10",
        {"mutation": trajectories(logprobs(lambda x, mask: np.where(mask == 1, 0.8 * x, 0.0)))},
    ),
    "aborts episodes at an update": ("W11", {"make_engine": ForgetfulEngine}),
    "evaluates with any version": (
        "W12",
        {"mutation": lambda: ChangesAnswer("/v1/leases", LeaseReply, train_instead)},
    ),
    "does not hear that it drains": (
        "W14",
        {"mutation": lambda: ChangesAnswer("/heartbeat", HeartbeatReply, replaced(is_draining=False))},
    ),
    "fails every episode": ("W17", {"make_engine": BrokenEngine}),
}


@pytest.mark.long  # of threads and clocks: a busy machine may show another rule too
@pytest.mark.parametrize("name", QUICK)
async def test_a_mutant_fails_on_the_rule_that_it_breaks(tmp_path: Path, name: str) -> None:
    rule, options = QUICK[name]
    report = await judged(tmp_path, **options)
    assert report.broken == (rule,), [v for v in report.verdicts if v.outcome == "broken"]
    assert report.exit_code == 1


# --- what never happens: the kit's patience must end ----------------------------------------------


class SilentWhileSending(Mutation):
    """Heartbeats wait while results do."""

    def __init__(self) -> None:
        self.num_sending = 0
        self.sent = asyncio.Event()

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        if path == "/v1/episodes":
            self.num_sending += 1
        while path.endswith("/heartbeat") and self.num_sending:
            self.sent.clear()
            await self.sent.wait()
        return path, body

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if path == "/v1/episodes":
            self.num_sending -= 1
            self.sent.set()
        return reply


class StaysBehind(Mutation):
    """Hears of no version after the first bad one."""

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        return path, body

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if "/versions" not in path or reply.status != 200:
            return reply
        item = wire.decode(reply.body, VersionsReply)
        known = tuple(manifest for manifest in item.manifests if manifest.version <= 4)
        return HttpReply(
            200, wire.MSGPACK, wire.encode(replace(item, manifests=known, newest=min(item.newest, 4)))
        )


class TakesAnythingForAReceipt(Mutation):
    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if path != "/v1/episodes" or reply.status < 500:
            return reply
        results = wire.decode(body, EpisodeResults).results
        receipts = tuple(EpisodeReceipt(lease_id=x.lease_id, status="accepted") for x in results)
        return HttpReply(200, wire.MSGPACK, wire.encode(Receipts(receipts=receipts)))


class RegistersOnce(Mutation):
    def __init__(self) -> None:
        self.first: HttpReply | None = None

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        return self.first if path == "/v1/workers" and self.first else (path, body)

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if path == "/v1/workers":
            assert wire.decode(reply.body, Registration)
            self.first = reply
        return reply


class NeverHearsOfTheEnd(Mutation):
    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if reply.status == 200:
            fields = msgspec.msgpack.decode(reply.body)
            if fields.get("state") == "finished" and not path.endswith("/run"):
                return HttpReply(200, wire.MSGPACK, msgspec.msgpack.encode({**fields, "state": "running"}))
        return reply


class Stubborn(InProcessRollout):
    async def stop(self) -> None:
        """Does not listen."""


SLOW: dict[str, tuple[str, dict[str, Any]]] = {
    "sends no heartbeat meanwhile": ("W4", {"mutation": SilentWhileSending}),
    "stays at an old version": ("W7", {"mutation": StaysBehind}),
    "sends each result once": ("W8", {"mutation": TakesAnythingForAReceipt}),
    "never registers again": ("W13", {"mutation": RegistersOnce}),
    "never leaves": ("W15", {"mutation": NeverHearsOfTheEnd}),
    "does not stop": ("W16", {"make_candidate": Stubborn}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SLOW)
async def test_a_mutant_that_omits_something_fails_on_that_rule(tmp_path: Path, name: str) -> None:
    rule, options = SLOW[name]
    report = await judged(tmp_path, patience_s=10.0, **options)
    assert report.broken == (rule,), [v for v in report.verdicts if v.outcome == "broken"]
