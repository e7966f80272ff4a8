"""What a dataflow owes to rollout services: joining, leases, results, heartbeats, draining."""

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
from astraflow_conformance.desk import RefusalError
from astraflow_conformance.stage import VOCAB_SIZE, PlayedWorker, Stage

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
"""A lease must be out again after this many timeouts."""


# --- joining --------------------------------------------------------------------------------------


async def joining(stage: Stage) -> None:
    """D1 to D8 and D31: who may join, and how one is refused."""
    checks, desk, info = stage.checks, stage.desk, stage.info
    checks.that("D1", info.protocol == 1 and info.run_id and info.policies, f"{info}"[:200])
    await _encodings(stage)
    good = RegisterWorker(
        name="conformance-join",
        hosts=(stage.trainer.policy,),
        engine="conformance",
        num_slots=1,
        fingerprints=Fingerprints(),
    )
    await _malformed(stage, good)
    replace = msgspec.structs.replace
    other = replace(good, protocol=info.protocol + 1)
    await _refused(stage, "D5", other, 400, "protocol_version")
    if info.fingerprints.recipe:
        wrong = replace(good, fingerprints=Fingerprints(recipe="0" * 32))
        await _refused(stage, "D8", wrong, 409, "fingerprint")
    else:
        checks.skip("D8", "the run names no fingerprint of its recipe")
    for path in ("versions", "batches/0?epoch=0"):
        found = await desk.refused("GET", f"/v1/policies/no-such-policy/{path}")
        _is(stage, "D6", found, 404, "unknown_policy")
    beat = Heartbeat(lease_ids=(), load=Load())
    _is(
        stage,
        "D7",
        await desk.refused("POST", "/v1/workers/no-such-worker/heartbeat", beat),
        404,
        "unknown_worker",
    )
    asks = LeaseRequest(worker_id="no-such-worker", num_free=1, served=(), wait_s=0.0)
    _is(stage, "D7", await desk.refused("POST", "/v1/leases", asks), 404, "unknown_worker")
    if not desk.token:
        checks.skip("D31", "the run has no tokens")
        return
    token, desk.token = desk.token, "not-the-token"
    found = await desk.refused("GET", "/v1/run")
    desk.token = token
    _is(stage, "D31", found, 401, "unauthorized")


async def _encodings(stage: Stage) -> None:
    replies = [
        await stage.desk.send("GET", "/v1/run", b"", accepts=accepts)
        for accepts in (wire.MSGPACK, wire.JSON, "")
    ]
    kinds = [reply.media_type for reply in replies]
    detail = f"asked for msgpack, JSON and nothing, it answered {kinds}"
    if not stage.checks.that("D2", kinds == [wire.MSGPACK, wire.JSON, wire.JSON], detail):
        return
    infos = [wire.decode(reply.body, RunInfo, reply.media_type) for reply in replies]
    stage.checks.that("D2", infos[0] == infos[1] == infos[2], "JSON and msgpack answers differ")


async def _malformed(stage: Stage, good: RegisterWorker) -> None:
    """Bodies that are no item; and the same in JSON, which is."""
    fields = msgspec.to_builtins(good)
    for wrong in ({**fields, "no_such_field": 1}, {**fields, "num_slots": "many"}, {"name": "x"}):
        reply = await stage.desk.send("POST", "/v1/workers", msgspec.json.encode(wrong), sends=wire.JSON)
        if stage.checks.that("D4", reply.status == 400, f"{wrong} is answered with {reply.status}"):
            stage.checks.kept("D3")
            stage.desk.refusal("POST /v1/workers", reply)
    reply = await stage.desk.send("POST", "/v1/workers", wire.encode(good, wire.JSON), sends=wire.JSON)
    stage.checks.that("D2", reply.status == 200, f"the same item in JSON is answered with {reply.status}")


async def _refused(stage: Stage, rule: str, body: RegisterWorker, status: int, code: str) -> None:
    _is(stage, rule, await stage.desk.refused("POST", "/v1/workers", body), status, code)


def _is(stage: Stage, rule: str, found: RefusalError | None, status: int, code: str) -> None:
    """Whether a refusal is the one that it should be; one without a readable body counts by its status."""
    holds = found is not None and found.status == status and found.code in {code, ""}
    stage.checks.that(rule, holds, f"expected {status} {code}, got {found or 'success'}")


# --- leases ---------------------------------------------------------------------------------------


