"""Builds and runs the rollout service of a process that joins a run."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from astraflow.errors import ConfigError
from astraflow.protocols import Engine
from astraflow.rollout.config import EngineConfig, RolloutConfig
from astraflow.rollout.engines.factory import engine_maker, preload
from astraflow.rollout.environments import Environments
from astraflow.rollout.evaluation import EvalRules, Evaluation
from astraflow.rollout.judging import make_scoring
from astraflow.rollout.membership import WorkerLink
from astraflow.rollout.renderer import policy_renderer
from astraflow.rollout.service import RolloutService
from astraflow.service.process import settle_memory
from astraflow.tasks.config import TasksConfig
from astraflow.types import Fingerprints, Manifest, PolicyInfo, RunInfo
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.user_input.mistakes import hint
from astraflow.weights.arrival import Arrival
from astraflow.weights.peers.peer import Spool, serve_spool
from astraflow.weights.receiver import Receiver
from astraflow.workflows.config import WorkflowConfig
from astraflow.workflows.factory import is_replayable, make_workflow

__all__ = ["run_rollout"]


async def run_rollout(
    link: WorkerLink,
    stop: asyncio.Event,
    *,
    run_info: RunInfo,
    tasks: TasksConfig,
    workflow: WorkflowConfig,
    rollout: RolloutConfig,
    cache_dir: Path,
    name: str,
    hosts: tuple[str, ...] = (),
    evaluation: Mapping[str, EvalRules] | None = None,
    labels: Mapping[str, str] | None = None,
    fingerprints: Fingerprints | None = None,
    token: str = "",
    peer: str = "",
    max_upload_mb_s: float = 0.0,
    exact: bool = False,
    private: tuple[Path, ...] = (),
) -> None:
    """Serves a run until it ends or `stop` is set.

    `hosts`: policies to serve; empty: all. `token`: shown to sources of weights that ask for one. `peer`:
    address at which this service offers its weights to others, at `max_upload_mb_s` at most; empty: none.
    `evaluation`: how the episodes of each set run. `private`: hidden from agents. `exact`: as in the recipe.
    Raises: ConfigError for a component that cannot be built or an address that cannot be bound;
    RefusedError if the dataflow refuses the service.
    """
    async with (
        _receiving(cache_dir, peer, token, max_upload_mb_s) as (received, peer_url),
        _after_loading(received, rollout.engine) as weights,
    ):
        service = RolloutService(
            link,
            name=name,
            policies=_hosted(run_info, hosts),
            workflow=make_workflow(workflow, private=private),
            scoring=make_scoring(tasks, num_workers=rollout.scorers),
            environments=Environments(tasks.environments),
            weights=weights,
            config=rollout,
            make_engine=partial(_settled_engine, engine_maker(rollout.engine, exact=exact)),
            make_renderer=policy_renderer,
            evaluation=Evaluation(evaluation or {}, num_workers=rollout.scorers, private=private),
            labels=labels,
            peer_url=peer_url,
            fingerprints=fingerprints,
            resumes=_resumes(rollout, workflow),
        )
        await service.run(stop)


def _resumes(rollout: RolloutConfig, workflow: WorkflowConfig) -> bool:
    """Whether an unfinished episode goes on with what an earlier attempt sampled."""
    return rollout.resume == "always" or (rollout.resume == "auto" and is_replayable(workflow))


def _settled_engine(make_engine: Callable[[WeightSnapshot], Engine], snapshot: WeightSnapshot) -> Engine:
    """Makes an engine. Everything that lives long exists then, so the process's memory can be settled."""
    engine = make_engine(snapshot)
    settle_memory()
    return engine


@asynccontextmanager
async def _receiving(
    cache_dir: Path, peer: str, token: str, max_upload_mb_s: float
) -> AsyncGenerator[tuple[Receiver, str]]:
    """A receiver of weights, and the URL at which it offers them to other services; empty if it does not."""
    spool = Spool(cache_dir / "chunks") if peer else None
    weights = Receiver(cache_dir, token=token, spool=spool)
    try:
        if spool is None:
            yield weights, ""
            return
        async with serve_spool(spool, peer, token=token, max_upload_mb_s=max_upload_mb_s):
            yield weights, spool.url
    finally:
        await weights.close()


@asynccontextmanager
async def _after_loading(weights: Receiver, engine: EngineConfig) -> AsyncGenerator["_AfterLoading"]:
    """Imports the libraries of an engine in a thread meanwhile."""
    loading = asyncio.create_task(asyncio.to_thread(preload, engine), name="preload")
    try:
        yield _AfterLoading(weights, loading)
    finally:
        loading.cancel()


class _AfterLoading:
    """A receiver that returns a version only when the engine's libraries are imported.

    The service registers and fetches weights while a thread imports the libraries. They import their own
    modules lazily, so an import in the event loop could see a module that the thread has only half imported.
    """

    def __init__(self, weights: Receiver, loading: asyncio.Task[None]) -> None:
        self._weights = weights
        self._loading = loading

    async def fetch(self, manifest: Manifest) -> WeightSnapshot:
        """The weights of a version."""
        snapshot = await self._weights.fetch(manifest)
        await asyncio.shield(self._loading)
        return snapshot

    def arrival(self, policy: str) -> Arrival:
        """How far the transfer of a policy's version is."""
        return self._weights.arrival(policy)


def _hosted(run_info: RunInfo, hosts: tuple[str, ...]) -> tuple[PolicyInfo, ...]:
    """The policies that this service serves.

    Raises: ConfigError if the run does not have one of `hosts`.
    """
    known = [info.name for info in run_info.policies]
    unknown = [name for name in hosts if name not in known]
    if unknown:
        raise ConfigError(f"hosts = {', '.join(unknown)}: no such policy{hint(unknown[0], known)}")
    return tuple(info for info in run_info.policies if not hosts or info.name in hosts)
