"""The main function of a rollout service's process.

The process needs the dataflow's URL and, in some runs, a token. Everything else comes from the dataflow.
"""

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from astraflow import added
from astraflow.config import apply_overrides, parse_config
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import ConfigError, UnavailableError
from astraflow.protocols import Engine
from astraflow.recipe.access import check_allowed
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_plan import code_fingerprint, eval_rules
from astraflow.rollout.config import EngineConfig, RolloutConfig
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.factory import engine_maker, preload
from astraflow.rollout.environments import Environments
from astraflow.rollout.evaluation import Evaluation
from astraflow.rollout.membership import WorkerLink
from astraflow.rollout.policy_host import WeightFetcher, load_in_turn
from astraflow.rollout.renderer import policy_renderer
from astraflow.rollout.scoring import ScoringPool
from astraflow.rollout.service import RolloutService
from astraflow.rollout.waiting import run_unless
from astraflow.service.client import ServiceClient
from astraflow.service.loopback import is_loopback
from astraflow.service.process import settle_memory
from astraflow.service.restarts import RETIRED_CODE
from astraflow.types import Fingerprints, Manifest, RunInfo
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.weights.addresses import url_host
from astraflow.weights.arrival import Arrival
from astraflow.weights.peers.peer import Spool, serve_spool
from astraflow.weights.receiver import Receiver
from astraflow.workflows.factory import is_replayable, make_workflow

__all__ = ["own_rollout", "recipe_of", "run_rollout", "run_rollout_service"]


async def run_rollout_service(
    stop: asyncio.Event,
    url: str,
    *,
    name: str,
    token: str,
    allow: tuple[str, ...],
    cache: Path | None,
    peer: str = "",
    overrides: tuple[str, ...] = (),
    private: tuple[Path, ...] = (),
) -> int:
    """Generates episodes for the run at `url` until the run ends or `stop`. Returns the exit code.

    `peer`: as in `astraflow join --peer`. `overrides` change the `rollout` section for this service. Agent
    programs can't see the files in `private`.

    Raises: ConfigError if `allow` lacks a module that the run needs; RefusedError; UnavailableError.
    """
    client = ServiceClient(url, token=token)
    try:
        link = DataflowClient(client)
        info = await run_unless(link.run(), stop)
        if info is None:
            return 0
        recipe = recipe_of(info, url)
        check_allowed(recipe, allow)
        peer = await _choose_peer(peer, url, recipe)
        make_folder = partial(tempfile.TemporaryDirectory, prefix="astraflow-")
        with make_folder() if cache is None else contextlib.nullcontext(cache) as folder:
            is_retired = await run_rollout(
                link,
                stop,
                recipe.model_copy(update={"rollout": own_rollout(recipe, overrides)}),
                info,
                cache_dir=Path(folder),
                name=name or socket.gethostname(),
                fingerprints=Fingerprints(recipe=info.fingerprints.recipe, code=code_fingerprint(recipe)),
                token=token,
                peer=peer,
                private=private,
            )
    finally:
        await client.close()
    return RETIRED_CODE if is_retired else 0


