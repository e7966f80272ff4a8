"""Scenarios for a dataflow from the view of trainers: sessions, versions, batches, commits, crash, end."""

from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from astraflow import wire
from astraflow.types import (
    Batch,
    BatchReply,
    Item,
    LeaseReply,
    LeaseRequest,
    Sample,
    StatusReply,
    StopRequest,
    VersionsReply,
)
from astraflow_conformance.probe_client import RefusalError
from astraflow_conformance.report import AbandonedError
from astraflow_conformance.run_under_test import FakeTrainer, RunUnderTest, same

__all__ = ["accounting", "batches", "commits", "crash", "ending", "fencing", "publishing", "releasing"]


async def publishing(run: RunUnderTest) -> None:
    """Checks D21, D22, and D23: the first versions of a run."""
    for other in run.others:
        await other.attach()
    trainer = run.trainer
    that = run.checks.that
    await trainer.open()
    first = trainer.publication()
    delta = msgspec.structs.replace(first.manifest, kind="delta", base=0)
    wrong = msgspec.structs.replace(first, manifest=delta)
    that("D22", await _refused(trainer, "versions", wrong), "a session that begins with a delta was taken")
    ahead = msgspec.structs.replace(trainer.publication(ahead=2), step=first.step)
    that("D21", await _refused(trainer, "versions", ahead), f"{ahead.manifest.version} was taken, not next")
    await trainer.publish_next()
    again = trainer.publication(ahead=0)
    refusal = await run.client.refused("POST", trainer.path("versions"), again)
    that("D21", refusal is None, f"posting the newest manifest again: {refusal}")
    await trainer.attach()
    for after in (-1, trainer.newest - 1, trainer.newest):
        reply = await run.client.ask(
            "GET", trainer.path("versions"), VersionsReply, params={"after": str(after), "pinned": "no"}
        )
        found = [manifest.version for manifest in reply.manifests]
        expected = list(range(after + 1, trainer.newest + 1))
        that(
            "D23",
            found == expected[-len(found) :]
            and bool(found) == bool(expected)
            and reply.newest == trainer.newest,
            f"after {after} of newest {trainer.newest}: {found}, newest {reply.newest}",
        )
        for manifest in reply.manifests:
            mine = trainer.published[manifest.version]
            bare = msgspec.structs.replace(manifest, sources=mine.sources)
            that("D23", same(bare, mine), f"version {manifest.version} is not as it was published")


async def _refused(trainer: FakeTrainer, what: str, body: Item) -> bool:
    return await trainer.client.refused("POST", trainer.path(what), body) is not None


async def fencing(run: RunUnderTest) -> None:
    """Checks D20: every request of a session that was replaced is refused."""
    trainer = run.trainer
    client = run.client
    old = trainer.session
    await trainer.attach(old.step)
    params = {"epoch": str(old.epoch), "wait_s": "0"}
    publication = trainer.publication(ahead=0, epoch=old.epoch)
    asks: dict[str, Awaitable[RefusalError | None]] = {
        "batch": client.refused("GET", trainer.path(f"batches/{old.step}"), params=params),
        "publish": client.refused("POST", trainer.path("versions"), publication),
        "commit": client.refused("POST", trainer.path("commit"), trainer.commit(old.step, epoch=old.epoch)),
        "release": client.refused(
            "POST", trainer.path("release"), trainer.release(old.step, epoch=old.epoch)
        ),
    }
    for what, asked in asks.items():
        refusal = await asked
        fenced = refusal is not None and refusal.status == 409 and refusal.code in {"fenced", ""}
        run.checks.that("D20", fenced, f"{what} under epoch {old.epoch}: {refusal or 'success'}")


async def batches(run: RunUnderTest) -> None:
    """Checks D24, D25, and D26: the batch of a step, its slices, and its content."""
    trainer = run.trainer
    step = trainer.done
    batch = await run.fill(step)
    again = await trainer.batch(step)
    run.checks.that(
        "D24", again is not None and _same_batch(batch, again), f"step {step} differs when asked again"
    )
    await _slices(run, batch)
    _content(run, batch)
    await trainer.attach(step)
    later = await trainer.batch(step)
    run.checks.that(
        "D24", later is not None and _same_batch(batch, later), f"step {step} differs in a later session"
    )