async def lag(stage: Stage) -> None:
    """D9: three services, of which only the one that is up to date gets leases."""
    oldest = stage.trainer.newest
    while stage.trainer.newest - oldest <= stage.max_lag:
        await stage.trainer.attach(stage.trainer.session.step)
    worker = await stage.worker()
    others = stage.served()[1:]
    for versions in ((), (oldest,)):
        behind = [ServedVersions(policy=stage.trainer.policy, versions=versions), *others]
        train = [lease.id for lease in await worker.ask(4, served=behind) if lease.kind == "train"]
        detail = f"serving {versions} of newest {stage.trainer.newest} got {train}"
        stage.checks.that("D9", not train, detail)
    await worker.send(await worker.take(2))


async def pinned(stage: Stage) -> None:
    """D19: evaluation goes to who serves its versions; `Stage.note_leases` looks at every lease."""
    wanted = await stage.pinned()
    if not wanted:
        stage.checks.skip("D19", "the run evaluates nothing now; give it an eval set")
        return
    worker = await stage.worker()
    others = stage.served()[1:]
    newest = stage.trainer.newest
    without = tuple(version for version in range(newest + 1) if version not in wanted)
    await worker.send(
        await worker.ask(2, served=[ServedVersions(policy=stage.trainer.policy, versions=without)])
    )
    both = [ServedVersions(policy=stage.trainer.policy, versions=(*wanted, newest)), *others]
    leases = await worker.ask(4, served=both)
    stage.checks.that(
        "D19", any(lease.kind == "eval" for lease in leases), f"serving {wanted} got {leases}"[:200]
    )
    await worker.send(leases)


async def results(stage: Stage) -> None:
    """D10, D11, D12: receipts, and results that come twice."""
    one, two = await stage.worker(), await stage.worker()
    first, second = await one.take(3), await two.take(3)
    answers = [stage.result(lease) for lease in first]
    receipts = await one.results(answers)
    order = [receipt.lease_id for receipt in receipts] == [lease.id for lease in first]
    sound = all(receipt.status == "accepted" for receipt in receipts)
    stage.checks.that(
        "D11", order and sound, f"sound results of {[x.id for x in first]} got {receipts}"[:250]
    )
    for lease in first:
        again = await one.results([stage.result(lease)])
        statuses = [receipt.status for receipt in again]
        stage.checks.that("D12", statuses in (["accepted"], ["dropped"]), f"sent again, {lease.id}: {again}")
    await two.send(second)


async def failures(stage: Stage) -> None:
    """D14: a failed attempt is followed by the next; `Stage.note_leases` compares task and seed."""
    worker = await stage.worker()
    (lease,) = await worker.take(1)
    await worker.fail(lease)
    await _comes_again(stage, lease, "D14", "its attempt failed")


async def _comes_again(stage: Stage, lease: Lease, rule: str, why: str) -> Lease | None:
    """The next attempt of an episode; whatever else comes is answered on the way.

    Another service asks: a dataflow may prefer it to the one that failed the episode.
    """
    worker = await stage.worker()
    for _ in range(50):
        leases = await worker.ask(8, wait_s=0.1)
        again = [x for x in leases if (x.group_id, x.episode_idx) == (lease.group_id, lease.episode_idx)]
        if again:
            stage.checks.that(rule, again[0].attempt == lease.attempt + 1, f"{again[0]} after {lease}"[:250])
            await worker.send(leases)
            return again[0]
        await worker.send(leases)
        if not leases:
            break
    stage.checks.broke(rule, f"episode {lease.group_id}.{lease.episode_idx} never went out again after {why}")
    return None


# --- unsound results ------------------------------------------------------------------------------

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
"""What is wrong with a trajectory, and how it is made so."""


async def unsound(stage: Stage) -> None:
    """D13: every rule of the token columns, broken once; the episode then goes out again and is answered
    well."""
    for what, spoil in SPOILED.items():
        worker = await stage.worker()
        (lease,) = await worker.take(1)
        sound = stage.result(lease)
        assert isinstance(sound.outcome, Episode)
        first, *rest = sound.outcome.trajectories
        spoiled = msgspec.structs.replace(sound.outcome, trajectories=(spoil(first), *rest))
        (receipt,) = await worker.results([EpisodeResult(lease_id=lease.id, outcome=spoiled)])
        is_refused = receipt.status == "invalid" and receipt.reason
        if stage.checks.that("D13", is_refused, f"{what}: the receipt is {receipt}"):
            await _comes_again(stage, lease, "D13", f"an invalid result ({what})")


# --- leaving, and getting lost --------------------------------------------------------------------


async def drain(stage: Stage) -> None:
    """D17."""
    worker = await stage.worker()
    leases = await worker.take(2)
    await worker.drain()
    more = await worker.ask(4)
    stage.checks.that("D17", not more, f"a draining service got {[lease.id for lease in more]}")
    reply = await worker.beat([lease.id for lease in leases])
    stage.checks.that("D17", reply.is_draining, "its heartbeat's answer does not say is_draining")
    statuses = [receipt.status for receipt in await worker.send(leases)]
    stage.checks.that("D17", statuses == ["accepted"] * 2, f"its results got {statuses}")


