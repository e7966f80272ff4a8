"""The dataflow service as its callers see it: real app, real journal, in memory and on a real port."""

import asyncio
import base64
from pathlib import Path

import aiohttp
import msgspec
import pytest

from astraflow import wire
from astraflow.addons.view.sample_episodes import load_transcripts
from astraflow.algorithms.filters import TruncatedFilter
from astraflow.dataflow.audit import audit
from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.config import DataflowConfig
from astraflow.errors import FencedError, RefusedError, UnavailableError, VersionMismatchError, WireError
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.service.server import HttpServer, TokenAuth
from astraflow.service.worker_ids import handle_of
from astraflow.types import (
    BatchReply,
    Episode,
    EpisodeResult,
    EvalsReply,
    Failure,
    Fingerprints,
    Heartbeat,
    Lease,
    LeaseReply,
    LeaseRequest,
    Load,
    PushTasks,
    Receipts,
    RegisterWorker,
    ServedVersions,
    SessionRequest,
    StatusReply,
    Task,
    VersionsReply,
    WaitReason,
)
from astraflow.types.waits import PERSON, POOL, RUN, SILENT, Party
from drivers.dataflow_driver import (
    Run,
    ScriptedTrainer,
    ScriptedWorker,
    make_episode,
    make_plan,
    make_trajectory,
    play_run,
    refused,
    running,
)

TRAINER = Party(kind="trainer", name="actor")
UNPUBLISHED = WaitReason(kind="unpublished", policy="actor", version=0)


async def ready(run: Run) -> tuple[ScriptedTrainer, ScriptedWorker]:
    """A trainer with version 0 published, and a registered rollout service."""
    trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
    await trainer.attach()
    await worker.register()
    return trainer, worker


async def answer_all(worker: ScriptedWorker, leases: tuple[Lease, ...]) -> Receipts:
    return await worker.send(*[await worker.answer(lease) for lease in leases])


@pytest.mark.parametrize("http", [False, True])
async def test_a_whole_run_of_two_policies_with_evaluation_ends_and_its_audit_holds(
    tmp_path: Path, http: bool
) -> None:
    plan = make_plan(policies=("solver", "verifier"), num_steps=3, eval_tasks=3)
    async with running(tmp_path, plan, http=http) as run:
        await play_run(run, policies=("solver", "verifier"))
        status = await run.client.status()
        assert (status.state, [policy.step for policy in status.policies]) == ("finished", [3, 3])
        assert [record.step for record in await run.client.steps("solver", after=0)] == [1, 2]
        evals = await run.client.evals()
        assert {record.version for record in evals if record.policy == "solver"} == {0, 2, 3}
        assert all(record.num_samples == 3 for record in evals)
    report = audit(tmp_path)
    assert report.problems == ()
    assert [policy.fates.trained for policy in report.policies] == [12, 12]
    assert len(load_transcripts(tmp_path, "eval")) == 3 * len(evals)
    assert {row.group_id for row, _ in load_transcripts(tmp_path, "train")} == {0}


async def test_a_lease_request_waits_for_the_first_version_and_wakes_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        worker = ScriptedWorker(run.client)
        await worker.register()
        request = LeaseRequest(
            worker_id=worker.id, num_free=2, served=(ServedVersions(policy="actor", versions=(0,)),)
        )
        waiting = asyncio.create_task(run.client.leases(request))
        async with asyncio.timeout(2):
            # The status has no event to wait for.
            while not (found := [w for w in (await run.client.status()).waits if w.who.name == "w0"]):  # noqa: ASYNC110
                await asyncio.sleep(0)
        (wait,) = found
        assert (wait.whom, wait.reasons) == (TRAINER, (UNPUBLISHED,))
        await ScriptedTrainer(run.client).attach()
        async with asyncio.timeout(2):
            assert len((await waiting).leases) == 2