def _same_batch(left: Batch, right: Batch) -> bool:
    return same(left.samples, right.samples) and same(left.totals, right.totals)


async def _slices(run: RunUnderTest, batch: Batch) -> None:
    slices = [await run.trainer.batch(batch.step, rank=rank, world=2) for rank in range(2)]
    parts = [part for part in slices if part is not None]
    keys = [_key(sample) for part in parts for sample in part.samples]
    whole = sorted(_key(sample) for sample in batch.samples)
    detail = f"step {batch.step}: two slices hold {len(keys)} samples, the batch {len(whole)}"
    run.checks.that("D25", sorted(keys) == whole, detail)
    for part in parts:
        detail = f"rank {part.rank}: totals {part.totals}, the batch's {batch.totals}"
        run.checks.that("D25", same(part.totals, batch.totals), detail)
    num_trained = sum(_num_trained(sample) for sample in batch.samples)
    totals = batch.totals
    counts = (totals.num_samples, totals.num_trained_tokens)
    expected = (len(batch.samples), num_trained)
    run.checks.that(
        "D25", counts == expected, f"totals say {counts} samples and tokens, there are {expected}"
    )


def _key(sample: Sample) -> tuple[int, int, bytes]:
    return sample.group_id, sample.episode_idx, sample.trajectory.token_ids


def _num_trained(sample: Sample) -> int:
    return int(wire.array(sample.trajectory.mask, "uint8").sum())


def _content(run: RunUnderTest, batch: Batch) -> None:
    that = run.checks.that
    policy = run.trainer.policy
    groups: dict[int, set[int]] = {}
    for sample in batch.samples:
        groups.setdefault(sample.group_id, set()).add(sample.episode_idx)
        sent = run.sent.get((sample.group_id, sample.episode_idx, policy))
        where = f"group {sample.group_id} episode {sample.episode_idx}"
        that("D26", sent is not None and same(sent, sample.trajectory), f"{where} is not as it was accepted")
        covered = np.zeros(len(sample.trajectory.mask), bool)
        for span in sample.advantages:
            covered[span.start : span.end] = np.isfinite(span.value)
        mask = wire.array(sample.trajectory.mask, "uint8").view(bool)
        that("D26", not (mask & ~covered).any(), f"{where} has trained tokens without an advantage")
    accepted: dict[int, set[int]] = {}
    for group_id, episode_idx, of in run.sent:
        if of == policy:
            accepted.setdefault(group_id, set()).add(episode_idx)
    torn = [group for group, episodes in groups.items() if episodes != accepted.get(group)]
    that("D26", not torn, f"groups {torn[:5]} are not whole")


async def commits(run: RunUnderTest) -> None:
    """Checks D22, D24, and D27: commits, and the batch of a committed step that is repeated."""
    trainer = run.trainer
    client = run.client
    step = trainer.done
    batch = await run.fill(step)
    early = trainer.commit(step, version=trainer.newest + 1)
    run.checks.that(
        "D27", await _refused(trainer, "commit", early), "a step was committed before its version"
    )
    unknown = msgspec.structs.replace(trainer.publication().manifest, kind="delta", base=10**6)
    wrong = msgspec.structs.replace(trainer.publication(), manifest=unknown)
    run.checks.that("D22", await _refused(trainer, "versions", wrong), "a delta on an unknown base was taken")
    if run.checks.is_broken("D22"):
        # The dataflow may have taken the wrong version, so only a new session tells which number is next.
        await trainer.open(step)
        await trainer.publish_next()
    await trainer.publish_next()
    skipping = trainer.commit(step + 1)
    run.checks.that(
        "D27", await _refused(trainer, "commit", skipping), f"step {step + 1} was committed before {step}"
    )
    await client.ask("POST", trainer.path("commit"), None, trainer.commit(step))
    again = await client.refused("POST", trainer.path("commit"), trainer.commit(step))
    run.checks.that("D27", again is None, f"step {step} committed again: {again}")
    await trainer.attach(step)
    redo = await trainer.batch(step)
    run.checks.that("D24", redo is not None and _same_batch(batch, redo), f"step {step}, done again, differs")
    await trainer.publish_next()
    await client.ask("POST", trainer.path("commit"), None, trainer.commit(step))


