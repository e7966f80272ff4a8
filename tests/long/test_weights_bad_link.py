"""The quickstart, its only rollout service behind a link of 20 Mbit/s and 200 ms that breaks every 5 s."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from astraflow.config import Use
from astraflow.dataflow.client import DataflowClient
from astraflow.processes.rollout_process import recipe_of, run_rollout
from astraflow.service.client import ServiceClient
from astraflow.types import Fingerprints, SourceLink, VersionsReply
from drivers.checked_engine import CheckedEngine
from drivers.system_driver import ROOT, environment
from drivers.transfer_driver import BadLink

STEPS = int(os.environ.get("BAD_LINK_STEPS", "100"))


class FarClient(DataflowClient):
    """Sees the publisher at the far end of the link, and remembers what it published."""

    publisher_url = ""

    async def versions(self, policy: str, *, after: int, wait_s: float = 25.0) -> VersionsReply:
        reply = await super().versions(policy, after=after, wait_s=wait_s)
        far = (SourceLink(kind="http", url=self.publisher_url),)
        CheckedEngine.published.update((m.version, m.digest) for m in reply.manifests)
        manifests = tuple(msgspec.structs.replace(m, sources=far) for m in reply.manifests)
        return msgspec.structs.replace(reply, manifests=manifests)


def free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


@pytest.mark.long
@pytest.mark.timeout(7200)
async def test_a_quickstart_run_over_a_bad_link_still_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quickstart_model: Path
) -> None:
    dataflow_port, publisher_port = free_ports()
    settings = {
        "dataflow.port": dataflow_port,
        "weights.port": publisher_port,
        "weights.delta": "true",
        "rollout.services": 0,
        "policies.actor.model": quickstart_model,
        "policies.actor.train.steps": STEPS,
        "policies.actor.train.backend": "{name: torch, publish_dtype: bfloat16}",
        "policies.actor.table.engine_lag": 2,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "astraflow.cli.main", "run", "recipes/quickstart.yaml"),
        *("--run-dir", str(tmp_path / "run")),
        *(f"{key}={value}" for key, value in settings.items()),
        cwd=ROOT,
        env=environment(),
        stdout=asyncio.subprocess.DEVNULL,
    )
    links: list[BadLink] = []
    serving = asyncio.create_task(serve_from_afar(dataflow_port, publisher_port, tmp_path / "cache", links))
    try:
        run_ends = asyncio.create_task(process.wait())
        await asyncio.wait({run_ends, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not run_ends.done():
            serving.result()  # raises if the service has failed
        assert await run_ends == 0
        # That the run is over may be cut off as well, and then nobody is left who could be asked again.
        await asyncio.wait({serving}, timeout=60)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not serving.cancelled():
        serving.result()
    cuts = sum(link.num_cuts for link in links)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    with capsys.disabled():
        sys.stdout.write(
            f"\nbad link: {cuts} cuts, staleness {summary['staleness_mean']:.2f} (max "
            f"{summary['staleness_max']}), held-out {summary['heldout_before']} -> "
            f"{summary['heldout_after']}\n"
        )
    assert CheckedEngine.problems == []
    assert len(set(CheckedEngine.checked)) > STEPS / 4
    assert summary["audit_ok"]
    assert cuts > 0
    assert summary["staleness_max"] <= summary["staleness_bound"]
    if STEPS >= 100:
        assert summary["heldout_after"] > summary["heldout_before"] + 0.2


async def serve_from_afar(dataflow_port: int, publisher_port: int, cache: Path, links: list[BadLink]) -> None:
    """Serves the run until it ends, everything through links, which are added to `links`."""
    shape = {"bytes_per_s": 2.5e6, "one_way_s": 0.1, "cut_every_s": 5.0}
    control = BadLink("127.0.0.1", dataflow_port, **shape)
    chunks = BadLink("127.0.0.1", publisher_port, **shape)
    links += [control, chunks]
    async with control.opened() as url, chunks.opened() as chunks_url:
        assert urlsplit(chunks_url).port
        client = ServiceClient(url, patience_s=3600.0)
        link = FarClient(client)
        link.publisher_url = chunks_url
        try:
            info = await link.run()
            recipe = recipe_of(info, url)
            engine = Use(
                use="drivers.checked_engine:CheckedEngine", args={"num_slots": 128, "max_context": 64}
            )
            await run_rollout(
                link,
                asyncio.Event(),
                recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"engine": engine})}),
                info,
                cache_dir=cache,
                name="far",
                fingerprints=Fingerprints(recipe=info.fingerprints.recipe),
            )
        finally:
            await client.close()
