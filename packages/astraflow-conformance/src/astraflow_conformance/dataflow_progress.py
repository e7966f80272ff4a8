"""Scenario for a dataflow: what services report about unfinished episodes, and which service gets it."""

from astraflow import wire
from astraflow.types import (
    EarlierProgress,
    Lease,
    PastCompletion,
    Progress,
    ProgressReply,
    ProgressReport,
    VersionSpan,
)
from astraflow_conformance.probe_client import RefusalError
from astraflow_conformance.run_under_test import FakeWorker, RunUnderTest

__all__ = ["progress"]

_NO_SUCH_ROUTE = {404, 405}
_MAX_ASKS = 50
_Episode = tuple[int, int]


async def progress(run: RunUnderTest) -> None:
    """Checks D34: two episodes are reported, then one loses its lease and the other fails."""
    checks = run.checks
    worker = await run.worker()
    lost, failed = await worker.take(2)
    try:
        for lease in (lost, failed):
            await _report(run, worker, lease)
    except RefusalError as err:
        if err.status not in _NO_SUCH_ROUTE:
            raise
        checks.skip("D34", "it keeps nothing of unfinished episodes, as version 1 allows")
        await worker.send((lost, failed))
        return
    await worker.fail(failed)
    await worker.ask(0, held=())  # it says that it no longer holds a lease
    run.out.pop(lost.id, None)
    found = await _next_attempts(run, (_episode(lost), _episode(failed)))
    if len(found) < 2:
        checks.skip("D34", "an episode did not go out again")
        return
    kept = found[_episode(lost)]
    checks.that("D34", kept == (_completion(run),), f"{lost.id} was lost; of it, the next attempt got {kept}")
    kept = found[_episode(failed)]
    checks.that("D34", kept == (), f"{failed.id} failed; of it, the next attempt got {kept}")


async def _report(run: RunUnderTest, worker: FakeWorker, lease: Lease) -> None:
    part = Progress(lease_id=lease.id, num_before=0, completions=(_completion(run),))
    path = f"/v1/workers/{worker.id}/progress"
    await run.client.ask("POST", path, ProgressReply, ProgressReport(parts=(part,)))


async def _next_attempts(
    run: RunUnderTest, episodes: tuple[_Episode, ...]
) -> dict[_Episode, tuple[PastCompletion, ...]]:
    """Returns what another service gets for the next attempts at episodes.

    The service answers all leases that it is granted.
    """
    other = await run.worker()
    found: dict[_Episode, tuple[PastCompletion, ...]] = {}
    for _ in range(_MAX_ASKS):
        leases = await other.ask(8, wait_s=0.1)
        for lease in leases:
            if lease.kind == "train" and lease.attempt and _episode(lease) in episodes:
                path = f"/v1/workers/{other.id}/progress/{lease.id}"
                reply = await run.client.ask("GET", path, EarlierProgress)
                found[_episode(lease)] = reply.completions
        await other.send(leases)
        if len(found) == len(episodes):
            break
    return found


def _episode(lease: Lease) -> _Episode:
    return lease.group_id, lease.episode_idx


def _completion(run: RunUnderTest) -> PastCompletion:
    """Makes a completion of two tokens of the newest version."""
    return PastCompletion(
        policy=run.trainer.policy,
        request="c0" * 16,
        token_ids=wire.column([1, 2], "int32"),
        logprobs=wire.column([-0.5, -1.0], "float32"),
        versions=(VersionSpan(0, 2, run.trainer.newest),),
        finish_reason="stop",
    )
