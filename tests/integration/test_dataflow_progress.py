"""What rollout services report of unfinished episodes: who may, what is kept, and who gets it."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow import wire
from astraflow.addons.view.status import run_status
from astraflow.addons.view.top import show_status
from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.config import DataflowConfig
from astraflow.errors import RefusedError, WireError
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.types import (
    EpisodeResult,
    Failure,
    Lease,
    LeaseRequest,
    MetricItem,
    PastCompletion,
    Progress,
    ProgressReply,
    ProgressReport,
    ProgressTotals,
    Stream,
    VersionSpan,
)
from astraflow.wire import column
from drivers.dataflow_driver import VOCAB, Run, ScriptedTrainer, ScriptedWorker, make_plan, refused, running


def past(**changes: Any) -> PastCompletion:
    """Three tokens of version 0."""
    sound = PastCompletion(
        policy="actor",
        request="0" * 32,
        token_ids=column([5, 6, 1], "int32"),
        logprobs=column([-0.5, -1.0, -0.25], "float32"),
        versions=(VersionSpan(0, 3, 0),),
        finish_reason="stop",
    )
    return msgspec.structs.replace(sound, **changes)


def plain(completion: PastCompletion) -> dict[str, Any]:
    return msgspec.to_builtins(completion, builtin_types=(bytes,))


async def begun(run: Run, name: str = "w0") -> tuple[ScriptedWorker, Lease]:
    """A service with a lease of training."""
    worker = ScriptedWorker(run.client, name)
    await worker.register()
    (lease,) = await worker.lease(1)
    return worker, lease


async def tell(
    worker: ScriptedWorker, lease: Lease | str, *completions: PastCompletion, before: int = 0
) -> ProgressReply:
    lease_id = lease if isinstance(lease, str) else lease.id
    part = Progress(lease_id=lease_id, num_before=before, completions=completions)
    return await worker.client.tell_progress(worker.id, ProgressReport(parts=(part,)))


async def returned(worker: ScriptedWorker) -> None:
    """The service gives back all its leases."""
    await worker.client.leases(LeaseRequest(worker_id=worker.id, num_free=0, served=(), wait_s=0.0, held=()))


async def earlier(worker: ScriptedWorker, lease: Lease) -> tuple[PastCompletion, ...]:
    return (await worker.client.earlier_progress(worker.id, lease.id)).completions


@pytest.mark.parametrize("http", [False, True])
async def test_the_next_attempt_gets_what_the_lost_one_reported(tmp_path: Path, http: bool) -> None:
    async with running(tmp_path, http=http) as run:
        await ScriptedTrainer(run.client).attach()
        worker, lease = await begun(run)
        first, second, third = (past(request=f"{idx}" * 32) for idx in range(3))
        assert await tell(worker, lease, first) == ProgressReply()
        assert await tell(worker, lease, second, before=1) == ProgressReply()
        assert await tell(worker, lease, third, before=1) == ProgressReply(missing=(lease.id,))
        await returned(worker)
        other, again = await begun(run, "w1")
        assert (again.group_id, again.episode_idx, again.attempt) == (0, 0, 1)
        assert await earlier(other, again) == (first, second)
        assert await tell(other, again, third, before=2) == ProgressReply()
        assert (await run.client.progress()).num_episodes == 1
        await other.send(await other.answer(again))
        assert (await run.client.progress()).num_episodes == 0


async def test_an_attempt_that_failed_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await ScriptedTrainer(run.client).attach()
        worker, lease = await begun(run)
        await tell(worker, lease, past())
        failure = Failure(error_class="Bug", message="as it must")
        await worker.send(EpisodeResult(lease_id=lease.id, outcome=failure))
        other, again = await begun(run, "w1")
        assert again.attempt == 1
        assert await earlier(other, again) == ()


async def test_a_result_that_breaks_a_rule_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """Else what led to it might come back in every attempt."""
    async with running(tmp_path) as run:
        await ScriptedTrainer(run.client).attach()
        worker, lease = await begun(run)
        await tell(worker, lease, past())
        result = await worker.answer(lease)
        broken = msgspec.structs.replace(result.outcome, score=1e30)
        await worker.send(msgspec.structs.replace(result, outcome=broken))
        assert (await run.client.progress()).num_episodes == 0


async def test_an_expired_lease_leaves_what_it_reported(tmp_path: Path) -> None:
    config = DataflowConfig(lease_timeout_s=0.2, heartbeat_s=0.1)
    async with running(tmp_path, config=config) as run:
        await ScriptedTrainer(run.client).attach()
        worker, lease = await begun(run)
        await tell(worker, lease, past())
        other = ScriptedWorker(run.client, "w1")
        await other.register()
        again: Lease | None = None
        while again is None:
            leases = await other.lease(8, wait_s=0.1)
            episodes = {(taken.group_id, taken.episode_idx): taken for taken in leases if taken.attempt}
            again = episodes.get((lease.group_id, lease.episode_idx))
        assert await earlier(other, again) == (past(),)


BROKEN = {
    "no tokens": past(token_ids=b"", logprobs=b"", versions=()),
    "half a token": past(token_ids=b"\5\0\0"),
    "a token beyond the vocabulary": past(token_ids=column([5, VOCAB, 1], "int32")),
    "a negative token": past(token_ids=column([5, -6, 1], "int32")),
    "two logprobs for three tokens": past(logprobs=column([-0.5, -1.0], "float32")),
    "a logprob that is no number": past(logprobs=column([-0.5, float("nan"), -1.0], "float32")),
    "an infinite logprob": past(logprobs=column([-0.5, float("-inf"), -1.0], "float32")),
    "a positive logprob": past(logprobs=column([-0.5, 0.5, -1.0], "float32")),
    "versions of two tokens": past(versions=(VersionSpan(0, 2, 0),)),
    "versions that overlap": past(versions=(VersionSpan(0, 2, 0), VersionSpan(1, 2, 0))),
    "a version that does not exist": past(versions=(VersionSpan(0, 3, 9),)),
    "another policy": past(policy="critic"),
    "a stream that is too short": past(
        streams=(Stream(name="x", dtype="uint8", data=b"\1\1"),),
    ),
    "more tokens than a turn may have": past(
        token_ids=column([5] * 300, "int32"),
        logprobs=column([-1.0] * 300, "float32"),
        versions=(VersionSpan(0, 300, 0),),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
async def test_what_would_harm_the_next_service_is_refused_and_nothing_else(
    tmp_path: Path, what: str
) -> None:
    async with running(tmp_path) as run:
        await ScriptedTrainer(run.client).attach()
        worker = ScriptedWorker(run.client)
        await worker.register()
        bad, good = await worker.lease(2)
        parts = (
            Progress(lease_id=bad.id, num_before=0, completions=(BROKEN[what],)),
            Progress(lease_id=good.id, num_before=0, completions=(past(),)),
            Progress(lease_id=bad.id, num_before=0, completions=(past(),)),
        )
        reply = await run.client.tell_progress(worker.id, ProgressReport(parts=parts))
        assert reply == ProgressReply(refused=(bad.id,))
        assert (await run.client.progress()).num_episodes == 1


async def test_the_status_tells_what_came_of_lost_attempts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, http=True) as run:
        await ScriptedTrainer(run.client).attach()
        worker, lease = await begun(run)
        await returned(worker)
        other, again = await begun(run, "w1")
        result = await other.answer(again)
        metrics = (MetricItem("resumed_tokens", 1234.0, "sum"), MetricItem("resampled_tokens", 5.0, "sum"))
        resumed = msgspec.structs.replace(
            result, outcome=msgspec.structs.replace(result.outcome, metrics=metrics)
        )
        await other.send(resumed)
        await other.send(resumed)
        assert lease.attempt == 0
        status = await run_status(run.url, None)
        assert status.progress == ProgressTotals(num_resumed_tokens=1234, num_resampled_tokens=5)
        assert await asyncio.to_thread(show_status, run.url, None) == 0
    told = (
        "resumed: 1,234 tokens of lost attempts were reused by other services, 5 reported tokens were "
        "sampled again"
    )
    assert told in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "lease_id", ["0.1.0", "99.0.0", "e0.0.0", "x", "", "0.0", "0.0.0.0", "-1.0.0", "0.0.\n"]
)
async def test_a_lease_that_the_service_does_not_hold_is_refused(tmp_path: Path, lease_id: str) -> None:
    async with running(tmp_path) as run:
        await ScriptedTrainer(run.client).attach()
        worker, _ = await begun(run)
        assert await tell(worker, lease_id, past()) == ProgressReply(refused=(lease_id,))
        assert (await run.client.progress()).num_episodes == 0


async def test_another_service_can_neither_change_nor_read_the_progress_of_a_lease(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await ScriptedTrainer(run.client).attach()
        worker, lease = await begun(run)
        await tell(worker, lease, past())
        stranger = ScriptedWorker(run.client, "w1")
        await stranger.register()
        assert await tell(stranger, lease, past(request="f" * 32)) == ProgressReply(refused=(lease.id,))
        assert await earlier(stranger, lease) == ()
        failure = Failure(error_class="Bug", message="of a stranger")
        await stranger.send(EpisodeResult(lease_id=lease.id, outcome=failure))
        assert await earlier(worker, lease) == (past(),)
        handle = (await run.client.status()).workers[0].id
        for worker_id in (handle, f"{handle}.0", "nobody.0.0"):
            part = Progress(lease_id=lease.id, num_before=0, completions=())
            call = run.client.tell_progress(worker_id, ProgressReport(parts=(part,)))
            assert (await refused(call)).code == "unknown_worker"
            assert (await refused(run.client.earlier_progress(worker_id, lease.id))).code == "unknown_worker"


async def test_an_old_attempt_reports_no_more_once_the_next_is_out(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await ScriptedTrainer(run.client).attach()
        worker, lease = await begun(run)
        await returned(worker)
        assert await tell(worker, lease, past()) == ProgressReply(refused=(lease.id,))
        other, again = await begun(run, "w1")
        assert again.attempt == 1
        assert await tell(worker, lease, past()) == ProgressReply(refused=(lease.id,))
        assert await tell(worker, again, past()) == ProgressReply(refused=(again.id,))
        assert await earlier(other, again) == ()


@pytest.mark.parametrize(
    "part",
    [
        {"lease_id": "0.0.0", "num_before": -1, "completions": []},
        {"lease_id": "0.0.0", "num_before": 0.5, "completions": []},
        {"lease_id": "0" * 65, "num_before": 0, "completions": []},
        {"lease_id": "0.0.0", "num_before": 0, "completions": [{}]},
        {"lease_id": "0.0.0", "num_before": 0, "completions": [], "more": 1},
        {"lease_id": "0.0.0", "num_before": 0, "completions": [None]},
        {
            "lease_id": "0.0.0",
            "num_before": 0,
            "completions": [{**plain(past(request="0" * 129))}],
        },
        {
            "lease_id": "0.0.0",
            "num_before": 0,
            "completions": [{**plain(past()), "finish_reason": "bored"}],
        },
    ],
)
async def test_a_malformed_report_is_refused_and_changes_nothing(tmp_path: Path, part: Any) -> None:
    async with running(tmp_path, http=True) as run:
        await ScriptedTrainer(run.client).attach()
        worker, _ = await begun(run)

        class Anything(msgspec.Struct):
            parts: list[Any]

        call = run.calls.call(
            "POST",
            f"/v1/workers/{worker.id}/progress",
            ProgressReply,
            body=Anything([part]),  # type: ignore[arg-type]
        )
        with pytest.raises(WireError):
            await call
        assert (await run.client.progress()).num_episodes == 0


async def test_a_report_beyond_its_size_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await ScriptedTrainer(run.client).attach()
        worker, lease = await begun(run)
        long = past(token_ids=bytes(20 * 2**20), logprobs=bytes(20 * 2**20))
        with pytest.raises(WireError):
            await tell(worker, lease, long)


async def test_a_viewer_sees_the_totals_and_may_report_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await ScriptedTrainer(run.client).attach()
        worker, lease = await begun(run)
        app = run.service.app

        async def as_viewer(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "role": "viewer"}, receive, send)

        viewer = DataflowClient(ServiceClient("http://memory", transport=MemoryTransport(as_viewer)))
        assert (await viewer.progress()).num_episodes == 0
        report = ProgressReport(parts=(Progress(lease_id=lease.id, num_before=0, completions=()),))
        with pytest.raises(RefusedError):
            await viewer.tell_progress(worker.id, report)
        with pytest.raises(RefusedError):
            await viewer.earlier_progress(worker.id, lease.id)


async def test_a_restarted_dataflow_asks_for_all_of_it_again(tmp_path: Path) -> None:
    async with running(tmp_path, make_plan()) as run:
        await ScriptedTrainer(run.client).attach()
        worker, lease = await begun(run)
        await tell(worker, lease, past())
    async with running(tmp_path, make_plan()) as run:
        worker.client = run.client
        second = past(request="1" * 32)
        assert await tell(worker, lease, second, before=1) == ProgressReply(missing=(lease.id,))
        assert await tell(worker, lease, past(), second) == ProgressReply()
        assert await earlier(worker, lease) == (past(), second)


def test_the_items_are_the_same_in_json() -> None:
    report = ProgressReport(parts=(Progress(lease_id="1.0.0", num_before=0, completions=(past(),)),))
    assert wire.decode(wire.encode(report, wire.JSON), ProgressReport, wire.JSON) == report
