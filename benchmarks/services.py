"""Rollout services that a benchmark starts and kills itself, and what they delivered.

Each is `astraflow join` with its own engine, and optionally behind a slow link.

    python benchmarks/services.py SETTINGS    # one service; a JSON object, see `Services.start`
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from astraflow.addons.tiny_models.spec import load_spec
from astraflow.config import parse_config
from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.core.commands import AddWorker, EpisodeFacts, RecordResult, ResultDropped
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import decode_commands, decode_events
from astraflow.errors import UnavailableError
from astraflow.processes.fork_server import SERVICE_ENVIRONMENT, thread_variables
from astraflow.processes.rollout_process import run_rollout
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.run.run import Run
from astraflow.service.client import ServiceClient
from astraflow.service.process import run_service
from astraflow.types import Manifest, VersionsReply, WorkerStatus
from shaped_link import Link, ShapedLink

__all__ = ["Delivery", "Services", "deliveries", "paced_recipe"]

ROOT = Path(__file__).resolve().parent.parent
JOIN_S = 300.0
"""Longest time that services may take to start."""
LOOK_S = 0.3


def paced_recipe(folder: Path, policy: Mapping[str, Any], **sections: Any) -> Recipe:
    """Makes a recipe in which everything but the models is as in a real run. Rollout services join by
    themselves."""
    from astraflow.addons.tiny_models.tiny import init_model  # imports torch

    folder.mkdir(parents=True, exist_ok=True)
    spec = load_spec(ROOT / "recipes" / "models" / "quickstart.yaml", {"warm_start.steps": 0})
    init_model(spec, folder / "model")
    tasks = [json.dumps({"prompt": f"Calculate {n} + 1.", "answer": str(n + 1)}) for n in range(5000)]
    (folder / "tasks.jsonl").write_text("\n".join(tasks))
    content: dict[str, Any] = {
        "tasks": {"sources": {"sums": {"name": "jsonl", "path": str(folder / "tasks.jsonl")}}},
        "policies": {"actor": {"model": str(folder / "model"), **policy}},
        **sections,
    }
    content["rollout"]["services"] = 0
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_recipe(path)


class Services:
    """The rollout services of a run. Example: `await services.start("one"); await services.all_work()`."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._links: list[ShapedLink] = []
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.newest: dict[str, WorkerStatus] = {}
        """Name -> newest status of the newest service of this name."""
        self._dead: set[str] = set()
        """Ids of services that were killed. The dataflow still lists them for a while."""

    async def start(
        self,
        name: str,
        *,
        engine: Mapping[str, Any] | None = None,
        rollout: Mapping[str, Any] | None = None,
        link: Link | None = None,
    ) -> None:
        """Starts a service, behind a link if there is one. `engine`, `rollout`: what differs from the
        recipe's."""
        url = self._run.url
        routes = dict[str, str]()
        if link is not None:
            shaped = ShapedLink(link)
            self._links.append(shaped)
            services = self._run.folder.load_record().services
            port = next(service.port for service in services if service.name.startswith("publisher"))
            publisher = f"http://127.0.0.1:{port}"
            routes = {publisher: await shaped.to(publisher)}
            url = await shaped.to(url)
        settings = {"url": url, "name": name, "cache": str(self._folder / f"cache-{name}"), "routes": routes}
        argument = json.dumps({**settings, "engine": engine or {}, "rollout": rollout or {}})
        env = {**os.environ, **SERVICE_ENVIRONMENT, **thread_variables(1)}  # as the launcher's own services
        with self._log(name).open("a") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                sys.executable, __file__, argument, stdout=log, stderr=log, env=env
            )

    async def kill(self, name: str) -> WorkerStatus | None:
        """Kills a service. Returns its last known status, if it had joined."""
        process = self.processes.pop(name)
        if process.returncode is None:
            process.kill()
        status = self.newest.pop(name, None)
        if status is not None:
            self._dead.add(status.id)
        await process.wait()
        return status

    async def look(self) -> None:
        """Updates `newest`. Raises: RuntimeError that names a service that ended."""
        for name, process in self.processes.items():
            if process.returncode is not None:
                log = self._log(name).read_text()[-2000:]
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{log}")
        try:
            status = await self._run.status()
        except (UnavailableError, TimeoutError):
            return  # the dataflow is starting
        self.newest |= {worker.name: worker for worker in status.workers if worker.id not in self._dead}

    async def all_work(self) -> None:
        """Waits until each service has episodes."""
        async with asyncio.timeout(JOIN_S):
            while not set(self.processes) <= {n for n, w in self.newest.items() if w.load.num_running}:
                await self.look()
                await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Ends all services and their links."""
        for name in list(self.processes):
            await self.kill(name)
        for link in self._links:
            await link.close()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


# --- what was delivered ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivery:
    """An episode that arrived at the dataflow."""

    worker_id: str
    service: str
    at_s: float
    facts: EpisodeFacts
    is_dropped: bool

    def metric(self, name: str) -> int:
        """Returns the sum of a metric."""
        return sum(int(item.value) for item in self.facts.metrics if item.name == name)

    def share_of(self, begin_s: float, end_s: float) -> float:
        """Returns the share of the episode's duration that lies within a window."""
        began_s = self.at_s - self.facts.duration_s
        inside_s = min(self.at_s, end_s) - max(began_s, begin_s)
        return max(0.0, inside_s) / max(self.facts.duration_s, 1e-9)


def deliveries(journal: Path) -> Iterator[Delivery]:
    """Reads every episode of a journal, in the order of their arrival."""
    names = dict[str, str]()
    with JournalReader(journal) as reader:
        for record in reader.records():
            for command, events in zip(decode_commands(record), decode_events(record), strict=True):
                if isinstance(command, AddWorker):
                    names[command.worker_id] = command.name
                if isinstance(command, RecordResult) and isinstance(command.outcome, EpisodeFacts):
                    is_dropped = any(isinstance(event, ResultDropped) for event in events)
                    name = names[command.worker_id]
                    yield Delivery(command.worker_id, name, record.at_s, command.outcome, is_dropped)


# --- one service ----------------------------------------------------------------------------------


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


async def serve(stop: asyncio.Event, settings: dict[str, Any]) -> None:
    """Serves until the run ends or `stop` is set."""
    client = ServiceClient(settings["url"])
    try:
        link = Rerouted(client, settings["routes"])
        info = await link.run()
        recipe = msgspec.json.decode(info.recipe)
        recipe["rollout"]["engine"] |= settings["engine"]
        recipe["rollout"] |= settings["rollout"]
        parsed = parse_config(recipe, Recipe)
        await run_rollout(link, stop, parsed, info, cache_dir=Path(settings["cache"]), name=settings["name"])
    finally:
        await client.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    sys.exit(run_service(lambda stop: serve(stop, given), name=given["name"]))
