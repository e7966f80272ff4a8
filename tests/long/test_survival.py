"""The quickstart beside every kind of trouble that was seen to end a run, each in a run of its own.

`pytest tests/long/test_survival.py --log-cli-level=INFO` shows how each run ended.
"""

import asyncio
import contextlib
import io
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import RefusedError, UnavailableError
from astraflow.types import (
    EpisodeResult,
    EpisodeResults,
    Failure,
    Fingerprints,
    Heartbeat,
    LeaseRequest,
    Load,
    RegisterWorker,
    ServedVersions,
)
from drivers.absurd_driver import bodies
from drivers.small_disks import fill, mounted
from drivers.survival_driver import RunningRun, survive

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

_SILENCE_S = 4.0
_TROUBLED_FROM_STEP = 10


# --- other services that misbehave ----------------------------------------------------------------


def _registration(name: str, num_slots: int, peer_url: str = "") -> RegisterWorker:
    return RegisterWorker(
        name=name,
        hosts=("actor",),
        engine="scripted",
        num_slots=num_slots,
        fingerprints=Fingerprints(),
        peer_url=peer_url,
    )


async def _fail_leases(dataflow: DataflowClient) -> None:
    worker_id = (await dataflow.register(_registration("broken", 512))).worker_id
    while True:
        newest = (await dataflow.versions("actor", after=-1)).newest
        served = (ServedVersions(policy="actor", versions=(newest,)),)
        reply = await dataflow.leases(
            LeaseRequest(worker_id=worker_id, num_free=512, served=served, wait_s=2.0)
        )
        failure = Failure(error_class="EngineError", message="CUDA error: device-side assert triggered")
        results = tuple(EpisodeResult(lease_id=lease.id, outcome=failure) for lease in reply.leases)
        if results:
            await dataflow.episodes(EpisodeResults(worker_id=worker_id, results=results))
        if reply.state in {"finished", "failed"}:
            return


async def _fail_every_lease(run: RunningRun) -> None:
    await run.until_step(_TROUBLED_FROM_STEP)
    async with run.dataflow() as dataflow:
        with contextlib.suppress(RefusedError, UnavailableError):  # the run has ended
            await _fail_leases(dataflow)


def test_a_service_that_fails_every_lease(quickstart_model: Path, tmp_path: Path) -> None:
    survivor = survive(quickstart_model, tmp_path / "run", trouble=_fail_every_lease)
    assert not survivor.problems, survivor.report()
    (policy,) = survivor.summary["policies"]
    assert policy["fates"]["failed"] == 0


async def _be_a_silent_peer(run: RunningRun) -> None:
    """Joins with a peer address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with run.dataflow() as dataflow:
            with contextlib.suppress(RefusedError, UnavailableError):  # the run has ended
                await _stay(dataflow, _registration("mute", 1, peer_url=url))


async def _stay(dataflow: DataflowClient, registration: RegisterWorker) -> None:
    """Keeps a service registered that takes no leases."""
    worker_id = (await dataflow.register(registration)).worker_id
    while True:
        await dataflow.heartbeat(worker_id, Heartbeat(lease_ids=(), load=Load()))
        await asyncio.sleep(1.0)


def test_a_peer_that_never_answers(quickstart_model: Path, tmp_path: Path) -> None:
    overrides = ("weights.peers=true",)
    survivor = survive(quickstart_model, tmp_path / "run", trouble=_be_a_silent_peer, overrides=overrides)
    assert not survivor.problems, survivor.report()


async def _send_absurd_values(run: RunningRun) -> None:
    """Takes leases, and sends absurd and nearly right values in every field until the run ends."""
    await run.until_step(_TROUBLED_FROM_STEP)
    async with run.dataflow() as dataflow, aiohttp.ClientSession(run.url) as session:
        with contextlib.suppress(RefusedError, UnavailableError, aiohttp.ClientError):  # the run has ended
            worker_id = (await dataflow.register(_registration("absurd", 8))).worker_id
            newest = (await dataflow.versions("actor", after=-1)).newest
            served = (ServedVersions(policy="actor", versions=(newest,)),)
            request = LeaseRequest(worker_id=worker_id, num_free=8, served=served, wait_s=2.0)
            leases = (await dataflow.leases(request)).leases
            lease_id = leases[0].id if leases else "0.0.0"
            known = {"worker_id": worker_id, "lease_id": lease_id, "policy": "actor", "hosts": ["actor"]}
            while True:
                await _send_all_absurd(session, worker_id, known)


async def _send_all_absurd(session: aiohttp.ClientSession, worker_id: str, known: dict[str, Any]) -> None:
    routes = {
        "/v1/workers": RegisterWorker,
        f"/v1/workers/{quote(worker_id)}/heartbeat": Heartbeat,
        "/v1/leases": LeaseRequest,
        "/v1/episodes": EpisodeResults,
    }
    for path, item in routes.items():
        for about, media_type, body in bodies(item, {**known, "wait_s": 0.0}):
            headers = {"Content-Type": media_type}
            async with session.post(path, data=io.BytesIO(body), headers=headers) as reply:
                assert reply.status < 500 or reply.status == 503, f"{path}, {about}: {await reply.text()}"


def test_a_service_that_sends_absurd_values(quickstart_model: Path, tmp_path: Path) -> None:
    survivor = survive(quickstart_model, tmp_path / "run", trouble=_send_absurd_values)
    assert not survivor.problems, survivor.report()


# --- the machine misbehaves -----------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 MB."""
    with mounted(tmp_path / "disk", "300m") as folder:
        yield folder


