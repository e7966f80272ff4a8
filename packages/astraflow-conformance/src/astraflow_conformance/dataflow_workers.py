"""Scenarios for a dataflow from the view of rollout services: joining, leases, results, heartbeats, and
draining."""

import asyncio
from collections.abc import Callable

import msgspec

from astraflow import wire
from astraflow.types import (
    Episode,
    EpisodeResult,
    EpisodeResults,
    Failure,
    Fingerprints,
    Heartbeat,
    Lease,
    LeaseRequest,
    Load,
    Receipts,
    RegisterWorker,
    RunInfo,
    ServedVersions,
    Trajectory,
    Turn,
    VersionSpan,
)
from astraflow_conformance.probe_client import RefusalError
from astraflow_conformance.run_under_test import VOCAB_SIZE, FakeWorker, RunUnderTest

__all__ = [
    "drain",
    "expiry",
    "failures",
    "joining",
    "lag",
    "lost_answer",
    "pinned",
    "results",
    "strangers",
    "unsound",
]

_EXPIRY_SLACK = 3.0
"""Number of lease timeouts within which an expired lease must be granted again."""


# --- joining --------------------------------------------------------------------------------------


async def joining(run: RunUnderTest) -> None:
    """Checks D1 to D8 and D31: who may join, and how requests are refused."""
    checks = run.checks
    client = run.client
    info = run.info
    checks.that("D1", info.protocol == 1 and info.run_id and info.policies, f"{info}"[:200])
    await _encodings(run)
    good = RegisterWorker(
        name="conformance-join",
        hosts=(run.trainer.policy,),
        engine="conformance",
        num_slots=1,
        fingerprints=Fingerprints(),
    )
    await _malformed(run, good)
    replace = msgspec.structs.replace
    other = replace(good, protocol=info.protocol + 1)
    await _refused(run, "D5", other, 400, "protocol_version")
    if info.fingerprints.recipe:
        wrong = replace(good, fingerprints=Fingerprints(recipe="0" * 32))
        await _refused(run, "D8", wrong, 409, "fingerprint")
    else:
        checks.skip("D8", "the run names no fingerprint of its recipe")
    for path in ("versions", "batches/0?epoch=0"):
        found = await client.refused("GET", f"/v1/policies/no-such-policy/{path}")
        _check_refusal(run, "D6", found, 404, "unknown_policy")
    beat = Heartbeat(lease_ids=(), load=Load())
    _check_refusal(
        run,
        "D7",
        await client.refused("POST", "/v1/workers/no-such-worker/heartbeat", beat),
        404,
        "unknown_worker",
    )
    asks = LeaseRequest(worker_id="no-such-worker", num_free=1, served=(), wait_s=0.0)
    _check_refusal(run, "D7", await client.refused("POST", "/v1/leases", asks), 404, "unknown_worker")
    if not client.token:
        checks.skip("D31", "the run has no tokens")
        return
    token = client.token
    client.token = "not-the-token"
    found = await client.refused("GET", "/v1/run")
    client.token = token
    _check_refusal(run, "D31", found, 401, "unauthorized")


async def _encodings(run: RunUnderTest) -> None:
    replies = [
        await run.client.send("GET", "/v1/run", b"", accepts=accepts)
        for accepts in (wire.MSGPACK, wire.JSON, "")
    ]
    kinds = [reply.media_type for reply in replies]
    detail = f"asked for msgpack, JSON and nothing, it answered {kinds}"
    if not run.checks.that("D2", kinds == [wire.MSGPACK, wire.JSON, wire.JSON], detail):
        return
    infos = [wire.decode(reply.body, RunInfo, reply.media_type) for reply in replies]
    run.checks.that("D2", infos[0] == infos[1] == infos[2], "JSON and msgpack answers differ")


async def _malformed(run: RunUnderTest, good: RegisterWorker) -> None:
    """Sends bodies that are not valid items, then a valid item in JSON."""
    fields = msgspec.to_builtins(good)
    for wrong in ({**fields, "no_such_field": 1}, {**fields, "num_slots": "many"}, {"name": "x"}):
        reply = await run.client.send("POST", "/v1/workers", msgspec.json.encode(wrong), sends=wire.JSON)
        if run.checks.that("D4", reply.status == 400, f"{wrong} is answered with {reply.status}"):
            run.checks.kept("D3")
            run.client.refusal("POST /v1/workers", reply)
    reply = await run.client.send("POST", "/v1/workers", wire.encode(good, wire.JSON), sends=wire.JSON)
    run.checks.that("D2", reply.status == 200, f"the same item in JSON is answered with {reply.status}")


