"""The conformance kit finds our dataflow sound, and each of its mutants broken on one rule."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow import wire
from astraflow.dataflow.config import DataflowConfig
from astraflow.errors import WireError
from astraflow.service.client import HttpReply, MemoryTransport, Transport
from astraflow.service.server import TokenAuth
from astraflow.types import (
    BatchReply,
    EarlierProgress,
    EpisodeResults,
    LeaseReply,
    LeaseRequest,
    Publication,
    Receipts,
    RegisterWorker,
    Registration,
    RunInfo,
    StatusReply,
    VersionsReply,
)
from astraflow_conformance.dataflow_kit import check_dataflow
from astraflow_conformance.report import Report
from drivers.conformance_driver import ChangesAnswer, ChangesBody, Forgives, Mutant, Mutation, replaced
from drivers.dataflow_driver import Run, make_plan, running

pytestmark = pytest.mark.timeout(120)
PLAN = make_plan(num_steps=60, group_size=2, groups_per_batch=4, num_tasks=50, eval_tasks=2)
WAITS = DataflowConfig(lease_timeout_s=1.0)
replace = msgspec.structs.replace


@contextlib.asynccontextmanager
async def candidate(folder: Path, config: DataflowConfig) -> AsyncIterator[Run]:
    async with running(folder, PLAN, config=config) as run:
        yield run


async def judged(folder: Path, mutation: Mutation, *, waits: bool = False) -> Report:
    async with candidate(folder, WAITS if waits else DataflowConfig()) as run:
        transport = Mutant(MemoryTransport(run.service.app), mutation)
        return await check_dataflow(transport, name="mutant", is_quick=not waits)


class Restartable:
    """A dataflow that is torn down without a word and recovered from its journal."""

    def __init__(self, folder: Path, *, forgets: bool = False) -> None:
        self.folder, self.forgets = folder, forgets
        self.lives = 0
        self.stack = contextlib.AsyncExitStack()
        self.transport: Transport

    async def start(self) -> None:
        self.lives += 1
        folder = self.folder / (str(self.lives) if self.forgets else "journal")
        run = await self.stack.enter_async_context(candidate(folder, DataflowConfig()))
        self.transport = MemoryTransport(run.service.app)

    async def restart(self) -> None:
        await self.stack.aclose()
        self.stack = contextlib.AsyncExitStack()
        await self.start()

    async def request(self, *args: Any, **options: Any) -> HttpReply:
        return await self.transport.request(*args, **options)

    async def close(self) -> None:
        await self.stack.aclose()


async def judged_over_a_restart(folder: Path, *, forgets: bool) -> Report:
    dataflow = Restartable(folder, forgets=forgets)
    await dataflow.start()
    try:
        return await check_dataflow(dataflow, name="ours", restart=dataflow.restart, is_quick=True)
    finally:
        await dataflow.close()


# --- sound ----------------------------------------------------------------------------------------


async def test_ours_keeps_every_rule(tmp_path: Path) -> None:
    report = await judged(tmp_path, Mutation(), waits=True)
    assert report.broken == ()
    assert set(report.unchecked) <= {"D29", "D31", "D15"}  # D15: a machine that stalls for half a second
    assert report.exit_code == 0


async def test_ours_survives_a_restart(tmp_path: Path) -> None:
    report = await judged_over_a_restart(tmp_path, forgets=False)
    assert report.broken == ()
    assert report.unchecked == ("D15", "D16", "D31")


async def test_ours_asks_for_tokens(tmp_path: Path) -> None:
    async with candidate(tmp_path, DataflowConfig()) as run:
        app = TokenAuth(run.service.app, {"secret": "admin"})
        report = await check_dataflow(MemoryTransport(app), name="ours", token="secret", is_quick=True)
    assert report.broken == ()
    assert report.unchecked == ("D15", "D16", "D29")


# --- broken ---------------------------------------------------------------------------------------


def each_lease(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda reply: replace(reply, leases=tuple(change(lease) for lease in reply.leases))


def each_receipt(status: str, becomes: str) -> Callable[[Any], Any]:
    def change(receipts: Receipts) -> Receipts:
        return replace(
            receipts,
            receipts=tuple(
                replace(r, status=becomes) if r.status == status else r for r in receipts.receipts
            ),
        )

    return change


class PlainErrors(Mutation):
    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        return HttpReply(reply.status, "text/html", b"<h1>No</h1>") if reply.status >= 400 else reply


class AlwaysMsgpack(Mutation):
    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if path != "/v1/run" or reply.media_type != wire.JSON:
            return reply
        return HttpReply(200, wire.MSGPACK, wire.encode(wire.decode(reply.body, RunInfo, wire.JSON)))


class TakesUnknownFields(Mutation):
    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        return path, body.replace(b',"no_such_field":1', b"")


class OtherCode(Mutation):
    """Refuses for another reason."""

    def __init__(self, code: bytes, becomes: bytes, status: int) -> None:
        self.code, self.becomes, self.status = code, becomes, status

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if reply.status < 400 or self.code not in reply.body:
            return reply
        fields = msgspec.msgpack.decode(reply.body)
        fields["code"] = self.becomes.decode()
        return HttpReply(self.status, reply.media_type, msgspec.msgpack.encode(fields))


class SecondTime(Mutation):
    """Changes the answer to the same GET the second time."""

    def __init__(self, part: str, item: Any, change: Callable[[Any], Any], without: str = "") -> None:
        self.part, self.item, self.change, self.without = part, item, change, without
        self.seen: set[str] = set()

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if self.part not in path or reply.status != 200 or (self.without and self.without in path):
            return reply
        item = wire.decode(reply.body, self.item)
        if item.batch is None:
            return reply
        if path in self.seen:
            item = self.change(item)
        self.seen.add(path)
        return HttpReply(200, reply.media_type, wire.encode(item))


class WholeForEachRank(Mutation):
    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        return path.replace("rank=1&world=2", "rank=0&world=1").replace("world=2", "world=1"), body


class RefusesTheSecondResult(Mutation):
    def __init__(self) -> None:
        self.seen: set[str] = set()

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if path != "/v1/episodes" or reply.status != 200:
            return reply
        receipts = wire.decode(reply.body, Receipts).receipts
        changed = tuple(
            replace(r, status="invalid", reason="again") if r.lease_id in self.seen else r for r in receipts
        )
        self.seen |= {r.lease_id for r in receipts if r.status == "accepted"}
        return HttpReply(200, reply.media_type, wire.encode(Receipts(receipts=changed)))


class OtherTaskOnRetry(Mutation):
    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if path != "/v1/leases" or reply.status != 200:
            return reply
        item = wire.decode(reply.body, LeaseReply)
        changed = each_lease(lambda x: replace(x, seed=x.seed + 1) if x.attempt else x)(item)
        return HttpReply(200, reply.media_type, wire.encode(changed))


class SlowToDrain(Mutation):
    """Says yes to a drain, and goes on."""

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        return HttpReply(204, "", b"") if path.endswith("/drain") else (path, body)


class EvalForAll(Mutation):
    """Gives evaluation to services that do not serve its version."""

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        if path == "/v1/leases":
            asks = wire.decode(body, LeaseRequest)
            served = tuple(replace(s, versions=(0, *s.versions)) for s in asks.served)
            body = wire.encode(replace(asks, served=served))
        return path, body


class LeasesToLaggards(Mutation):
    """Counts every service as one that serves the newest version."""

    def __init__(self) -> None:
        self.newest = 0

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        if method == "POST" and path.endswith("/versions"):
            self.newest = max(self.newest, wire.decode(body, Publication).manifest.version)
        if path == "/v1/leases":
            asks = wire.decode(body, LeaseRequest)
            served = tuple(replace(s, versions=(*s.versions, self.newest)) for s in asks.served)
            body = wire.encode(replace(asks, served=served))
        return path, body


class AnswersForAll(Mutation):
    """Takes a lease's result from every service."""

    def __init__(self) -> None:
        self.holders: dict[str, str] = {}
        self.asked = ""

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        if path == "/v1/leases":
            self.asked = wire.decode(body, LeaseRequest).worker_id
        if path == "/v1/episodes":
            try:
                sent = wire.decode(body, EpisodeResults)
            except WireError:  # a result beyond its bounds
                return path, body
            holders = {self.holders.get(result.lease_id, sent.worker_id) for result in sent.results}
            body = wire.encode(replace(sent, worker_id=holders.pop() if holders else sent.worker_id))
        return path, body

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if path == "/v1/leases" and reply.status == 200:
            for lease in wire.decode(reply.body, LeaseReply).leases:
                self.holders[lease.id] = self.asked
        return reply