async def run_rollout(
    link: WorkerLink,
    stop: asyncio.Event,
    recipe: Recipe,
    run_info: RunInfo,
    *,
    cache_dir: Path,
    name: str,
    fingerprints: Fingerprints | None = None,
    token: str = "",
    peer: str = "",
    private: tuple[Path, ...] = (),
) -> bool:
    """Serves a run until it ends or `stop` is set. Returns whether the dataflow asked the service to leave.

    `token`: sent to sources of weights that require one. `peer`: address at which this service offers its
    weights to others; empty: none. `private`: what agents must not see.

    Raises: ConfigError if a component cannot be built or an address cannot be bound; RefusedError if the
    dataflow refuses the service.
    """
    rollout = recipe.rollout
    workflow = recipe.workflow
    tasks = recipe.tasks.without_curators
    async with (
        _open_receiver(cache_dir, peer, token, recipe.weights.max_upload_mb_s) as (receiver, peer_url),
        _preload_engine(added.with_bases(receiver), rollout.engine) as weights,
    ):
        return await RolloutService(
            link,
            name=name,
            policies=run_info.policies,
            workflow=make_workflow(workflow, private=private),
            scoring=ScoringPool(tasks, num_workers=rollout.scorers),
            environments=Environments(tasks.environments),
            weights=weights,
            config=rollout,
            make_engine=_settled_engine_maker(recipe),
            make_renderer=policy_renderer,
            evaluation=Evaluation(eval_rules(recipe), num_workers=rollout.scorers, private=private),
            peer_url=peer_url,
            fingerprints=fingerprints,
            resumes=rollout.resume == "always" or (rollout.resume == "auto" and is_replayable(workflow)),
        ).run(stop)


async def _choose_peer(peer: str, url: str, recipe: Recipe) -> str:
    """The address at which this service passes weights on to others; empty: nowhere.

    `auto` is the address from which this machine calls the dataflow. If it's the dataflow's own machine,
    other services may know it by another address.

    Raises: ConfigError if the run has no peers; UnavailableError if the dataflow does not answer.
    """
    if peer and not recipe.weights.peers:
        raise ConfigError(
            f"--peer {peer}: services of this run don't pass on weights (weights.peers is off); leave --peer "
            "out, or start the run with weights.peers=true"
        )
    if peer != "auto":
        return peer
    parts = urlsplit(url)
    try:
        _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    except OSError as err:
        raise UnavailableError(f"{url} does not answer: {err}") from err
    host = str(writer.get_extra_info("sockname")[0])
    writer.close()
    return recipe.peer_host if is_loopback(host) else url_host(host)


def recipe_of(info: RunInfo, url: str) -> Recipe:
    """Reads the recipe that a run sends to joining services.

    Raises: ConfigError if this machine lacks a package whose components the recipe names.
    """
    try:
        return parse_config(msgspec.json.decode(info.recipe), Recipe, where=f"the recipe of {url}")
    except ConfigError as err:
        raise ConfigError(
            f"{err}\nThe run itself accepts this recipe: install the same version of AstraFlow here, and the "
            "packages whose components the recipe names"
        ) from err


def own_rollout(recipe: Recipe, overrides: tuple[str, ...]) -> RolloutConfig:
    """The `rollout` section for one service, with the overrides for its machine.

    Raises: ConfigError if an override changes another section.
    """
    foreign = [text for text in overrides if not text.startswith("rollout.")]
    if foreign:
        raise ConfigError(
            f"{foreign[0]} can't be changed for one service; only rollout.* may differ from the run's recipe"
        )
    return apply_overrides(recipe, overrides, where="astraflow join").rollout


def _settled_engine_maker(recipe: Recipe) -> Callable[[WeightSnapshot], Awaitable[Engine]]:
    """Returns the function that makes the engines of all policies, because they may share a device or a base.

    Making an engine settles the process's memory: all long-lived objects exist from then on. An engine that
    loads a model is made in a thread. Others may need the event loop.
    """
    config = recipe.rollout.engine
    make = added.share_bases(recipe, engine_maker(config, exact=recipe.exact))
    loads_model = isinstance(config, TorchEngineConfig)

    async def make_settled(snapshot: WeightSnapshot) -> Engine:
        engine = await load_in_turn(make, snapshot) if loads_model else make(snapshot)
        settle_memory()
        return engine

    return make_settled


@contextlib.asynccontextmanager
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


@contextlib.asynccontextmanager
async def _preload_engine(
    weights: WeightFetcher, engine: EngineConfig
) -> AsyncGenerator["_PreloadingFetcher"]:
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

    def __init__(self, weights: WeightFetcher, loading: asyncio.Task[None]) -> None:
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
