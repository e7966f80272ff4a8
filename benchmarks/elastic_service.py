"""Runs one rollout service of `elastic.py`: `astraflow join` with its own speed and its own route to the
publisher.

The only argument is a JSON object: `url`, `name`, `cache` (folder), `engine` (what differs from the
recipe's), `routes` (announced URL -> URL to use), and optionally `rollout` (what else differs).
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from astraflow.config import parse_config
from astraflow.dataflow.client import DataflowClient
from astraflow.recipe.recipe import Recipe
from astraflow.rollout.serve import run_rollout
from astraflow.service.client import ServiceClient
from astraflow.service.process import run_service
from astraflow.types import Manifest, VersionsReply


class Rerouted(DataflowClient):
    """Uses other routes to the sources of weights than the announced ones."""

    def __init__(self, client: ServiceClient, routes: dict[str, str]) -> None:
        super().__init__(client)
        self._routes = routes

    async def versions(self, policy: str, *, after: int, wait_s: float = 25.0) -> VersionsReply:
        """Returns the dataflow's reply with other sources."""
        reply = await super().versions(policy, after=after, wait_s=wait_s)
        return msgspec.structs.replace(reply, manifests=tuple(self._rerouted(m) for m in reply.manifests))

    def _rerouted(self, manifest: Manifest) -> Manifest:
        sources = tuple(
            msgspec.structs.replace(source, url=self._routes.get(source.url.rstrip("/"), source.url))
            for source in manifest.sources
        )
        return msgspec.structs.replace(manifest, sources=sources)


async def start_service(settings: Mapping[str, Any], log_path: Path) -> asyncio.subprocess.Process:
    """Starts a service in its own process, which appends its output to a file."""
    with log_path.open("a") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, __file__, json.dumps(settings), stdout=log, stderr=log
        )


async def serve(stop: asyncio.Event, settings: dict[str, Any]) -> None:
    """Serves until the run ends or `stop` is set."""
    client = ServiceClient(settings["url"])
    try:
        link = Rerouted(client, settings["routes"])
        info = await link.run()
        recipe = msgspec.json.decode(info.recipe)
        recipe["rollout"]["engine"] |= settings["engine"]
        recipe["rollout"] |= settings.get("rollout", {})
        parsed = parse_config(recipe, Recipe)
        await run_rollout(
            link,
            stop,
            run_info=info,
            tasks=parsed.tasks.without_curators,
            workflow=parsed.workflow,
            rollout=parsed.rollout,
            cache_dir=Path(settings["cache"]),
            name=settings["name"],
        )
    finally:
        await client.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    sys.exit(run_service(lambda stop: serve(stop, given), name=given["name"]))
