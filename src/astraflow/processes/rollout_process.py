"""The main function of a rollout service's process.

The process needs the dataflow's URL and, in some runs, a token. Everything else comes from the dataflow.
"""

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Generator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from astraflow.config import apply_overrides, parse_config
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import ConfigError, UnavailableError
from astraflow.recipe.access import check_allowed
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_plan import code_fingerprint, eval_rules
from astraflow.rollout.config import RolloutConfig
from astraflow.rollout.serve import run_rollout
from astraflow.rollout.waiting import run_unless
from astraflow.service.client import ServiceClient
from astraflow.service.loopback import is_loopback
from astraflow.types import Fingerprints, RunInfo
from astraflow.weights.addresses import url_host

__all__ = ["own_rollout", "recipe_of", "run_rollout_service"]


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
    """Generates episodes for the run at `url` until the run ends or `stop`.

    `peer`: as in `astraflow join --peer`. `overrides` change the `rollout` section for this service. Agent
    programs can't see the files in `private`.

    Raises: ConfigError if the run needs a module that `allow` does not name; RefusedError if the dataflow
    refuses this service; UnavailableError if it does not answer.
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
        with _cache_folder(cache) as folder:
            await run_rollout(
                link,
                stop,
                run_info=info,
                tasks=recipe.tasks.without_curators,
                workflow=recipe.workflow,
                rollout=own_rollout(recipe, overrides),
                cache_dir=folder,
                name=name or socket.gethostname(),
                evaluation=eval_rules(recipe),
                fingerprints=Fingerprints(recipe=info.fingerprints.recipe, code=code_fingerprint(recipe)),
                token=token,
                peer=peer,
                private=private,
                exact=recipe.exact,
                max_upload_mb_s=recipe.weights.max_upload_mb_s,
            )
    finally:
        await client.close()
    return 0


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


@contextlib.contextmanager
def _cache_folder(cache: Path | None) -> Generator[Path]:
    if cache is not None:
        yield cache
        return
    with tempfile.TemporaryDirectory(prefix="astraflow-") as folder:
        yield Path(folder)