async def _refused(run: RunUnderTest, rule: str, body: RegisterWorker, status: int, code: str) -> None:
    _check_refusal(run, rule, await run.client.refused("POST", "/v1/workers", body), status, code)


def _check_refusal(run: RunUnderTest, rule: str, found: RefusalError | None, status: int, code: str) -> None:
    """Checks status and code of a refusal. If its body cannot be read, only the status counts."""
    holds = found is not None and found.status == status and found.code in {code, ""}
    run.checks.that(rule, holds, f"expected {status} {code}, got {found or 'success'}")


# --- leases ---------------------------------------------------------------------------------------


async def lag(run: RunUnderTest) -> None:
    """Checks D9: a service gets training leases only if it serves recent versions."""
    oldest = run.trainer.newest
    while run.trainer.newest - oldest <= run.max_lag:
        await run.trainer.attach(run.trainer.session.step)
    worker = await run.worker()
    others = run.served()[1:]
    for versions in ((), (oldest,)):
        behind = [ServedVersions(policy=run.trainer.policy, versions=versions), *others]
        train = [lease.id for lease in await worker.ask(4, served=behind) if lease.kind == "train"]
        detail = f"serving {versions} of newest {run.trainer.newest} got {train}"
        run.checks.that("D9", not train, detail)
    await worker.send(await worker.take(2))


async def pinned(run: RunUnderTest) -> None:
    """Checks D19: evaluation leases go to services that serve their versions.

    `note_leases` checks every lease.
    """
    wanted = await run.pinned()
    if not wanted:
        run.checks.skip("D19", "the run evaluates nothing now; give it an eval set")
        return
    worker = await run.worker()
    others = run.served()[1:]
    newest = run.trainer.newest
    without = tuple(version for version in range(newest + 1) if version not in wanted)
    await worker.send(
        await worker.ask(2, served=[ServedVersions(policy=run.trainer.policy, versions=without)])
    )
    both = [ServedVersions(policy=run.trainer.policy, versions=(*wanted, newest)), *others]
    leases = await worker.ask(4, served=both)
    run.checks.that(
        "D19", any(lease.kind == "eval" for lease in leases), f"serving {wanted} got {leases}"[:200]
    )
    await worker.send(leases)


async def results(run: RunUnderTest) -> None:
    """Checks D10, D11, and D12: receipts, and results that are sent twice."""
    one = await run.worker()
    two = await run.worker()
    first = await one.take(3)
    second = await two.take(3)
    answers = [run.result(lease) for lease in first]
    receipts = await one.results(answers)
    order = [receipt.lease_id for receipt in receipts] == [lease.id for lease in first]
    sound = all(receipt.status == "accepted" for receipt in receipts)
    run.checks.that("D11", order and sound, f"sound results of {[x.id for x in first]} got {receipts}"[:250])
    for lease in first:
        again = await one.results([run.result(lease)])
        statuses = [receipt.status for receipt in again]
        run.checks.that("D12", statuses in (["accepted"], ["dropped"]), f"sent again, {lease.id}: {again}")
    await two.send(second)


async def failures(run: RunUnderTest) -> None:
    """Checks D14: the next attempt follows a failed one. `note_leases` compares task and seed."""
    worker = await run.worker()
    (lease,) = await worker.take(1)
    await worker.fail(lease)
    await _comes_again(run, lease, "D14", "its attempt failed")


async def _comes_again(run: RunUnderTest, lease: Lease, rule: str, why: str) -> Lease | None:
    """Waits for the next attempt of an episode, and answers it and all other leases.

    Another service asks for it, because a dataflow may prefer another service to the one that failed the
    episode. Returns the lease of the attempt; None if it never comes, which breaks the rule.
    """
    worker = await run.worker()
    for _ in range(50):
        leases = await worker.ask(8, wait_s=0.1)
        again = [x for x in leases if (x.group_id, x.episode_idx) == (lease.group_id, lease.episode_idx)]
        if again:
            run.checks.that(rule, again[0].attempt == lease.attempt + 1, f"{again[0]} after {lease}"[:250])
            await worker.send(leases)
            return again[0]
        await worker.send(leases)
        if not leases:
            break
    run.checks.broke(rule, f"episode {lease.group_id}.{lease.episode_idx} never went out again after {why}")
    return None


