"""Sets up what a check needs around a candidate: addresses, a run folder, versions of a model, and a log.

There is one function per kind of service. Each of them starts the kit's servers, starts the candidate, runs
the checks, and stops everything again.
"""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow.dataflow.service.ingest import vocab_size
from astraflow.errors import ConfigError, DeadlineError
from astraflow.recipe.derived import derive_numbers
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.run_plan import run_info
from astraflow.recipe.sources import open_sources
from astraflow.service.client import HttpTransport, ServiceClient
from astraflow.service.server import HttpServer
from astraflow.types import RunInfo, Task
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manifest import build_manifest
from astraflow.weights.publisher import Publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver
from astraflow.weights.snapshot import model_files, read_model
from astraflow_conformance.candidate import Candidate, Command, Joining
from astraflow_conformance.dataflow_kit import check_dataflow
from astraflow_conformance.fake_rollout_dataflow import FakeRolloutDataflow, Reference
from astraflow_conformance.fake_trainer_dataflow import FakeTrainerDataflow
from astraflow_conformance.report import Checks, Report
from astraflow_conformance.rollout_kit import ROLLOUT_RULES, RolloutKit
from astraflow_conformance.trainer_kit import NUM_STEPS, TRAINER_RULES, TrainerKit, make_samples
from astraflow_conformance.versions import DamagedChunks, PublishedVersions

__all__ = ["Settings", "judge_dataflow", "judge_rollout", "judge_trainer"]

_HEARTBEAT_S = 0.2
"""Interval of heartbeats. It is short because the rules about heartbeats wait for several of them."""
_NUM_TASKS = 64
_KEPT_VERSIONS = 64
"""More versions than a check publishes, so that no version that a rule needs is deleted meanwhile."""
_HEALTH_PAUSE_S = 0.1
"""Pause between two requests for the health of a dataflow that is starting."""
_LEASE_TIMEOUT_S = 3.0
"""Timeout of leases. It is short because the rules about expiry wait for it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a candidate is checked."""

    work_dir: Path
    """Folder for the candidate's log, run folder, and weights."""
    recipe: Path
    """Recipe with the model and the tasks for the candidate."""
    patience_s: float = 60.0
    """Seconds to wait for what a rule asks for."""
    token: str = ""
    """Token of the run; empty if it has none."""

    @property
    def log(self) -> Path:
        """File with the output of the candidate."""
        return self.work_dir / "candidate.log"


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run_folder(settings: Settings, recipe: Recipe) -> RunFolder:
    folder = RunFolder(settings.work_dir / "run")
    folder.create()
    folder.save_recipe(recipe)
    return folder


def _policy(recipe: Recipe) -> str:
    """Returns the policy to check: the first trained one. Raises: ConfigError if there is none."""
    if not recipe.trained:
        raise ConfigError("the recipe trains no policy")
    return next(iter(recipe.trained))


# --- dataflow -------------------------------------------------------------------------------------


async def judge_dataflow(target: str, settings: Settings, *, is_quick: bool) -> Report:
    """Checks the dataflow at a URL, or the one that a command with `{port}` and `{run_dir}` starts.

    Raises: ConfigError; DeadlineError if the dataflow doesn't answer.
    """
    if _is_url(target):
        transport = HttpTransport(target)
        try:
            return await check_dataflow(transport, name=target, token=settings.token, is_quick=is_quick)
        finally:
            await transport.close()
    port = _free_port()
    run_dir = settings.work_dir / "run"
    if "{run_dir}" in target:
        _run_folder(settings, _short_run(settings.recipe))
    values = {"port": str(port), "run_dir": str(run_dir)}
    candidate = Command(target, values, env={}, log=settings.log)
    transport = HttpTransport(f"http://127.0.0.1:{port}")

    async def start() -> None:
        await candidate.start()
        await _answers(transport, settings.patience_s)

    async def restart() -> None:
        await candidate.kill()
        await start()

    try:
        await start()
        return await check_dataflow(
            transport, name=target, token=settings.token, restart=restart, is_quick=is_quick
        )
    finally:
        await candidate.kill()
        await transport.close()