async def test_a_lease_request_without_leases_says_why(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        worker = ScriptedWorker(run.client)
        await worker.register()
        request = LeaseRequest(worker_id=worker.id, num_free=2, served=(), wait_s=0.0)
        reply = await run.client.leases(request)
        assert reply.leases == ()
        assert reply.waits_for == (UNPUBLISHED,)


async def test_a_batch_request_wakes_when_the_last_group_completes(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        trainer, worker = await ready(run)
        waiting = asyncio.create_task(run.client.batch("actor", 0, epoch=trainer.session.epoch))
        leases = await worker.lease(8)
        await answer_all(worker, leases[:-1])
        assert not waiting.done()
        await answer_all(worker, leases[-1:])
        async with asyncio.timeout(2):
            batch = await waiting
        assert batch is not None
        assert (batch.totals.num_groups, batch.totals.num_samples, len(batch.samples)) == (4, 8, 8)


async def test_a_batch_is_the_same_for_ever_and_ranks_share_it(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        trainer, worker = await ready(run)
        await answer_all(worker, await worker.lease(8))
        epoch = trainer.session.epoch
        whole = await run.client.batch("actor", 0, epoch=epoch)
        assert await run.client.batch("actor", 0, epoch=epoch) == whole
        assert whole is not None
        slices = [await run.client.batch("actor", 0, epoch=epoch, rank=rank, world=3) for rank in range(3)]
        parts = [sample for part in slices if part is not None for sample in part.samples]
        assert sorted(parts, key=lambda s: (s.group_id, s.episode_idx)) == list(whole.samples)
        with pytest.raises(WireError, match="rank 3 of world 3"):
            await run.client.batch("actor", 0, epoch=epoch, rank=3, world=3)


async def test_a_trainer_hears_which_answers_a_filter_masked_and_the_audit_holds(tmp_path: Path) -> None:
    plan = make_plan(num_steps=1, group_size=3, normalize="whiten", filters=(TruncatedFilter(action="mask"),))
    async with running(tmp_path, plan) as run:
        trainer, worker = await ready(run)
        for lease in await worker.lease(12):
            reason = "length" if lease.episode_idx == 2 else "stop"
            trajectory = msgspec.structs.replace(
                make_trajectory(reward=float(lease.episode_idx == 1)), finish_reason=reason
            )
            await worker.send(EpisodeResult(lease_id=lease.id, outcome=make_episode(trajectory)))
        batch = await run.client.batch("actor", 0, epoch=trainer.session.epoch)
        assert batch is not None
        for sample in batch.samples:
            is_masked = sample.trajectory.finish_reason == "length"
            assert sample.zeroed_by == ("filter" if is_masked else "")
            assert (sample.advantages[0].value == 0.0) == is_masked
        assert await trainer.train_step(0)
    report = audit(tmp_path)
    assert report.ok
    assert report.policies[0].fates.trained == 4


async def test_versions_wake_on_publication_and_on_a_pin(tmp_path: Path) -> None:
    async with running(tmp_path, make_plan(eval_tasks=2)) as run:
        first = asyncio.create_task(run.client.versions("actor", after=-1))
        trainer = ScriptedTrainer(run.client)
        await trainer.attach()
        async with asyncio.timeout(2):
            reply = await first
            assert (reply.newest, [m.version for m in reply.manifests]) == (0, [0])
            if not reply.pinned:
                reply = await run.client.versions("actor", after=0)
        assert reply.pinned == (0,)
        assert (await run.client.versions("actor", after=0, wait_s=0)).manifests == ()


async def test_json_and_msgpack_give_the_same(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        trainer, worker = await ready(run)
        (*leases,) = await worker.lease(8)
        transport = MemoryTransport(run.service.app)
        results = [await worker.answer(lease) for lease in leases]
        body = msgspec.json.encode({"worker_id": worker.id, "results": results})
        json_headers = {"content-type": "application/json", "accept": "application/json"}
        reply = await transport.request("POST", "/v1/episodes", headers=json_headers, body=body, timeout_s=5)
        receipts = msgspec.json.decode(reply.body, type=Receipts).receipts
        assert {receipt.status for receipt in receipts} == {"accepted"}
        target = f"/v1/policies/actor/batches/0?epoch={trainer.session.epoch}"
        plain = await transport.request("GET", target, headers=json_headers, body=b"", timeout_s=5)
        packed = await transport.request(
            "GET", target, headers={"accept": wire.MSGPACK}, body=b"", timeout_s=5
        )
        assert plain.media_type == wire.JSON
        one = wire.decode(plain.body, BatchReply, wire.JSON)
        assert one == wire.decode(packed.body, BatchReply)
        assert one.batch is not None
        outcome = results[0].outcome
        assert isinstance(outcome, Episode)
        sent = outcome.trajectories[0]
        assert one.batch.samples[0].trajectory == sent
        raw = msgspec.json.decode(plain.body)["batch"]["samples"][0]["trajectory"]
        assert base64.b64decode(raw["token_ids"]) == sent.token_ids


async def test_results_are_idempotent_and_late_ones_are_dropped(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        _, worker = await ready(run)
        (*leases,) = await worker.lease(8)
        result = await worker.answer(leases[0])
        first, again = await worker.send(result), await worker.send(result)
        assert (first.receipts[0].status, again.receipts[0].status) == ("accepted", "accepted")
        await answer_all(worker, tuple(leases[1:]))
        late = await worker.send(result)
        assert (late.receipts[0].status, "complete" in late.receipts[0].reason) == ("dropped", True)
        (policy,) = (await run.client.status()).policies
        assert policy.fates.live == policy.fates.drawn == 4
    report = audit(tmp_path)
    assert (report.ok, report.num_results, report.num_dropped) == (True, 8, 1)


async def test_an_invalid_result_is_receipted_and_its_episode_goes_out_again(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        _, worker = await ready(run)
        good, bad, *_ = await worker.lease(8)
        broken = msgspec.structs.replace(make_trajectory(), mask=bytes(3))
        receipts = await worker.send(
            EpisodeResult(lease_id=bad.id, outcome=make_episode(make_trajectory(), broken)),
            await worker.answer(good),
        )
        assert [receipt.status for receipt in receipts.receipts] == ["invalid", "accepted"]
        assert receipts.receipts[0].reason == "group 0/trajectory 1: 3 mask entries for 7 tokens"
        (retry,) = await worker.lease(1)
        assert (retry.episode_idx, retry.attempt) == (bad.episode_idx, 1)
    assert audit(tmp_path).num_failed_attempts == 1


async def test_a_failure_is_retried_and_then_fails_its_group(tmp_path: Path) -> None:
    async with running(tmp_path, make_plan(max_attempts=2)) as run:
        _, worker = await ready(run)
        failure = Failure(error_class="timeout", message="too slow")
        for _ in range(2):
            (lease,) = await worker.lease(1)
            await worker.send(EpisodeResult(lease_id=lease.id, outcome=failure))
        (policy,) = (await run.client.status()).policies
        assert policy.fates.failed == 1


async def test_a_result_of_an_unknown_lease_does_not_spoil_the_others(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        _, worker = await ready(run)
        (lease,) = await worker.lease(1)
        stray = EpisodeResult(lease_id="77.0.0", outcome=make_episode(make_trajectory()))
        receipts = (await worker.send(stray, await worker.answer(lease))).receipts
        assert [receipt.status for receipt in receipts] == ["invalid", "accepted"]
        assert "never issued" in receipts[0].reason


async def test_an_older_session_is_fenced(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        old, _ = await ready(run)
        new = ScriptedTrainer(run.client)
        await new.attach()
        assert new.session.epoch > old.session.epoch
        with pytest.raises(FencedError):
            await run.client.batch("actor", 0, epoch=old.session.epoch)
        with pytest.raises(FencedError):
            await old.publish(2, 1)


async def test_a_redone_step_gets_the_same_samples_and_is_counted(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        trainer, worker = await ready(run)
        await answer_all(worker, await worker.lease(8))
        before = await run.client.batch("actor", 0, epoch=trainer.session.epoch)
        await trainer.commit(0)
        again = ScriptedTrainer(run.client)
        await again.attach(durable_step=0)
        after = await run.client.batch("actor", 0, epoch=again.session.epoch)
        assert before is not None
        assert after is not None
        assert (after.samples, after.is_redo, before.is_redo) == (before.samples, True, False)
        await again.commit(0)
        await again.release(1)
        (policy,) = (await run.client.status()).policies
        assert (policy.redone_steps, policy.step, policy.durable_step) == (1, 1, 1)
        error = await refused(run.client.batch("actor", 0, epoch=again.session.epoch))
        assert error.code == "released"
    report = audit(tmp_path)
    assert (report.ok, report.policies[0].redone_steps) == (True, 1)


async def test_silent_leases_and_services_expire_and_go_out_again(tmp_path: Path) -> None:
    config = DataflowConfig(lease_timeout_s=0.6, heartbeat_s=0.05)
    async with running(tmp_path, config=config) as run:
        _, silent = await ready(run)
        (lost,) = await silent.lease(1)
        other = ScriptedWorker(run.client, "w1")
        await other.register()
        served = await other.served()
        request = LeaseRequest(worker_id=other.id, num_free=1, served=served, wait_s=0.1)
        got: list[Lease] = []
        while not any(lease.attempt for lease in got):
            await other.beat(*[lease.id for lease in got])
            got += (await run.client.leases(request)).leases
        retry = next(lease for lease in got if lease.attempt)
        assert (retry.group_id, retry.episode_idx) == (lost.group_id, lost.episode_idx)
        result = EpisodeResult(lease_id=lost.id, outcome=make_episode(make_trajectory()))
        assert (await other.send(result)).receipts[0].status == "dropped"
        assert (await silent.send(result)).receipts[0].status == "accepted"
        async with asyncio.timeout(3):
            while len((await run.client.status()).workers) > 1:
                await other.beat()
                await asyncio.sleep(0.02)
        assert (await refused(silent.beat())).code == "unknown_worker"


async def test_a_service_that_joins_again_is_listed_once_and_its_lost_leases_go_out_at_once(
    tmp_path: Path,
) -> None:
    config = DataflowConfig(lease_timeout_s=20.0, heartbeat_s=0.05)
    async with running(tmp_path, config=config) as run:
        _, killed = await ready(run)
        (lost,) = await killed.lease(1)
        again = ScriptedWorker(run.client, "w0")
        await again.register()
        async with asyncio.timeout(5):
            while len((status := await run.client.status()).workers) > 1:
                assert [wait.whom.name for wait in status.waits if wait.has(SILENT)] in ([], ["w0"])
                await again.beat()
                await asyncio.sleep(0.02)
        served = await again.served()
        request = LeaseRequest(worker_id=again.id, num_free=1, served=served, wait_s=0.1)
        (lease,) = (await run.client.leases(request)).leases
        assert (lease.group_id, lease.episode_idx, lease.attempt) == (lost.group_id, lost.episode_idx, 1)


async def test_a_silent_service_is_named_in_the_log_and_in_the_status_until_it_beats_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = DataflowConfig(lease_timeout_s=30.0, heartbeat_s=0.05)
    async with running(tmp_path, config=config) as run:
        _, worker = await ready(run)
        async with asyncio.timeout(10):
            while "no sign of life for" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (
            f"of 1 rollout service (w0 {handle_of(worker.id)}); stopped, hanging, or cut off" in caplog.text
        )
        assert [w.whom.name for w in (await run.client.status()).waits if w.has(SILENT)] == ["w0"]
        await worker.beat()
        assert not [w for w in (await run.client.status()).waits if w.has(SILENT)]


async def test_services_that_fall_silent_together_are_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = DataflowConfig(lease_timeout_s=1.4, heartbeat_s=0.3)
    async with running(tmp_path, config=config) as run:
        await ready(run)
        others = [ScriptedWorker(run.client, f"w{number}") for number in range(1, 40)]
        await asyncio.gather(*(worker.register() for worker in others))
        async with asyncio.timeout(20):
            while (await run.client.status()).workers:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    told = [
        record.getMessage() for record in caplog.records if "silent" in record.msg or "no sign" in record.msg
    ]
    assert len(told) == 2, told
    assert all("40 rollout services (w" in line and len(line) < 300 for line in told), told


async def test_a_status_before_anybody_joined_says_so_and_counts_from_the_start(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        status = await run.client.status()
        (wait,) = status.waits
        assert (wait.who, wait.whom) == (RUN, TRAINER)
        assert wait.reasons == (WaitReason(kind="not_attached", policy="actor"),)
        assert 0.0 <= status.now_s - wait.since_s < 60.0
        await ScriptedTrainer(run.client).attach()
        (wait,) = (await run.client.status()).waits
        groups = WaitReason(kind="groups", policy="actor", num=0, total=4)
        assert wait.reasons == (groups, WaitReason(kind="no_service"))


async def test_a_trainer_that_asks_for_nothing_is_named_with_its_last_request(tmp_path: Path) -> None:
    config = DataflowConfig(heartbeat_s=0.05)
    async with running(tmp_path, config=config) as run:
        trainer, worker = await ready(run)
        async with asyncio.timeout(10):
            while (wait := (await run.client.status()).waits[-1]).whom != TRAINER:
                await worker.beat()
                await asyncio.sleep(0.02)
            assert wait.who == RUN
            assert [(reason.kind, reason.name) for reason in wait.reasons] == [("not_asking", "publish")]
            asking = asyncio.create_task(run.client.batch("actor", 0, epoch=trainer.session.epoch))
            while (status := await run.client.status()).waits[-1].whom != POOL:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            (policy,) = status.policies
            assert (policy.trainer_request, policy.trainer_seen_s) == ("publish", status.now_s)
            asking.cancel()


async def test_heartbeats_keep_leases_and_revoke_what_is_over(tmp_path: Path) -> None:
    config = DataflowConfig(lease_timeout_s=0.6, heartbeat_s=0.05)
    async with running(tmp_path, config=config) as run:
        _, worker = await ready(run)
        kept, ended = (await worker.lease(2))[:2]
        await worker.send(await worker.answer(ended))
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 1.0
        while loop.time() < until_s:
            assert await worker.beat(kept.id, ended.id) == (ended.id,)
            await asyncio.sleep(0.05)
        (status,) = (await run.client.status()).workers
        assert (status.num_leases, status.load.num_running, status.name) == (1, 2, "w0")


async def refuse(by: ScriptedWorker, version: int = 0) -> str:
    """A heartbeat of a service that cannot install a version. Returns the run's state."""
    reason = WaitReason(kind="weights_failed", policy="actor", version=version, detail="tensor w is missing")
    beat = Heartbeat(lease_ids=(), load=Load(waits_for=(reason,)))
    return (await by.client.heartbeat(by.id, beat)).state


async def test_a_service_that_leaves_cannot_end_the_run_with_a_version_that_it_refuses(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as run:
        _, worker = await ready(run)
        assert await worker.lease(1)
        await run.client.drain(worker.id)
        assert await refuse(worker) == "running"
        assert (await run.client.status()).state == "running"


async def test_a_version_that_no_service_can_install_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        _, worker = await ready(run)
        other = ScriptedWorker(run.client, "w1")
        await other.register()
        leaving = ScriptedWorker(run.client, "w2")
        await leaving.register()
        assert await leaving.lease(1)
        await run.client.drain(leaving.id)

        assert await refuse(other) == "running"  # the first service may still install it
        assert await refuse(worker, version=1) == "running"
        await refuse(worker)
        status = await run.client.status()
        assert status.state == "failed"
        assert status.reason == ("no rollout service can install version 0 of actor: tensor w is missing")


async def test_a_draining_service_finishes_what_it_has_and_leaves(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        _, worker = await ready(run)
        (lease,) = await worker.lease(1)
        await run.client.drain(worker.id)
        assert await worker.lease(4) == ()
        await worker.send(await worker.answer(lease))
        assert (await run.client.status()).workers == ()
        reply = await run.client.heartbeat(worker.id, Heartbeat(lease_ids=("0.1.0",), load=Load()))
        assert (reply.is_draining, reply.revoked) == (True, ("0.1.0",))
        await run.client.drain(worker.id)


async def test_advice_counts_the_services_that_stay(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await ready(run)
        leaving = ScriptedWorker(run.client, "w1")
        await leaving.register()
        assert await leaving.lease(1)
        assert (await run.client.status()).scaling.num_services == 2
        await run.client.drain(leaving.id)  # its lease is still running
        status = await run.client.status()
        assert [w.is_draining for w in status.workers] == [False, True]
        assert status.scaling.num_services == 1


async def test_a_service_with_the_wrong_model_is_told_what_differs(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        request = RegisterWorker(
            name="w0",
            hosts=("actor",),
            engine="torch",
            num_slots=1,
            fingerprints=Fingerprints(recipe="r1", models={"actor": "model-other"}),
        )
        error = await refused(run.client.register(request))
        assert error.code == "fingerprint"
        assert "its model of policy 'actor' is model-other, but the run's is model-actor" in str(error)
        session = SessionRequest(
            trainer_id="t", durable_step=0, fingerprints=Fingerprints(recipe="another recipe")
        )
        error = await refused(run.client.attach("actor", session))
        assert "its recipe is another recipe, but the run's is r1" in str(error)
        with pytest.raises(VersionMismatchError, match="speaks protocol 99"):
            await run.client.register(msgspec.structs.replace(request, protocol=99))
        hosting = msgspec.structs.replace(request, hosts=("critic",), fingerprints=Fingerprints())
        assert (await refused(run.client.register(hosting))).code == "unknown_policy"


async def test_a_policy_that_is_not_trained_here_is_named(tmp_path: Path) -> None:
    async with running(tmp_path, frozen=("judge",)) as run:
        error = await refused(run.client.versions("judge", after=-1))
        assert (error.code, error.status) == ("unknown_policy", 404)
        assert "trained: actor" in str(error)


async def test_trajectories_of_frozen_policies_are_not_stored(tmp_path: Path) -> None:
    async with running(tmp_path, frozen=("judge",)) as run:
        trainer = ScriptedTrainer(run.client)
        await trainer.attach()
        worker = ScriptedWorker(run.client, hosts=("actor",))
        worker.hosts = ("actor", "judge")
        await worker.register()
        worker.hosts = ("actor",)
        for lease in await worker.lease(8):
            episode = make_episode(
                make_trajectory(reward=float(lease.episode_idx)), make_trajectory(policy="judge")
            )
            receipts = await worker.send(EpisodeResult(lease_id=lease.id, outcome=episode))
            assert receipts.receipts[0].status == "accepted"
        batch = await run.client.batch("actor", 0, epoch=trainer.session.epoch)
        assert batch is not None
        assert {sample.trajectory.policy for sample in batch.samples} == {"actor"}


async def test_pushed_tasks_are_drawn_first(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        _, worker = await ready(run)
        task = Task(id="mine/1", source="mine", prompt="Say hello.")
        reply = await run.client.push_tasks(PushTasks(tasks=(task, task)))
        assert (reply.num_accepted, reply.num_known) == (1, 1)
        (lease, *_) = await worker.lease(2)
        assert lease.task == task


async def test_stop_ends_every_wait_and_cancels_what_is_live(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        trainer, worker = await ready(run)
        await worker.lease(2)
        waiting = asyncio.create_task(run.client.batch("actor", 0, epoch=trainer.session.epoch))
        await asyncio.sleep(0)
        await run.client.stop("enough", is_failure=True)
        async with asyncio.timeout(2):
            assert await waiting is None
        status = await run.client.status()
        assert (status.state, status.reason, status.policies[0].fates.cancelled) == ("failed", "enough", 1)
        assert (await run.client.run()).state == "failed"
    assert audit(tmp_path).ok


async def test_a_parked_caller_is_answered_when_the_service_stops(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        versions = asyncio.create_task(run.client.versions("actor", after=-1))
        steps = asyncio.create_task(run.client.steps("actor", wait_s=20))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not versions.done()
    async with asyncio.timeout(2):
        assert isinstance(await versions, VersionsReply)
        assert await steps == ()


async def test_tokens_carry_roles(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        app = TokenAuth(run.service.app, {"w-token": "worker", "v-token": "viewer"})

        def client(token: str) -> DataflowClient:
            return DataflowClient(ServiceClient("http://x", token=token, transport=MemoryTransport(app)))

        assert isinstance(await client("v-token").status(), StatusReply)
        assert (await refused(client("").status())).status == 401
        assert (await refused(client("wrong").status())).status == 401
        error = await refused(client("v-token").stop("no"))
        assert (error.status, error.code) == (403, "forbidden")
        assert (await refused(client("w-token").batch("actor", 0, epoch=1))).status == 403
        assert (await client("").health()).state == "running"


async def test_malformed_requests_get_a_clear_400(tmp_path: Path) -> None:
    async with running(tmp_path, http=True) as run, aiohttp.ClientSession() as session:
        for method, path, body, text in (
            ("POST", "/v1/leases", b'{"worker_id": "w0"}', "missing required field `num_free`"),
            ("POST", "/v1/episodes", b"not json", "EpisodeResults"),
            ("POST", "/v1/stop", b'{"reason": "x", "why": 1}', "unknown field `why`"),
            ("GET", "/v1/policies/actor/batches/0", b"", "query parameter epoch is missing"),
            ("GET", "/v1/policies/actor/versions?after=x", b"", "after='x' must be an integer"),
            ("GET", "/v1/policies/actor/versions?wait_s=nan", b"", "wait_s='nan' must be a finite"),
            ("GET", "/v1/policies/actor/versions?wait_s=soon", b"", "wait_s='soon' must be a finite number"),
        ):
            headers = {"content-type": "application/json"}
            async with session.request(method, run.url + path, data=body or None, headers=headers) as answer:
                reply = await answer.json()
                assert (answer.status, reply["code"]) == (400, "malformed")
                assert text in reply["message"]


async def test_a_path_or_method_that_does_not_exist_is_named(tmp_path: Path) -> None:
    async with running(tmp_path, http=True) as run, aiohttp.ClientSession() as session:
        for method, path, status, code in (
            ("GET", "/v2/run", 404, "not_found"),
            ("GET", "/v1/policies/actor/batches/x", 404, "not_found"),
            ("GET", "/v1/leases", 405, "method_not_allowed"),
        ):
            async with session.request(method, run.url + path) as answer:
                reply = await answer.json()
                assert (answer.status, reply["code"]) == (status, code)
                assert f"{method} {path}" in reply["message"]
        async with session.head(run.url + "/v1/health") as answer:
            assert answer.status == 200


async def test_a_caller_that_hung_up_gets_no_leases(tmp_path: Path) -> None:
    async with running(tmp_path, http=True) as run:
        worker = ScriptedWorker(run.client)
        await worker.register()
        request = LeaseRequest(
            worker_id=worker.id, num_free=2, served=(ServedVersions(policy="actor", versions=(0,)),)
        )
        parked = asyncio.create_task(run.client.leases(request))
        async with asyncio.timeout(2):
            # The status has no event to wait for.
            while not any(w.who.name == "w0" for w in (await run.client.status()).waits):  # noqa: ASYNC110
                await asyncio.sleep(0)
        parked.cancel()
        await asyncio.wait({parked})
        await run.client.health()
        await ScriptedTrainer(run.client).attach()
        assert (await run.client.status()).policies[0].fates.drawn == 0


async def test_an_oversized_body_is_refused_while_it_is_read(tmp_path: Path) -> None:
    async def endless() -> object:
        chunk = bytes(1 << 20)
        for _ in range((wire.MAX_BODY_BYTES >> 20) + 2):
            yield chunk

    async with running(tmp_path, http=True) as run, aiohttp.ClientSession() as session:
        try:
            headers = {"Content-Type": wire.MSGPACK}
            async with session.post(run.url + "/v1/episodes", data=endless(), headers=headers) as answer:
                assert answer.status == 413
        except aiohttp.ClientError:  # the server may answer and close before all is sent
            pass
        assert (await run.client.health()).state == "running"


async def test_metrics_and_openapi_are_served(tmp_path: Path) -> None:
    async with running(tmp_path, http=True) as run, aiohttp.ClientSession() as session:
        await ready(run)
        async with session.get(run.url + "/metrics") as answer:
            assert 'astraflow_policy_newest_version{policy="actor"} 0.0' in await answer.text()
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        async with session.get(run.url + "/openapi.json") as answer:
            assert (await answer.json())["openapi"] == "3.1.0"
        async with session.get(run.url + "/v1/run") as answer:
            assert (await answer.json())["policies"][0]["name"] == "actor"


async def test_advice_on_the_pool_is_in_status_and_metrics(tmp_path: Path) -> None:
    async with running(tmp_path, http=True) as run, aiohttp.ClientSession() as session:
        _, worker = await ready(run)
        load = Load(num_running=2, num_slots=8, versions=await worker.served())
        for _ in range(2):
            await run.client.heartbeat(worker.id, Heartbeat(lease_ids=(), load=load))
        scaling = (await run.client.status()).scaling
        assert (scaling.num_services, scaling.verdict) == (1, "too_early")
        async with session.get(run.url + "/metrics") as answer:
            assert "astraflow_missing_services 0.0" in await answer.text()
        await run.client.drain(worker.id)
        assert (await run.client.status()).scaling.num_services == 0


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    async with running(tmp_path, http=True) as run:
        port = int(run.url.rsplit(":", 1)[1])
        with pytest.raises(Exception, match=f"cannot listen on 127.0.0.1:{port}"):
            await HttpServer(run.service.app, host="127.0.0.1", port=port, name="dataflow").start()


async def test_an_unknown_service_must_register_again(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        request = LeaseRequest(worker_id="ghost.1", num_free=1, served=(), wait_s=0.0)
        with pytest.raises(RefusedError, match="register again") as caught:
            await run.client.leases(request)
        assert caught.value.code == "unknown_worker"


async def test_a_lease_reply_names_the_state_of_an_ended_run(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        _, worker = await ready(run)
        await run.client.stop("done")
        request = LeaseRequest(worker_id=worker.id, num_free=1, served=())
        reply = await run.client.leases(request)
        assert isinstance(reply, LeaseReply)
        assert (reply.leases, reply.state) == ((), "finished")


async def test_a_parked_service_gets_leases_once_its_heartbeats_name_the_new_version(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        _, worker = await ready(run)
        parked = asyncio.create_task(
            run.client.leases(LeaseRequest(worker_id=worker.id, num_free=1, served=()))
        )
        for _ in range(10):
            await asyncio.sleep(0)
        assert not parked.done()
        load = Load(versions=(ServedVersions(policy="actor", versions=(0,)),))
        await run.client.heartbeat(worker.id, Heartbeat(lease_ids=(), load=load))
        async with asyncio.timeout(2):
            assert len((await parked).leases) == 1


async def test_a_request_after_the_stop_is_told_to_come_back(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        app = run.service.app
    calls = ServiceClient("http://memory", patience_s=0.0, transport=MemoryTransport(app))
    with pytest.raises(UnavailableError, match="stopping or restarting"):
        await ScriptedTrainer(DataflowClient(calls)).attach()


async def test_a_batch_larger_than_a_body_goes_in_pages_and_whole_it_waits_for_a_person(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        await worker.send(*[await worker.answer(lease) for lease in await worker.lease(num_free=64)])
        served = run.service._run
        served.max_batch_bytes, served.page_bytes = 2000, 3000
        epoch = trainer.session.epoch
        whole = {"epoch": str(epoch)}
        for _ in range(2):
            with pytest.raises(
                WireError, match=r"at most 2000 can be sent at once.*page=0.*groups_per_batch"
            ):
                await run.calls.call("GET", "/v1/policies/actor/batches/0", BatchReply, params=whole)
        (wait, *_) = (await run.client.status()).waits
        assert (wait.who, wait.whom) == (TRAINER, PERSON)
        assert [(reason.kind, reason.total) for reason in wait.reasons] == [("batch_too_large", 2000)]
        in_pages = await run.client.batch("actor", 0, epoch=epoch)
        assert PERSON not in {wait.whom for wait in (await run.client.status()).waits}
        served.max_batch_bytes = 10**6
        reply = await run.calls.call("GET", "/v1/policies/actor/batches/0", BatchReply, params=whole)
        assert in_pages == reply.batch
        assert reply.num_pages == 1
        first = await run.calls.call(
            "GET", "/v1/policies/actor/batches/0", BatchReply, params={**whole, "page": "0"}
        )
        assert first.num_pages > 1


async def test_services_that_join_a_pool_of_more_than_a_thousand_send_fewer_heartbeats(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as run:
        others = [ScriptedWorker(run.client, f"w{idx}") for idx in range(1249)]
        await asyncio.gather(*(other.register() for other in others))
        request = RegisterWorker(
            name="last", hosts=("actor",), engine="none", num_slots=1, fingerprints=Fingerprints()
        )
        assert (await run.client.register(request)).heartbeat_s == 2.5


async def test_a_caller_that_has_more_evaluations_than_there_are_learns_how_many_there_are(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as run:
        for after in (-1, 0, 1000):
            reply = await run.calls.call("GET", f"/v1/evals?after={after}&wait_s=0", EvalsReply)
            assert (reply.evals, reply.num_evals) == ((), 0)