# --- invalid results ------------------------------------------------------------------------------

_Spoil = Callable[[Trajectory], Trajectory]


def _with(**changes: object) -> _Spoil:
    return lambda item: msgspec.structs.replace(item, **changes)


def _logprob(idx: int, value: float) -> _Spoil:
    def spoil(item: Trajectory) -> Trajectory:
        values = wire.array(item.behavior_logprobs, "float32").copy()
        values[idx] = value
        return msgspec.structs.replace(item, behavior_logprobs=wire.column(values, "float32"))

    return spoil


def _token(value: int) -> _Spoil:
    def spoil(item: Trajectory) -> Trajectory:
        values = wire.array(item.token_ids, "int32").copy()
        values[0] = value
        return msgspec.structs.replace(item, token_ids=wire.column(values, "int32"))

    return spoil


SPOILED: dict[str, _Spoil] = {
    "C1, a short mask": lambda item: msgspec.structs.replace(item, mask=item.mask[:-1]),
    "C2, a mask of 2": lambda item: msgspec.structs.replace(item, mask=item.mask[:-1] + b"\2"),
    "C2, nothing sampled": _with(mask=bytes(7), behavior_logprobs=bytes(28), versions=(), turns=()),
    "C3, a positive logprob": _logprob(-1, 0.5),
    "C3, a logprob that is not a number": _logprob(-1, float("nan")),
    "C3, a logprob of a prompt token": _logprob(0, -1.0),
    "C4, versions that cover too little": _with(versions=(VersionSpan(3, 3, 0),)),
    "C4, a version that does not exist": _with(versions=(VersionSpan(3, 4, 10**6),)),
    "C5, turns that overlap": _with(turns=(Turn(start=3, end=6), Turn(start=5, end=7))),
    "C5, a reward that is not a number": _with(reward=float("inf")),
    "C6, a negative token": _token(-1),
    "C6, a token beyond the vocabulary": _token(VOCAB_SIZE),
    "C7, another temperature": lambda item: msgspec.structs.replace(item, temperature=item.temperature + 0.5),
    "C8, another policy": _with(policy="no-such-policy"),
    "C9, a reward that float32 does not hold": _with(reward=1e39),
    "C9, a reward over the bound": _with(reward=-1.1e6),
}
"""Rule and mistake -> function that makes this mistake in a valid trajectory."""


async def unsound(run: RunUnderTest) -> None:
    """Checks D13: results break each rule of the token columns.

    The episode must be leased again each time, and then gets a valid result.
    """
    for what, spoil in SPOILED.items():
        worker = await run.worker()
        (lease,) = await worker.take(1)
        sound = run.result(lease)
        assert isinstance(sound.outcome, Episode)
        first, *rest = sound.outcome.trajectories
        spoiled = msgspec.structs.replace(sound.outcome, trajectories=(spoil(first), *rest))
        (receipt,) = await worker.results([EpisodeResult(lease_id=lease.id, outcome=spoiled)])
        is_refused = receipt.status == "invalid" and receipt.reason
        if run.checks.that("D13", is_refused, f"{what}: the receipt is {receipt}"):
            await _comes_again(run, lease, "D13", f"an invalid result ({what})")


# --- leaving, and getting lost --------------------------------------------------------------------


async def drain(run: RunUnderTest) -> None:
    """Checks D17: a draining service gets no leases, but its results still count."""
    worker = await run.worker()
    leases = await worker.take(2)
    await worker.drain()
    more = await worker.ask(4)
    run.checks.that("D17", not more, f"a draining service got {[lease.id for lease in more]}")
    reply = await worker.beat([lease.id for lease in leases])
    run.checks.that("D17", reply.is_draining, "its heartbeat's answer does not say is_draining")
    statuses = [receipt.status for receipt in await worker.send(leases)]
    run.checks.that("D17", statuses == ["accepted"] * 2, f"its results got {statuses}")


