"""Builds and runs the rollout service of a process that joins a run."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from astraflow.protocols import Engine
from astraflow.rollout.config import EngineConfig, EvalRules, RolloutConfig
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.factory import engine_maker, preload
from astraflow.rollout.environments import Environments
from astraflow.rollout.evaluation import Evaluation
from astraflow.rollout.membership import WorkerLink
from astraflow.rollout.policy_host import load_in_turn
from astraflow.rollout.renderer import policy_renderer
from astraflow.rollout.scoring import ScoringPool
from astraflow.rollout.service import RolloutService
from astraflow.service.process import settle_memory
from astraflow.tasks.config import TasksConfig
from astraflow.types import Fingerprints, Manifest, RunInfo
from astraflow.types.host_tensors import WeightSnapshot
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
    evaluation: Mapping[str, EvalRules] | None = None,
    fingerprints: Fingerprints | None = None,
    token: str = "",
    peer: str = "",
    max_upload_mb_s: float = 0.0,
    exact: bool = False,
    private: tuple[Path, ...] = (),
) -> None:
    """Serves a run until it ends or `stop` is set.

    `token`: sent to sources of weights that require one. `peer`:
    address at which this service offers its weights to others, at `max_upload_mb_s` or less; empty: none.
    `evaluation`: how the episodes of each set run. `private`: what agents must not see. `exact`: see recipe.
    Raises: ConfigError if a component cannot be built or an address cannot be bound; RefusedError if the
    dataflow refuses the service.
    """
    make_engine = _settled_engine_maker(rollout.engine, exact=exact)
    async with (
        _open_receiver(cache_dir, peer, token, max_upload_mb_s) as (receiver, peer_url),
        _preload_engine(receiver, rollout.engine) as weights,
    ):
        await RolloutService(
            link,
            name=name,
            policies=run_info.policies,
            workflow=make_workflow(workflow, private=private),
            scoring=ScoringPool(tasks, num_workers=rollout.scorers),
            environments=Environments(tasks.environments),
            weights=weights,
            config=rollout,
            make_engine=make_engine,
            make_renderer=policy_renderer,
            evaluation=Evaluation(evaluation or {}, num_workers=rollout.scorers, private=private),
            peer_url=peer_url,
            fingerprints=fingerprints,
            resumes=rollout.resume == "always" or (rollout.resume == "auto" and is_replayable(workflow)),
        ).run(stop)


def _settled_engine_maker(
    config: EngineConfig, *, exact: bool
) -> Callable[[WeightSnapshot], Awaitable[Engine]]:
    """Returns the function that makes the engines of all policies, because they may share a device.

    Making an engine settles the process's memory: all long-lived objects exist from then on. An engine that
    loads a model is made in a thread. Others may need the event loop.
    """
    make = engine_maker(config, exact=exact)
    loads_model = isinstance(config, TorchEngineConfig)

    async def make_settled(snapshot: WeightSnapshot) -> Engine:
        engine = await load_in_turn(make, snapshot) if loads_model else make(snapshot)
        settle_memory()
        return engine

    return make_settled


@asynccontextmanager
async def _open_receiver(
    cache_dir: Path, peer: str, token: str, max_upload_mb_s: float
) -> AsyncGenerator[tuple[Receiver, str]]:
    """Opens a receiver of weights. Yields it with its URL for other services; empty if it offers nothing."""
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
async def _preload_engine(weights: Receiver, engine: EngineConfig) -> AsyncGenerator["_PreloadingFetcher"]:
    """Imports the libraries of an engine in a thread while the block runs."""
    loading = asyncio.create_task(asyncio.to_thread(preload, engine), name="preload")
    try:
        yield _PreloadingFetcher(weights, loading)
    finally:
        loading.cancel()


class _PreloadingFetcher:
    """A receiver that returns a version only after the engine's libraries have been imported.

    The service registers and fetches weights while a thread imports the libraries. These import their own
    modules lazily, so an import in the event loop could find a module that the thread has only half imported.
    """

    def __init__(self, weights: Receiver, loading: asyncio.Task[None]) -> None:
        self._weights = weights
        self._loading = loading

    async def fetch(self, manifest: Manifest) -> WeightSnapshot:
        """Fetches the weights of a version."""
        snapshot = await self._weights.fetch(manifest)
        await asyncio.shield(self._loading)
        return snapshot

    def arrival(self, policy: str) -> Arrival:
        """Progress of the transfer of a policy's version."""
        return self._weights.arrival(policy)