async def releasing(run: RunUnderTest) -> None:
    """Checks D28: released batches are gone, and no session begins before them."""
    trainer = run.trainer
    client = run.client
    done = trainer.done
    ahead = trainer.release(done + 1)
    run.checks.that("D28", await _refused(trainer, "release", ahead), "a step was released before its commit")
    await client.ask("POST", trainer.path("release"), None, trainer.release(done))
    await client.ask("POST", trainer.path("release"), None, trainer.release(done))
    params = {"epoch": str(trainer.session.epoch), "wait_s": "0"}
    gone = await client.refused("GET", trainer.path(f"batches/{done - 1}"), params=params)
    run.checks.that("D28", gone is not None, f"step {done - 1} was served after its release")
    try:
        await trainer.open(done - 1)
    except RefusalError:
        run.checks.kept("D28")
    else:
        run.checks.broke("D28", f"a session began at {done - 1}, before the {done} released steps")
    await trainer.attach(done)


async def accounting(run: RunUnderTest) -> None:
    """Checks D30: the fates of each policy add up to the groups that were drawn."""
    status = await run.client.ask("GET", "/v1/status", StatusReply)
    for policy in status.policies:
        fates = msgspec.structs.asdict(policy.fates)
        drawn = fates.pop("drawn")
        run.checks.that(
            "D30", drawn == sum(fates.values()) > 0, f"{policy.name}: drawn {drawn}, fates {fates}"
        )


async def crash(run: RunUnderTest, restart: Callable[[], Awaitable[None]]) -> None:
    """Checks D29: leases, results, versions, and batches survive a crash."""
    trainer = run.trainer
    worker = await run.worker()
    step = trainer.done
    batch = await run.fill(step)
    answered, held = await worker.take(2)
    await worker.send((answered,))
    await restart()
    that = run.checks.that
    (again,) = await worker.results([run.result(answered)])
    that("D29", again.status in {"accepted", "dropped"}, f"a result from before the crash: {again}")
    (receipt,) = await worker.send((held,))
    that("D29", receipt.status == "accepted", f"a lease from before the crash: {receipt}")
    after = await trainer.batch(step)
    that("D29", after is not None and _same_batch(batch, after), f"step {step} differs after the crash")
    reply = await run.client.ask("GET", trainer.path("versions"), VersionsReply)
    that("D29", reply.newest == trainer.newest, f"newest version {reply.newest}, it was {trainer.newest}")
    await trainer.publish_next()
    await run.client.ask("POST", trainer.path("commit"), None, trainer.commit(step))


async def ending(run: RunUnderTest) -> None:
    """Checks D32: after the end of a run, there are no batches and no leases."""
    refusal = await run.client.refused(
        "POST", "/v1/stop", StopRequest(reason="the conformance kit has seen enough")
    )
    if refusal is not None:
        raise AbandonedError(f"the run cannot be ended with this token: {refusal}")
    that = run.checks.that
    trainer = run.trainer
    params = {"epoch": str(trainer.session.epoch), "wait_s": "25"}
    reply = await run.client.ask("GET", trainer.path(f"batches/{trainer.done}"), BatchReply, params=params)
    over = {"finished", "failed"}
    that(
        "D32", reply.batch is None and reply.state in over, f"a batch, or state {reply.state}, after the end"
    )
    worker = await run.worker()
    asks = LeaseRequest(worker_id=worker.id, num_free=4, served=tuple(run.served()), wait_s=25.0)
    leases = await run.client.ask("POST", "/v1/leases", LeaseReply, asks)
    that("D32", not leases.leases and leases.state in over, f"leases, or state {leases.state}, after the end")