def newest_first(reply: VersionsReply) -> VersionsReply:
    return replace(reply, manifests=reply.manifests[::-1])


def without_advantages(reply: BatchReply) -> BatchReply:
    batch = reply.batch
    if batch is None:
        return reply
    return replace(
        reply, batch=replace(batch, samples=tuple(replace(s, advantages=()) for s in batch.samples))
    )


def miscounted(status: StatusReply) -> StatusReply:
    return replace(
        status,
        policies=tuple(replace(p, fates=replace(p.fates, drawn=p.fates.drawn + 1)) for p in status.policies),
    )


def shuffled(reply: BatchReply) -> BatchReply:
    assert reply.batch is not None
    return replace(reply, batch=replace(reply.batch, samples=reply.batch.samples[::-1]))


def doubled(reply: LeaseReply) -> LeaseReply:
    return replace(reply, leases=(*reply.leases, *reply.leases[:1]))


def never_ends(reply: BatchReply) -> BatchReply:
    return replace(reply, state="running")


MUTANTS: dict[str, tuple[str, Callable[[], Mutation]]] = {
    "names no run": ("D1", lambda: ChangesAnswer("/v1/run", RunInfo, replaced(run_id=""))),
    "answers msgpack to all": ("D2", AlwaysMsgpack),
    "refuses in HTML": ("D3", PlainErrors),
    "takes unknown fields": ("D4", TakesUnknownFields),
    "takes any protocol": ("D5", lambda: ChangesBody("/v1/workers", RegisterWorker, replaced(protocol=1))),
    "says forbidden for an unknown policy": ("D6", lambda: OtherCode(b"unknown_policy", b"forbidden", 403)),
    "says malformed for an unknown service": ("D7", lambda: OtherCode(b"unknown_worker", b"malformed", 400)),
    "compares no fingerprints": (
        "D8",
        lambda: ChangesBody(
            "/v1/workers",
            RegisterWorker,
            lambda x: replace(x, fingerprints=replace(x.fingerprints, recipe="")),
        ),
    ),
    "leases to laggards": ("D9", LeasesToLaggards),
    "grants more than asked": ("D10", lambda: ChangesAnswer("/v1/leases", LeaseReply, doubled)),
    "drops sound results": (
        "D11",
        lambda: ChangesAnswer("/v1/episodes", Receipts, lambda x: replace(x, receipts=x.receipts[::-1])),
    ),
    "calls a repeated result invalid": ("D12", RefusesTheSecondResult),
    "accepts unsound results": (
        "D13",
        lambda: ChangesAnswer("/v1/episodes", Receipts, each_receipt("invalid", "accepted")),
    ),
    "changes the seed on a retry": ("D14", OtherTaskOnRetry),
    "does not drain": ("D17", SlowToDrain),
    "does not read held": ("D18", lambda: ChangesBody("/v1/leases", LeaseRequest, replaced(held=None))),
    "evaluates with any version": ("D19", EvalForAll),
    "does not fence": ("D20", lambda: Forgives("fenced", "/commit")),
    "takes any version number": ("D21", lambda: Forgives("wrong_version", "/versions")),
    "takes a delta as the first version": ("D22", lambda: Forgives("not_full", "/versions")),
    "gives versions newest first": (
        "D23",
        lambda: ChangesAnswer("/versions", VersionsReply, newest_first, method="GET"),
    ),
    "serves another batch the second time": (
        "D24",
        lambda: SecondTime("/batches/", BatchReply, shuffled, without="world=2"),
    ),
    "gives every rank the whole batch": ("D25", WholeForEachRank),
    "leaves advantages out": ("D26", lambda: ChangesAnswer("/batches/", BatchReply, without_advantages)),
    "commits what is not published": ("D27", lambda: Forgives("unpublished", "/commit")),
    "serves released steps": (
        "D28",
        lambda: Forgives("released", "/batches/", BatchReply(batch=None, state="running")),
    ),
    "loses count": ("D30", lambda: ChangesAnswer("/v1/status", StatusReply, miscounted)),
    "takes results from every service": ("D33", AnswersForAll),
    "keeps nothing of what it takes": (
        "D34",
        lambda: ChangesAnswer("/progress/", EarlierProgress, replaced(completions=()), method="GET"),
    ),
    "never ends": ("D32", lambda: ChangesAnswer("/batches/", BatchReply, never_ends)),
}


