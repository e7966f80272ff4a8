"""Sets the kit up around a candidate: addresses, a run folder, versions of a recipe's model, and its log."""

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

from astraflow.dataflow.ingest import vocab_size
from astraflow.errors import ConfigError, DeadlineError
from astraflow.host_tensors import HostTensor
from astraflow.launch.config import Recipe, load_recipe
from astraflow.launch.folder import RunFolder
from astraflow.launch.plan import run_info
from astraflow.launch.preflight import open_sources
from astraflow.service.client import HttpTransport, ServiceClient
from astraflow.service.server import HttpServer
from astraflow.types import RunInfo, Task
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manifest import build_manifest
from astraflow.weights.publisher import Publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver
from astraflow.weights.snapshot import model_files, read_model
from astraflow_conformance.candidate import Candidate, Command, Joining
from astraflow_conformance.dataflow_kit import check_dataflow
from astraflow_conformance.report import Checks, Report
from astraflow_conformance.rollout_kit import ROLLOUT_RULES, RolloutKit
from astraflow_conformance.rollout_played import PlayedDataflow, Reference
from astraflow_conformance.trainer_kit import NUM_STEPS, TRAINER_RULES, TrainerKit, make_samples
from astraflow_conformance.trainer_played import PlayedRun
from astraflow_conformance.versions import PublishedVersions, Tearing

__all__ = ["Settings", "judge_dataflow", "judge_rollout", "judge_trainer"]

_HEARTBEAT_S = 0.2
_NUM_TASKS = 64
_KEPT_VERSIONS = 64
_LEASE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How a candidate is judged. `work_dir` gets its log, and whatever it is given to work in."""

    work_dir: Path
    recipe: Path
    patience_s: float = 60.0
    """How long the kit waits for what a rule asks for."""
    token: str = ""

    @property
    def log(self) -> Path:
        """What the candidate prints."""
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
    """The policy that the kit plays with. Raises: ConfigError."""
    if not recipe.trained:
        raise ConfigError("the recipe trains no policy")
    return next(iter(recipe.trained))


# --- dataflow -------------------------------------------------------------------------------------


async def judge_dataflow(target: str, settings: Settings, *, is_quick: bool) -> Report:
    """Judges the dataflow at a URL, or one that a command starts, which may name `{port}` and `{run_dir}`.

    Raises: ConfigError; DeadlineError if the command does not answer.
    """
    if _is_url(target):
        transport = HttpTransport(target)
        try:
            return await check_dataflow(transport, name=target, token=settings.token, is_quick=is_quick)
        finally:
            await transport.close()
    port, run_dir = _free_port(), settings.work_dir / "run"
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
    """The recipe with many small steps and impatient leases."""
    names = list(load_recipe(path).trained)
    overrides = ["dataflow.lease_timeout_s=" + str(_LEASE_TIMEOUT_S), "dataflow.heartbeat_s=0.5"]
    for name in names:
        overrides += [f"policies.{name}.table.groups_per_batch=4", f"policies.{name}.train.steps=60"]
    return load_recipe(path, overrides)


async def _answers(transport: HttpTransport, wait_s: float) -> None:
    """Waits until the dataflow's health is good. Raises: DeadlineError."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            for pause_s in (0.05, *[0.2] * 10_000):
                with contextlib.suppress(OSError, TimeoutError):
                    reply = await transport.request("GET", "/v1/health", headers={}, body=b"", timeout_s=5.0)
                    if reply.status == 200:
                        return
                await asyncio.sleep(pause_s)
    raise DeadlineError(f"the candidate does not answer GET /v1/health within {wait_s:.0f} s; see its log")


# --- rollout --------------------------------------------------------------------------------------


