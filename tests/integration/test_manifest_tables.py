"""The tensor table of a policy travels once: with its first manifest, and not with those that follow."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.errors import Error, WireError
from astraflow.service.client import HttpReply, MemoryTransport, ServiceClient
from astraflow.types import Manifest, Publication, PublicationReply, VersionsReply
from astraflow.weights.manifest import table_of
from drivers.dataflow_driver import Run, ScriptedTrainer, ScriptedWorker, refused, running

PATH = "/v1/policies/actor/versions"


def make_wide(version: int, num_tensors: int) -> Manifest:
    names = ("model.embed_tokens.weight", *(f"model.layers.{n}.weight" for n in range(1, num_tensors)))
    table = table_of((name, (32, 2), "float32") for name in names)
    return Manifest(
        policy="actor", version=version, kind="full", tensors=table, chunks=(), digest="00", num_bytes=0
    )


class WideTrainer(ScriptedTrainer):
    """Its model has many tensors."""

    num_tensors = 1000

    async def publish(self, version: int, step: int) -> None:
        manifest = make_wide(version, self.num_tensors)
        publication = Publication(epoch=self.session.epoch, step=step, manifest=manifest)
        await self.client.publish(self.policy, publication)
        self.version = version


class CountingTransport:
    """Counts the bytes of requests and answers about versions; `lead_to` another dataflow after a restart."""

    def __init__(self, run: Run) -> None:
        self.sent: list[int] = []
        self.received: list[int] = []
        self.lead_to(run)

    def lead_to(self, run: Run) -> None:
        self._inner = MemoryTransport(run.service.app)

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> HttpReply:
        reply = await self._inner.request(method, target, headers=headers, body=body, timeout_s=timeout_s)
        if target.startswith(PATH):
            self.sent.append(len(body))
            self.received.append(len(reply.body))
        return reply

    async def close(self) -> None:
        await self._inner.close()


def client_of(run: Run) -> tuple[DataflowClient, CountingTransport]:
    counts = CountingTransport(run)
    return DataflowClient(ServiceClient("http://memory", patience_s=1.0, transport=counts)), counts


async def train(run: Run, trainer: ScriptedTrainer, steps: int, *, after: int = 0) -> None:
    """Lets a rollout service answer, and the trainer make steps."""
    worker = ScriptedWorker(run.client)
    await worker.register()
    for step in range(after, after + steps):
        leases = await worker.lease(8)
        await worker.send(*[await worker.answer(lease) for lease in leases])
        assert await trainer.train_step(step)


async def travelled(folder: Path, num_tensors: int) -> tuple[list[int], list[int], list[int]]:
    """Bytes of two publications, of the answers with them, and of their records in the journal."""
    async with running(folder) as run:
        client, counts = client_of(run)
        trainer = WideTrainer(client)
        trainer.num_tensors = num_tensors
        reader, read = client_of(run)
        await trainer.attach()
        first = await reader.versions("actor", after=-1, wait_s=0)
        await train(run, trainer, 1)
        second = await reader.versions("actor", after=0, wait_s=0)
        assert first.manifests == (make_wide(0, num_tensors),)
        assert second.manifests == (make_wide(1, num_tensors),)
        await run.journal.wait_flushed()
    with JournalReader(folder) as journal:
        records = [
            len(record.commands) for record in journal.records() if b"PublishVersion" in record.commands
        ]
    return counts.sent, read.received, records


async def test_the_second_manifest_does_not_grow_with_the_number_of_tensors(tmp_path: Path) -> None:
    few, many = [await travelled(tmp_path / str(num), num) for num in (2, 2000)]
    for small, large in zip(few, many, strict=True):
        assert len(small) == len(large) == 2
        assert large[0] > 50 * small[0], "the first one has the table"
        assert large[1] < small[1] + 32, "the second one has its name"


async def test_a_caller_without_the_table_gets_it_at_any_version(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        trainer = WideTrainer(run.client)
        await trainer.attach()
        await train(run, trainer, 2)
        late, _ = client_of(run)
        expected = tuple(make_wide(version, 1000) for version in (1, 2))
        assert (await late.versions("actor", after=0, wait_s=0)).manifests == expected
        assert (await late.versions("actor", after=0, wait_s=0)).manifests == expected
        wrong = await run.calls.call("GET", PATH, VersionsReply, params={"after": "0", "table": "f" * 32})
        assert wrong.manifests == expected


@pytest.mark.parametrize("snapshot_every", [3, 20_000])
async def test_the_table_survives_a_restart_and_trainers_go_on(tmp_path: Path, snapshot_every: int) -> None:
    async with running(tmp_path, snapshot_every=snapshot_every) as run:
        client, way = client_of(run)
        trainer = WideTrainer(client)
        await trainer.attach()
        await train(run, trainer, 1)
    async with running(tmp_path, snapshot_every=snapshot_every) as run:
        way.lead_to(run)
        await train(run, trainer, 1, after=1)
        assert max(way.sent[1:]) < way.sent[0] / 10, "only the first publication had the table"
        reply = await run.client.versions("actor", after=-1, wait_s=0)
        assert reply.manifests[-1] == make_wide(2, 1000)
        assert all(manifest.tensors == make_wide(0, 1000).tensors for manifest in reply.manifests)


async def test_a_name_that_the_dataflow_does_not_know_is_refused_and_the_table_is_sent(
    tmp_path: Path,
) -> None:
    async with running(tmp_path / "first") as run:
        client, way = client_of(run)
        trainer = WideTrainer(client)
        await trainer.attach()
    async with running(tmp_path / "second") as run:
        bare = msgspec.structs.replace(make_wide(0, 1000), tensors=())
        named = Publication(epoch=1, step=0, manifest=bare, table="0" * 32)
        refusal = await refused(run.calls.call("POST", PATH, PublicationReply, body=named))
        assert refusal.code == "unknown_table"
        assert "publish the manifest with its tensors" in str(refusal)
        way.lead_to(run)
        await trainer.attach()
        assert [size > 10_000 for size in way.sent] == [True, False, True], "by name, then with the table"
        reply = await run.client.versions("actor", after=-1, wait_s=0)
        assert reply.manifests == (make_wide(0, 1000),)


async def test_a_table_beside_its_name_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        trainer = WideTrainer(run.client)
        await trainer.attach()
        both = Publication(epoch=1, step=0, manifest=make_wide(1, 1000), table="0" * 32)
        with pytest.raises(WireError, match="the name of a table, and tensors"):
            await run.calls.call("POST", PATH, PublicationReply, body=both)


async def test_another_table_is_refused_as_before(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        trainer = WideTrainer(run.client)
        await trainer.attach()
        trainer.num_tensors = 999
        with pytest.raises(Error, match="its tensors are not those of version 0"):
            await trainer.publish(1, 1)