def _short_run(path: Path) -> Recipe:
    """Returns the recipe with many small steps and with leases that expire soon."""
    names = list(load_recipe(path).trained)
    overrides = ["dataflow.lease_timeout_s=" + str(_LEASE_TIMEOUT_S), "dataflow.heartbeat_s=0.5"]
    for name in names:
        overrides += [f"policies.{name}.table.groups_per_batch=4", f"policies.{name}.train.steps=60"]
    return derive_numbers(load_recipe(path, overrides))


async def _answers(transport: HttpTransport, wait_s: float) -> None:
    """Waits until the dataflow reports that it is healthy. Raises: DeadlineError."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while True:
                with contextlib.suppress(OSError, TimeoutError):
                    reply = await transport.request("GET", "/v1/health", headers={}, body=b"", timeout_s=5.0)
                    if reply.status == 200:
                        return
                await asyncio.sleep(_HEALTH_PAUSE_S)
    raise DeadlineError(f"the candidate does not answer GET /v1/health within {wait_s:.0f} s; see its log")


# --- rollout --------------------------------------------------------------------------------------


async def judge_rollout(target: str, settings: Settings) -> Report:
    """Checks a rollout service.

    `target` is either a command that starts the service or a URL of this machine. A command contains `{url}`
    and may contain `{token}`. At a URL, the kit waits for a service that somebody else starts with the token
    `settings.token`.

    Raises: ConfigError or DataError if the recipe's model or tasks are missing.
    """
    recipe = derive_numbers(load_recipe(settings.recipe))
    policy = _policy(recipe)
    token = settings.token or secrets.token_urlsafe(12)
    sources = open_sources(recipe)
    source = next(iter(sources.train.values()))
    tasks: list[Task] = [source.task(idx) for idx in range(min(_NUM_TASKS, len(source)))]
    info = msgspec.structs.replace(run_info(recipe), run_id="conformance")
    models = {name: read_model(recipe.policies[name].model_dir) for name in recipe.published}
    reference, made = _reference(recipe, policy, models)
    dataflow = FakeRolloutDataflow(
        Checks(ROLLOUT_RULES),
        info,
        token=token,
        patience_s=settings.patience_s,
        heartbeat_s=_HEARTBEAT_S,
        vocab_sizes={name: _rows(tensors) for name, tensors in models.items()},
        reference=reference,
    )
    host, port = _listens(target)
    async with _publishing(settings.work_dir / "weights", token) as (publisher, damage, _):
        for name, tensors in models.items():
            files = model_files(recipe.policies[name].model_dir)
            await dataflow.publish(await publisher.publish(name, 0, tensors, files))
        made(0, models[policy])
        versions = PublishedVersions(
            publisher,
            damage,
            policy=policy,
            tensors=models[policy],
            files=model_files(recipe.policies[policy].model_dir),
            made=made,
        )
        server = HttpServer(dataflow, host=host, port=port, name="conformance kit")
        url = await server.start()
        try:
            candidate = _rollout_candidate(target, url, token, settings.log)
            kit = RolloutKit(candidate, dataflow, versions, tasks=tasks, policy=policy)
            return await kit.run(target)
        finally:
            await server.stop()


def _rollout_candidate(target: str, url: str, token: str, log: Path) -> Candidate:
    if _is_url(target):
        return Joining()
    return Command(target, {"url": url, "token": token}, env={"ASTRAFLOW_TOKEN": token}, log=log)


def _listens(target: str) -> tuple[str, int]:
    """Returns host and port on which the kit listens. Raises: ConfigError if the URL has no port."""
    if not _is_url(target):
        return "127.0.0.1", 0
    host, _, port = target.partition("://")[2].strip("/").partition(":")
    if not port.isdigit():
        raise ConfigError(f"{target}: the address that the kit listens on needs a port")
    return host, int(port)


def _rows(tensors: Sequence[HostTensor]) -> int:
    """Returns the size of the vocabulary, as a dataflow reads it from a manifest; 2**31 if it is unknown."""
    return vocab_size(build_manifest("model", 0, tensors, chunk_bytes=1 << 30)) or 2**31


def _reference(
    recipe: Recipe, policy: str, models: Mapping[str, Sequence[HostTensor]]
) -> tuple[Reference | None, Callable[[int, Sequence[HostTensor]], None]]:
    """Returns a function that scores tokens with full forward passes, and one that adds versions of `policy`.

    Without torch, there is no reference, and logprobs are not checked.
    """
    try:
        from astraflow_conformance.version_scores import VersionScores  # needs torch, which is an extra
    except ImportError:
        return None, lambda version, tensors: None
    scores = {name: VersionScores(recipe.policies[name].model_dir) for name in models}
    for name, tensors in models.items():
        scores[name].add(0, tensors)

    def reference(name: str, version: int, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return scores[name].logprobs(version, ids)

    return reference, scores[policy].add


@contextlib.asynccontextmanager
async def _publishing(folder: Path, token: str) -> AsyncGenerator[tuple[PublisherClient, DamagedChunks, str]]:
    """Starts a publisher behind the middleware that damages chunks.

    Yields the publisher's client, the middleware, and the publisher's URL.
    """
    own = secrets.token_urlsafe(12)
    tokens = {token: "trainer", own: "trainer"}
    publisher = Publisher(folder, WeightsConfig(keep=_KEPT_VERSIONS), tokens=tokens)
    damage = DamagedChunks(publisher)
    server = HttpServer(damage, host="127.0.0.1", port=0, name="publisher")
    client: ServiceClient | None = None
    try:
        publisher.public_url = await server.start()
        client = ServiceClient(publisher.public_url, token=own)
        yield PublisherClient(client, publisher.store.incoming), damage, publisher.public_url
    finally:
        if client is not None:
            await client.close()
        await server.stop()
        publisher.store.close()


# --- trainer --------------------------------------------------------------------------------------


async def judge_trainer(target: str, settings: Settings) -> Report:
    """Checks a trainer that a command starts.

    The command contains `{url}`. It may also contain `{policy}`, `{run_dir}` (a run folder with the recipe),
    `{publisher}` (the URL of a publisher for the weights in that folder), `{model_dir}`, `{checkpoints}`, and
    `{token}`.

    Raises: ConfigError or DataError if the recipe's model is missing.
    """
    policy = _policy(load_recipe(settings.recipe))
    steps = [f"policies.{policy}.train.{key}" for key in (f"steps={NUM_STEPS}", "checkpoint_every=2")]
    recipe = derive_numbers(load_recipe(settings.recipe, steps))
    token = settings.token or secrets.token_urlsafe(12)
    folder = _run_folder(settings, recipe)
    model_dir = recipe.policies[policy].model_dir
    tensors = read_model(model_dir)
    info: RunInfo = msgspec.structs.replace(run_info(recipe), run_id="conformance")
    reference, _ = _reference(recipe, policy, {policy: tensors})
    run = FakeTrainerDataflow(
        Checks(TRAINER_RULES),
        info,
        policy=policy,
        token=token,
        patience_s=settings.patience_s,
        samples=make_samples(
            next(known for known in info.policies if known.name == policy),
            vocab_size=_rows(tensors),
            logprobs_of=(lambda ids: reference(policy, 0, ids)) if reference else None,
        ),
        num_steps=NUM_STEPS,
        receiver=lambda cache: Receiver(cache, token=token),
    )
    async with _publishing(folder.weights / policy, token) as (_, _, publisher_url):
        server = HttpServer(run, host="127.0.0.1", port=0, name="conformance kit")
        values = {
            "url": await server.start(),
            "policy": policy,
            "run_dir": str(folder.path),
            "publisher": publisher_url,
            "model_dir": str(model_dir),
            "checkpoints": str(folder.checkpoints / policy),
            "token": token,
        }
        try:
            env = {"ASTRAFLOW_TOKEN": token, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            candidate = Command(target, values, env=env, log=settings.log)
            return await TrainerKit(candidate, run).run(target)
        finally:
            await server.stop()