async def judge_rollout(target: str, settings: Settings) -> Report:
    """Judges a rollout service that a command starts, which names `{url}` and may name `{token}`; or one that
    joins the given URL of this machine by itself, with the token `settings.token`.

    Raises: ConfigError or DataError if the recipe's model or tasks are not there.
    """
    recipe = load_recipe(settings.recipe)
    policy, token = _policy(recipe), settings.token or secrets.token_urlsafe(12)
    sources = open_sources(recipe)
    source = next(iter(sources.train.values()))
    tasks: list[Task] = [source.task(idx) for idx in range(min(_NUM_TASKS, len(source)))]
    info = msgspec.structs.replace(run_info(recipe), run_id="conformance")
    models = {name: read_model(recipe.policies[name].model_dir) for name in recipe.published}
    reference, made = _reference(recipe, policy, models)
    dataflow = PlayedDataflow(
        Checks(ROLLOUT_RULES),
        info,
        token=token,
        patience_s=settings.patience_s,
        heartbeat_s=_HEARTBEAT_S,
        vocab_sizes={name: _rows(tensors) for name, tensors in models.items()},
        reference=reference,
    )
    host, port = _listens(target)
    async with _publishing(settings.work_dir / "weights", token) as (publisher, tearing, _):
        for name, tensors in models.items():
            files = model_files(recipe.policies[name].model_dir)
            await dataflow.publish(await publisher.publish(name, 0, tensors, files))
        made(0, models[policy])
        versions = PublishedVersions(
            publisher,
            tearing,
            policy=policy,
            tensors=models[policy],
            files=model_files(recipe.policies[policy].model_dir),
            made=made,
        )
        server = HttpServer(dataflow, host=host, port=port, name="conformance kit")
        url = await server.start()
        try:
            values = {"url": url, "token": token}
            candidate: Candidate = Joining()
            if not _is_url(target):
                env = {"ASTRAFLOW_TOKEN": token}
                candidate = Command(target, values, env=env, log=settings.log)
            kit = RolloutKit(candidate, dataflow, versions, tasks=tasks, policy=policy)
            return await kit.run(target)
        finally:
            await server.stop()


def _listens(target: str) -> tuple[str, int]:
    """Where the kit listens. Raises: ConfigError."""
    if not _is_url(target):
        return "127.0.0.1", 0
    host, _, port = target.partition("://")[2].strip("/").partition(":")
    if not port.isdigit():
        raise ConfigError(f"{target}: the address that the kit listens on needs a port")
    return host, int(port)


def _rows(tensors: Sequence[HostTensor]) -> int:
    """Rows of the embedding table, as the dataflow reads them from a manifest."""
    return vocab_size(build_manifest("model", 0, tensors, chunk_bytes=1 << 30)) or 2**31


def _reference(
    recipe: Recipe, policy: str, models: Mapping[str, Sequence[HostTensor]]
) -> tuple[Reference | None, Callable[[int, Sequence[HostTensor]], None]]:
    """Scores of a full forward, and what hears of each version of `policy`; none without torch."""
    try:
        from astraflow.models.scoring import VersionScores  # heavy, and not everybody has torch
    except ImportError:
        return None, lambda version, tensors: None
    scores = {name: VersionScores(recipe.policies[name].model_dir) for name in models}
    for name, tensors in models.items():
        scores[name].add(0, tensors)

    def reference(name: str, version: int, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return scores[name].logprobs(version, ids)

    return reference, scores[policy].add


@contextlib.asynccontextmanager
async def _publishing(folder: Path, token: str) -> AsyncGenerator[tuple[PublisherClient, Tearing, str]]:
    """A publisher on a port of its own, behind the middleware that damages chunks; its client; its URL."""
    own = secrets.token_urlsafe(12)
    tokens = {token: "trainer", own: "trainer"}
    publisher = Publisher(folder, WeightsConfig(keep=_KEPT_VERSIONS), tokens=tokens)
    tearing = Tearing(publisher)
    server = HttpServer(tearing, host="127.0.0.1", port=0, name="publisher")
    client: ServiceClient | None = None
    try:
        publisher.public_url = await server.start()
        client = ServiceClient(publisher.public_url, token=own)
        yield PublisherClient(client, publisher.incoming), tearing, publisher.public_url
    finally:
        if client is not None:
            await client.close()
        await server.stop()
        publisher.close()


# --- trainer --------------------------------------------------------------------------------------


async def judge_trainer(target: str, settings: Settings) -> Report:
    """Judges a trainer that a command starts. It names `{url}`, and may name `{policy}`, `{run_dir}` (a run
    folder with the recipe), `{publisher}` (one that owns the run folder's weights), `{model_dir}`,
    `{checkpoints}` and `{token}`.

    Raises: ConfigError or DataError if the recipe's model is not there.
    """
    policy = _policy(load_recipe(settings.recipe))
    steps = [f"policies.{policy}.train.{key}" for key in (f"steps={NUM_STEPS}", "checkpoint_every=2")]
    recipe = load_recipe(settings.recipe, steps)
    token = settings.token or secrets.token_urlsafe(12)
    folder = _run_folder(settings, recipe)
    model_dir = recipe.policies[policy].model_dir
    tensors = read_model(model_dir)
    info: RunInfo = msgspec.structs.replace(run_info(recipe), run_id="conformance")
    reference, _ = _reference(recipe, policy, {policy: tensors})
    run = PlayedRun(
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
