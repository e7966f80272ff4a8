"""Rollout services that serve weights, as others learn of them."""

from pathlib import Path

import pytest

from astraflow.errors import RefusedError, WireError
from astraflow.types import Fingerprints, Heartbeat, Load, RegisterWorker
from astraflow.weights.addresses import PeerRules
from drivers.dataflow_driver import Run, ScriptedTrainer, running

LINK = "http://10.0.0.7:8500"
RULES = PeerRules(is_on=True, networks=("10.0.0.0/24",))


async def join(run: Run, name: str, peer_url: str) -> str:
    request = RegisterWorker(
        name=name,
        hosts=("actor",),
        engine="scripted",
        num_slots=8,
        peer_url=peer_url,
        fingerprints=Fingerprints(recipe="r1"),
    )
    return (await run.client.register(request)).worker_id


async def peers(run: Run) -> dict[str, str]:
    reply = await run.client.versions("actor", after=-1, wait_s=0)
    return {s.labels["peer"]: s.url for s in reply.manifests[0].sources if "peer" in s.labels}


async def test_versions_name_the_services_that_serve_weights(tmp_path: Path) -> None:
    async with running(tmp_path, peer_rules=RULES) as run:
        trainer = ScriptedTrainer(run.client)
        await trainer.attach()
        await trainer.publish(0, 0)
        await join(run, "quiet", "")
        giver = await join(run, "giver", LINK)
        assert await peers(run) == {"giver": LINK}
        await run.client.drain(giver)
        assert await peers(run) == {}


async def test_a_heartbeat_names_the_address_again(tmp_path: Path) -> None:
    async with running(tmp_path, peer_rules=RULES) as run:
        trainer = ScriptedTrainer(run.client)
        await trainer.attach()
        await trainer.publish(0, 0)
        worker = await join(run, "giver", "")
        await run.client.heartbeat(worker, Heartbeat(lease_ids=(), load=Load(), peer_url=LINK))
        assert await peers(run) == {"giver": LINK}


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "https://10.0.0.7:8500", "http://user@host/path", "http://" + "a" * 300]
)
async def test_an_address_that_is_none_is_refused(tmp_path: Path, url: str) -> None:
    async with running(tmp_path, peer_rules=RULES) as run:
        with pytest.raises(WireError, match="peer_url"):
            await join(run, "giver", url)


async def test_where_peers_are_off_nobody_hears_of_an_address(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        trainer = ScriptedTrainer(run.client)
        await trainer.attach()
        await trainer.publish(0, 0)
        worker = await join(run, "giver", LINK)
        await run.client.heartbeat(worker, Heartbeat(lease_ids=(), load=Load(), peer_url=LINK))
        assert await peers(run) == {}


@pytest.mark.parametrize("http", [False, True])
async def test_a_service_may_only_name_the_address_that_it_calls_from(tmp_path: Path, http: bool) -> None:
    async with running(tmp_path, peer_rules=PeerRules(is_on=True), http=http) as run:
        trainer = ScriptedTrainer(run.client)
        await trainer.attach()
        await trainer.publish(0, 0)
        with pytest.raises(RefusedError, match="not the address that the service calls") as refused:
            await join(run, "giver", LINK)
        assert refused.value.code == "peer_address"
        worker = await join(run, "giver", "http://127.0.0.1:8500")
        assert await peers(run) == {"giver": "http://127.0.0.1:8500"}
        for url in (LINK, "http://169.254.169.254:80"):
            await run.client.heartbeat(worker, Heartbeat(lease_ids=(), load=Load(), peer_url=url))
            assert await peers(run) == {}