async def _fill_the_disk(run: RunningRun) -> None:
    await run.until_step(_TROUBLED_FROM_STEP)
    ballast = run.run_dir.parent / "ballast"
    await asyncio.to_thread(fill, ballast)
    await asyncio.sleep(8.0)
    ballast.unlink()


def test_a_full_disk_that_gets_room_again(quickstart_model: Path, small_disk: Path) -> None:
    survivor = survive(quickstart_model, small_disk / "run", trouble=_fill_the_disk)
    assert not survivor.problems, survivor.report()


def _newest_checkpoint(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints" / "actor").glob("step-*"))


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


async def _spoil_the_newest_checkpoint(run: RunningRun) -> None:
    await run.until_step(35)
    os.kill(run.pid_of("trainer-actor"), signal.SIGKILL)
    files = [path for path in _newest_checkpoint(run.run_dir).rglob("*") if path.is_file()]
    _flip_a_bit(max(files, key=lambda path: path.stat().st_size))


def test_a_flipped_bit_in_the_newest_checkpoint(quickstart_model: Path, tmp_path: Path) -> None:
    survivor = survive(quickstart_model, tmp_path / "run", trouble=_spoil_the_newest_checkpoint)
    assert not survivor.problems, survivor.report()
    (policy,) = survivor.summary["policies"]
    assert policy["redone_steps"] > 0


@pytest.mark.parametrize("service", ["rollout-0", "trainer-actor", "publisher-actor", "dataflow"])
def test_a_stopped_process(service: str, quickstart_model: Path, tmp_path: Path) -> None:
    async def stop(run: RunningRun) -> None:
        await run.until_step(_TROUBLED_FROM_STEP)
        os.kill(run.pid_of(service), signal.SIGSTOP)

    overrides = (f"supervision.longest_silence_s={_SILENCE_S}",)
    survivor = survive(quickstart_model, tmp_path / "run", trouble=stop, overrides=overrides)
    assert not survivor.problems, survivor.report()
    assert f"{service} has shown no sign of life" in survivor.log_of("out"), survivor.report()


# --- the user's own part misbehaves ---------------------------------------------------------------


def test_a_reward_that_calls_exit(quickstart_model: Path, tmp_path: Path) -> None:
    overrides = ("tasks.reward={use: 'drivers.troubled_rewards:exits_at_times'}",)
    survivor = survive(quickstart_model, tmp_path / "run", overrides=overrides)
    assert not survivor.problems, survivor.report()
    (policy,) = survivor.summary["policies"]
    assert policy["fates"]["failed"] > 0


def test_an_evaluation_with_a_deadline_of_less_than_a_second(quickstart_model: Path, tmp_path: Path) -> None:
    survivor = survive(quickstart_model, tmp_path / "run", overrides=("eval.deadline_s=0.4",))
    unscored = "incomplete, so it has no score" in survivor.log_of("out")  # on a machine that is too slow
    problems = [text for text in survivor.problems if not (unscored and "held-out accuracy None" in text)]
    assert not problems, survivor.report()
