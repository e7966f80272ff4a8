"""The main function of a run's dataflow process."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from starlette.types import ASGIApp

from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.service.scaling import WaitShares
from astraflow.dataflow.service.service import DataflowService
from astraflow.errors import ConfigError
from astraflow.recipe.access import tls_files, tokens_of
from astraflow.recipe.derived import find_open_keys
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.run_plan import run_info, run_plan
from astraflow.recipe.sources import open_sources
from astraflow.rollout.waiting import wait_for_any
from astraflow.service.process import settle_memory
from astraflow.service.rate_limit import RateLimit
from astraflow.service.server import HttpServer, TokenAuth
from astraflow.service.web_guard import WebRules
from astraflow.weights.addresses import PeerRules

__all__ = ["make_service", "protect", "run_dataflow"]


async def run_dataflow(stop: asyncio.Event, run_dir: Path, *, port: int) -> int:
    """Serves the run in a run folder until `stop`. Returns the exit code: 1 if the dataflow's core failed.

    With port 0, it listens on the recipe's port. Raises: ConfigError, DataError, JournalError.
    """
    folder = RunFolder(run_dir)
    recipe = folder.load_recipe()
    config = recipe.dataflow
    service = make_service(folder, recipe)
    tokens = tokens_of(recipe, folder)
    web = config.web
    server = HttpServer(
        protect(service.app, tokens, config.max_requests_per_s),
        host=config.host,
        port=port or config.port,
        name="dataflow",
        tls=tls_files(recipe),
        rules=WebRules(host_names=web.host_names, origins=web.origins, needs_token=bool(tokens)),
    )
    await service.start()
    folder.resume.unlink(missing_ok=True)
    try:
        await server.start()
        settle_memory()
        await wait_for_any(stop, service.fatal)
        await service.say_farewell()
    finally:
        try:
            await service.stop()
        finally:
            await server.stop()
    return 1 if service.fatal.is_set() else 0


def make_service(folder: RunFolder, recipe: Recipe) -> DataflowService:
    """Creates the dataflow service of a run folder, and locks the folder's journal.

    Raises: ConfigError, DataError, JournalError.
    """
    if keys := find_open_keys(recipe):
        raise ConfigError(
            f"{folder.recipe}: {keys[0]} is `auto`, but a service needs a number; create the file with "
            "`astraflow run RECIPE --dry-run`"
        )
    sources = open_sources(recipe)
    sizes = {name: len(source) for name, source in sources.train.items()}
    config = recipe.dataflow
    journal = Journal(
        folder.journal, snapshot_every=config.snapshot_every, retained_steps=config.retained_steps
    )
    return DataflowService(
        run_plan(recipe, sizes),
        sources.train,
        sources.eval,
        run_info(recipe),
        config,
        journal,
        peer_rules=PeerRules(is_on=recipe.weights.peers, networks=recipe.weights.peer_networks),
        resumes_failed=folder.resume.exists(),
        shares=WaitShares(recipe.cluster.pool.window_s),
    )


def protect(app: ASGIApp, tokens: Mapping[str, str], max_requests_per_s: float) -> ASGIApp:
    """Puts an app behind its tokens. If there are any, the requests under each token are rate-limited."""
    return TokenAuth(RateLimit(app, max_requests_per_s) if tokens else app, tokens)