async def strangers(run: RunUnderTest) -> None:
    """Checks D33: another service answers a lease, with a result and with a failure. Neither counts."""
    holder = await run.worker()
    stranger = await run.worker()
    (lease,) = await holder.take(1)
    result = run.result(lease)
    failure = Failure(error_class="Conformance", message="sent by another service")
    for outcome in (result.outcome, failure):
        answer = EpisodeResult(lease_id=lease.id, outcome=outcome)
        body = EpisodeResults(worker_id=stranger.id, results=(answer,))
        (receipt,) = (await run.client.ask("POST", "/v1/episodes", Receipts, body)).receipts
        run.checks.that("D33", receipt.status == "dropped", f"{lease.id}, of another service: {receipt}")
    revoked = (await holder.beat([lease.id])).revoked
    run.checks.that("D33", not revoked, f"{lease.id} was revoked though only another service answered it")
    (receipt,) = await holder.send((lease,))
    run.checks.that("D33", receipt.status == "accepted", f"{lease.id}, of its own service: {receipt}")


async def lost_answer(run: RunUnderTest) -> None:
    """Checks D18: a granted lease gets lost. The service asks again, and names only the lease that it has."""
    worker = await run.worker()
    lost = await worker.take(2)
    kept = lost.pop()
    await worker.beat([kept.id])
    again = await worker.ask(8, held=[kept.id])
    keys = {(lease.group_id, lease.episode_idx) for lease in again if lease.attempt > 0}
    missing = [x.id for x in lost if (x.group_id, x.episode_idx) not in keys]
    run.checks.that("D18", not missing, f"{missing}, not named as held, did not go out again")
    held = (kept.group_id, kept.episode_idx)
    run.checks.that("D18", held not in keys, f"{kept.id} went out again though it is held")
    for lease in lost:
        run.out.pop(lease.id, None)
    await worker.send([*again, kept])


async def expiry(run: RunUnderTest) -> None:
    """Checks D15 and D16: one service keeps its lease alive with heartbeats.

    Another service lets its lease expire, and answers late.
    """
    alive = await run.worker()
    silent = await run.worker()
    taker = await run.worker()
    since_s = asyncio.get_running_loop().time()
    (kept,) = await alive.take(1)
    (silenced,) = await silent.take(1)
    again, gap_s = await _next_attempt(run, (alive, kept), taker, silenced, since_s)
    timeout_s = run.lease_timeout_s
    if gap_s > timeout_s / 2:
        run.checks.skip("D15", f"this machine was too slow: {gap_s:.1f} s between two heartbeats")
    if again is None:
        run.checks.broke("D15", f"{silenced.id} had no heartbeat for {_EXPIRY_SLACK} x {timeout_s} s")
        return
    run.checks.that("D15", again.attempt == silenced.attempt + 1, f"{again} after {silenced}"[:250])
    (late,) = await silent.send((silenced,))
    run.checks.that("D16", late.status == "accepted", f"first, and late: {late}")
    (second,) = await taker.send((again,))
    run.checks.that("D16", second.status == "dropped", f"second, of the next attempt: {second}")
    (receipt,) = await alive.send((kept,))
    if gap_s <= timeout_s / 2:
        revoked = (await alive.beat([kept.id])).revoked if receipt.status != "accepted" else ()
        detail = f"{kept.id}, kept alive by heartbeats, got {receipt} and was revoked: {revoked}"
        run.checks.that("D15", receipt.status == "accepted", detail)


async def _next_attempt(
    run: RunUnderTest, alive: tuple[FakeWorker, Lease], taker: FakeWorker, silenced: Lease, since_s: float
) -> tuple[Lease | None, float]:
    """Waits for the next attempt of the lease without heartbeats, and keeps the other lease alive meanwhile.

    Returns the lease of the attempt, or None, and the longest time between two heartbeats of the other lease.
    On a slow machine, the other lease may rightly expire too.
    """
    loop = asyncio.get_running_loop()
    (worker, kept) = alive
    give_up_s = loop.time() + _EXPIRY_SLACK * run.lease_timeout_s
    beat_s = since_s
    gap_s = 0.0
    while loop.time() < give_up_s:
        reply = await worker.beat([kept.id])
        gap_s = max(gap_s, loop.time() - beat_s)
        beat_s = loop.time()
        if kept.id in reply.revoked and gap_s <= run.lease_timeout_s / 2:
            run.checks.broke("D15", f"{kept.id} was revoked though heartbeats name it")
        for lease in await taker.ask(64, wait_s=run.lease_timeout_s / 20):
            if (lease.group_id, lease.episode_idx) == (silenced.group_id, silenced.episode_idx):
                return lease, gap_s
            await taker.send((lease,))
        await asyncio.sleep(run.lease_timeout_s / 50)
    return None, gap_s