@pytest.mark.parametrize("name", MUTANTS)
async def test_a_mutant_fails_on_the_rule_that_it_breaks(tmp_path: Path, name: str) -> None:
    rule, make = MUTANTS[name]
    report = await judged(tmp_path, make())
    assert report.broken == (rule,), [v for v in report.verdicts if v.outcome == "broken"]
    assert report.exit_code == 1


async def test_a_dataflow_that_lets_no_lease_expire_fails_on_the_rule_about_heartbeats(
    tmp_path: Path,
) -> None:
    says_less = ChangesAnswer("/v1/workers", Registration, replaced(lease_timeout_s=0.3))
    async with candidate(tmp_path, DataflowConfig()) as run:
        report = await check_dataflow(Mutant(MemoryTransport(run.service.app), says_less), name="mutant")
    assert report.broken == ("D15",)


async def test_a_dataflow_that_accepts_every_attempt_fails_on_the_rule_about_late_results(
    tmp_path: Path,
) -> None:
    accepts = ChangesAnswer("/v1/episodes", Receipts, each_receipt("dropped", "accepted"))
    report = await judged(tmp_path, accepts, waits=True)
    assert report.broken == ("D16", "D33")  # the other service's result is a late one as well


async def test_a_dataflow_that_reads_no_token_fails_on_the_rule_about_tokens(tmp_path: Path) -> None:
    async with candidate(tmp_path, DataflowConfig()) as run:
        transport = MemoryTransport(run.service.app)
        report = await check_dataflow(transport, name="mutant", token="secret", is_quick=True)
    assert report.broken == ("D31",)


async def test_a_dataflow_that_forgets_fails_on_the_rule_about_crashes(tmp_path: Path) -> None:
    report = await judged_over_a_restart(tmp_path, forgets=True)
    assert report.broken == ("D29",)