async def strangers(stage: Stage) -> None:
    """D33: a second service answers a lease of the first, well and badly."""
    holder, stranger = await stage.worker(), await stage.worker()
    (lease,) = await holder.take(1)
    result = stage.result(lease)
    failure = Failure(error_class="Conformance", message="sent by another service")
    for outcome in (result.outcome, failure):
        answer = EpisodeResult(lease_id=lease.id, outcome=outcome)
        body = EpisodeResults(worker_id=stranger.id, results=(answer,))
        (receipt,) = (await stage.desk.ask("POST", "/v1/episodes", Receipts, body)).receipts
        stage.checks.that("D33", receipt.status == "dropped", f"{lease.id}, of another service: {receipt}")
    revoked = (await holder.beat([lease.id])).revoked
    stage.checks.that("D33", not revoked, f"{lease.id} was revoked though only another service answered it")
    (receipt,) = await holder.send((lease,))
    stage.checks.that("D33", receipt.status == "accepted", f"{lease.id}, of its own service: {receipt}")


async def lost_answer(stage: Stage) -> None:
    """D18: the answer with two leases got lost; the service asks again without holding them."""
    worker = await stage.worker()
    lost = await worker.take(2)
    kept = lost.pop()
    await worker.beat([kept.id])
    again = await worker.ask(8, held=[kept.id])
    keys = {(lease.group_id, lease.episode_idx) for lease in again if lease.attempt > 0}
    missing = [x.id for x in lost if (x.group_id, x.episode_idx) not in keys]
    stage.checks.that("D18", not missing, f"{missing}, not named as held, did not go out again")
    held = (kept.group_id, kept.episode_idx)
    stage.checks.that("D18", held not in keys, f"{kept.id} went out again though it is held")
    for lease in lost:
        stage.out.pop(lease.id, None)
    await worker.send([*again, kept])


async def expiry(stage: Stage) -> None:
    """D15 and D16: one service keeps a lease alive by heartbeat, another lets one expire and answers late."""
    alive, silent, taker = await stage.worker(), await stage.worker(), await stage.worker()
    since_s = asyncio.get_running_loop().time()
    (kept,) = await alive.take(1)
    (silenced,) = await silent.take(1)
    again, gap_s = await _next_attempt(stage, (alive, kept), taker, silenced, since_s)
    timeout_s = stage.lease_timeout_s
    if gap_s > timeout_s / 2:
        stage.checks.skip("D15", f"this machine was too slow: {gap_s:.1f} s between two heartbeats")
    if again is None:
        stage.checks.broke("D15", f"{silenced.id} had no heartbeat for {_EXPIRY_SLACK} x {timeout_s} s")
        return
    stage.checks.that("D15", again.attempt == silenced.attempt + 1, f"{again} after {silenced}"[:250])
    (late,) = await silent.send((silenced,))
    stage.checks.that("D16", late.status == "accepted", f"first, and late: {late}")
    (second,) = await taker.send((again,))
    stage.checks.that("D16", second.status == "dropped", f"second, of the next attempt: {second}")
    (receipt,) = await alive.send((kept,))
    if gap_s <= timeout_s / 2:
        revoked = (await alive.beat([kept.id])).revoked if receipt.status != "accepted" else ()
        detail = f"{kept.id}, kept alive by heartbeats, got {receipt} and was revoked: {revoked}"
        stage.checks.that("D15", receipt.status == "accepted", detail)


async def _next_attempt(
    stage: Stage, alive: tuple[PlayedWorker, Lease], taker: PlayedWorker, silenced: Lease, since_s: float
) -> tuple[Lease | None, float]:
    """The silenced lease's next attempt, and the longest time between two heartbeats of the other."""
    loop, (worker, kept) = asyncio.get_running_loop(), alive
    give_up_s = loop.time() + _EXPIRY_SLACK * stage.lease_timeout_s
    beat_s, gap_s = since_s, 0.0
    while loop.time() < give_up_s:
        reply = await worker.beat([kept.id])
        gap_s, beat_s = max(gap_s, loop.time() - beat_s), loop.time()
        if kept.id in reply.revoked and gap_s <= stage.lease_timeout_s / 2:
            stage.checks.broke("D15", f"{kept.id} was revoked though heartbeats name it")
        for lease in await taker.ask(64, wait_s=stage.lease_timeout_s / 20):
            if (lease.group_id, lease.episode_idx) == (silenced.group_id, silenced.episode_idx):
                return lease, gap_s
            await taker.send((lease,))
        await asyncio.sleep(stage.lease_timeout_s / 50)
    return None, gap_s
