"""Deltas from a publisher to a receiver."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from starlette.types import Receive, Scope, Send

from astraflow.errors import RefusedError, UnavailableError, WeightsError, WireError
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.types import DeltaFile, HandOver, Manifest, PublisherHealth
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.delta.encoder import encode_blocks, encode_header, encode_trailer
from astraflow.weights.manifest import digest_of, lay_out, pack
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver
from drivers.weight_fakes import URL, WeightRig, make_host_tensor, trained, weight_rig


def make_history(num_versions: int, *, size: int = 20_000, dtype: str = "bfloat16") -> list[list[HostTensor]]:
    """Versions of two tensors and an empty one, about one percent apart."""
    history = [
        [
            make_host_tensor("a", (size,), dtype),
            make_host_tensor("none", (0,), "float32"),
            make_host_tensor("b", (size // 2 + 1,), dtype, seed=1),
        ]
    ]
    while len(history) < num_versions:
        history.append(trained(history[-1], seed=len(history)))
    return history


async def publish(rig: WeightRig, history: list[list[HostTensor]]) -> list[Manifest]:
    manifests: list[Manifest] = []
    for version, weights in enumerate(history):
        files = {} if version else rig.model_files()
        manifests.append(await rig.client.publish("actor", version, weights, files))
    return manifests


def assert_holds(snapshot: WeightSnapshot, weights: list[HostTensor]) -> None:
    assert [(t.name, t.data.tobytes()) for t in snapshot.tensors] == [
        (t.name, t.data.tobytes()) for t in weights
    ]


def read_bytes(rig: WeightRig) -> int:
    return sum(end - start for _, _, start, end in rig.reader.reads)


async def test_a_receiver_that_follows_fetches_what_changed(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        history = make_history(4)
        for version, weights in enumerate(history):
            files = {} if version else rig.model_files()
            manifest = await rig.client.publish("actor", version, weights, files)
            assert (manifest.kind, manifest.base) == (("delta", version - 1) if version else ("full", -1))
            rig.reader.reads.clear()
            snapshot = await rig.receiver.fetch(manifest)
            assert_holds(snapshot, weights)
            assert snapshot.model_dir.joinpath("config.json").is_file()
            assert version == 0 or read_bytes(rig) < 2_000
        assert rig.receiver.num_fallbacks == 0


async def test_the_host_copy_is_patched_in_place_once_nobody_looks(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        history = make_history(3)
        manifests = await publish(rig, history)
        first = await rig.receiver.fetch(manifests[0])
        second = await rig.receiver.fetch(manifests[1])
        assert_holds(first, history[0])
        address = second.tensors[0].data.ctypes.data
        assert first.tensors[0].data.ctypes.data != address
        view = second.tensors[0].data[10:20].view(np.uint16)
        del second
        third = await rig.receiver.fetch(manifests[2])
        assert third.tensors[0].data.ctypes.data != address
        assert view.tobytes() == history[1][0].data[10:20].tobytes()
        address = third.tensors[0].data.ctypes.data
        del third
        fourth = await rig.client.publish("actor", 3, trained(history[2], seed=9), {})
        assert (await rig.receiver.fetch(fourth)).tensors[0].data.ctypes.data == address


async def test_who_fell_behind_takes_the_chain_and_who_joins_the_full_version_and_the_chain(
    tmp_path: Path,
) -> None:
    async with weight_rig(tmp_path, delta=True, full_every=4) as rig:
        history = make_history(7)
        manifests = await publish(rig, history)
        assert [m.kind for m in manifests] == ["full", "delta", "delta", "delta", "full", "delta", "delta"]
        assert manifests[4].shortcut is not None
        await rig.receiver.fetch(manifests[1])
        rig.reader.reads.clear()
        assert_holds(await rig.receiver.fetch(manifests[6]), history[6])
        assert read_bytes(rig) < 10_000
        joiner = Receiver(tmp_path / "b", readers={"http": rig.reader}, finders={"http": rig.http})
        rig.reader.reads.clear()
        assert_holds(await joiner.fetch(manifests[6]), history[6])
        files = [f.chunk for f in manifests[6].files if f.chunk.num_bytes]
        chunks = [chunk for manifest in manifests[4:] for chunk in manifest.chunks]
        assert {chunk for _, chunk, _, _ in rig.reader.reads} == {c.hash for c in (*files, *chunks)}
        await joiner.close()


async def test_a_version_for_evaluation_does_not_displace_the_newest(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        history = make_history(4)
        manifests = await publish(rig, history)
        assert_holds(await rig.receiver.fetch(manifests[2]), history[2])
        older = await rig.receiver.fetch(manifests[1])
        again = await rig.receiver.fetch(manifests[2])
        rig.reader.reads.clear()
        assert_holds(await rig.receiver.fetch(manifests[3]), history[3])
        assert read_bytes(rig) < 2_000
        assert_holds(older, history[1])
        assert_holds(again, history[2])


async def test_the_version_that_is_here_needs_no_bytes(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        history = make_history(2)
        manifests = await publish(rig, history)
        first = await rig.receiver.fetch(manifests[1])
        rig.reader.reads.clear()
        second = await rig.receiver.fetch(manifests[1])
        assert rig.reader.reads == []
        second.tensors[0].data[:] = 0
        assert_holds(first, history[1])
        del second
        assert_holds(await rig.receiver.fetch(manifests[1]), history[1])


async def test_a_host_copy_that_somebody_wrote_into_is_noticed_and_fetched_anew(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        history = make_history(2)
        manifests = await publish(rig, history)
        (await rig.receiver.fetch(manifests[0])).tensors[0].data[77] ^= 4
        assert_holds(await rig.receiver.fetch(manifests[1]), history[1])
        assert rig.receiver.num_fallbacks == 1


async def test_a_damaged_delta_names_itself_and_the_old_version_stays(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        history = make_history(3)
        manifests = await publish(rig, history)
        old = await rig.receiver.fetch(manifests[0])
        path = tmp_path / "weights" / "chunks" / manifests[1].chunks[0].hash
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(WeightsError, match=r"'actor' version 1: chunk 0 \(delta 0 -> 1\).*http://publ"):
            await rig.receiver.fetch(manifests[1])
        assert_holds(old, history[0])
        path.write_bytes(good)
        assert_holds(await rig.receiver.fetch(manifests[2]), history[2])


async def test_a_delta_to_something_else_is_refused(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        manifests = await publish(rig, make_history(3))
        await rig.receiver.fetch(manifests[1])
        exchanged = msgspec.structs.replace(
            manifests[2], chunks=manifests[1].chunks, num_bytes=manifests[1].num_bytes
        )
        with pytest.raises(WeightsError, match="version 2 as a delta on version 1: it leads from"):
            await rig.receiver.fetch(exchanged)
        lying = msgspec.structs.replace(manifests[2], digest="0" * 32)
        with pytest.raises(WeightsError, match="version 2 as a delta on version 1"):
            await rig.receiver.fetch(lying)


async def test_a_delta_whose_base_is_nowhere_is_no_path(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        manifests = await publish(rig, make_history(2))
        orphan = msgspec.structs.replace(manifests[1], version=9, base=8)
        with pytest.raises(WeightsError, match="version 9 is a delta on 8, which no path reaches"):
            await rig.receiver.fetch(orphan)


async def test_a_forgotten_delta_on_the_way_is_bypassed_by_the_full_version(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True, full_every=3, keep=1) as rig:
        history = make_history(8)
        first = await rig.client.publish("actor", 0, history[0], rig.model_files())
        await rig.receiver.fetch(first)
        manifests = [await rig.client.publish("actor", v, history[v], {}) for v in range(1, 8)]
        await rig.client.forget("actor", [])
        assert_holds(await rig.receiver.fetch(manifests[-1]), history[7])
        assert rig.receiver.num_fallbacks == 0


async def test_a_new_session_begins_with_a_full_version(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        history = make_history(4)
        await publish(rig, history[:2])
        restarted = PublisherClient(rig.service, rig.publisher.store.incoming, delta=True)
        manifest = await restarted.publish("actor", 2, history[2], {})
        assert (manifest.kind, manifest.shortcut) == ("full", None)
        assert (await restarted.publish("actor", 3, history[3], {})).kind == "delta"


async def test_a_delta_that_a_new_session_publishes_again_becomes_full(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        history = make_history(3)
        manifests = await publish(rig, history[:2])
        restarted = PublisherClient(rig.service, rig.publisher.store.incoming, delta=True)
        again = await restarted.publish("actor", 1, history[1], {})
        assert (manifests[1].kind, again.kind) == ("delta", "full")
        assert again.digest == manifests[1].digest
        joiner = Receiver(tmp_path / "b", readers={"http": rig.reader}, finders={"http": rig.http})
        assert_holds(await joiner.fetch(again), history[1])
        assert_holds(await joiner.fetch(await restarted.publish("actor", 2, history[2], {})), history[2])
        await joiner.close()


@pytest.mark.parametrize("change", ["shape", "name", "dtype"])
async def test_another_tensor_table_is_published_in_full(tmp_path: Path, change: str) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        [weights] = make_history(1)
        other = {
            "shape": HostTensor("a", (200, 100), "bfloat16", weights[0].data),
            "name": HostTensor("z", (20_000,), "bfloat16", weights[0].data),
            "dtype": HostTensor("a", (20_000,), "float16", weights[0].data),
        }[change]
        history = [weights, [other, *weights[1:]]]
        manifests = await publish(rig, history)
        assert manifests[1].kind == "full"
        for manifest, expected in zip(manifests, history, strict=True):
            assert_holds(await rig.receiver.fetch(manifest), expected)


async def test_a_difference_as_large_as_the_version_is_published_in_full(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        history = [[make_host_tensor("a", (5_000,), "float32", seed=i)] for i in range(2)]
        manifests = await publish(rig, history)
        assert (manifests[1].kind, manifests[1].shortcut) == ("full", None)
        health = await rig.service.call("GET", "/v1/health", PublisherHealth)
        assert health.num_chunks == len({c.hash for m in manifests for c in m.chunks}) + 2
        assert_holds(await rig.receiver.fetch(manifests[1]), history[1])


async def test_a_long_chain_of_large_deltas_is_cut_by_a_full_version(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        weights = [make_host_tensor("a", (5_000,), "float16")]
        history = [weights]
        while len(history) < 8:
            random = np.random.default_rng(len(history))
            data = history[-1][0].data.copy()
            data[:4_000] = random.integers(0, 256, 4_000, np.uint8)
            history.append([HostTensor("a", (5_000,), "float16", data)])
        manifests = await publish(rig, history)
        chain_bytes = 0
        for manifest in manifests:
            chain_bytes = 0 if manifest.kind == "full" else chain_bytes + manifest.num_bytes
            assert chain_bytes < 10_100
        assert {m.kind for m in manifests} == {"full", "delta"}
        assert_holds(await rig.receiver.fetch(manifests[-1]), history[-1])


async def test_a_restarted_publisher_goes_on_with_deltas(tmp_path: Path) -> None:
    history = make_history(4)
    current: list[WeightRig] = []

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        await current[-1].publisher(scope, receive, send)

    service = ServiceClient(URL, transport=MemoryTransport(route))
    client = PublisherClient(service, tmp_path / "weights" / "incoming", delta=True)
    for version, kind in enumerate(["full", "delta", "delta", "full"]):
        if version == 3:
            (tmp_path / "weights" / "manifests" / "actor" / "2.json").unlink()
        async with weight_rig(tmp_path, delta=True) as rig:
            current.append(rig)
            manifest = await client.publish("actor", version, history[version], {})
            assert manifest.kind == kind
            assert_holds(await rig.receiver.fetch(manifest), history[version])


async def test_a_full_version_that_is_due_carries_its_delta_and_leaves_no_files(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True, full_every=2) as rig:
        history = make_history(5)
        manifests = await publish(rig, history)
        assert [m.kind for m in manifests] == ["full", "delta", "full", "delta", "full"]
        assert [m.shortcut.base for m in manifests if m.shortcut is not None] == [1, 3]
        assert list((rig.publisher.store.incoming / "actor").iterdir()) == []
        for manifest, weights in zip(manifests, history, strict=True):
            assert_holds(await rig.receiver.fetch(manifest), weights)


async def test_after_a_failed_publication_the_next_is_full_and_right(tmp_path: Path) -> None:
    """The copy may be of the version that the publisher never got."""
    async with weight_rig(tmp_path, delta=True) as rig:
        history = make_history(5)
        await publish(rig, history[:2])
        is_up = [False]

        async def route(scope: Scope, receive: Receive, send: Send) -> None:
            if not is_up[0]:
                raise ConnectionError("down")
            await rig.publisher(scope, receive, send)

        service = ServiceClient(URL, transport=MemoryTransport(route), patience_s=0.1)
        client = PublisherClient(service, rig.publisher.store.incoming, delta=True)
        with pytest.raises(UnavailableError):
            await client.publish("actor", 2, history[2], {})
        is_up[0] = True
        assert (await client.publish("actor", 2, history[2], {})).kind == "full"
        assert (await client.publish("actor", 3, history[3], {})).kind == "delta"
        is_up[0] = False
        with pytest.raises(UnavailableError):
            await client.publish("actor", 4, history[4], {})
        is_up[0] = True
        manifest = await client.publish("actor", 4, history[4], {})
        assert (manifest.kind, manifest.shortcut) == ("full", None)
        assert_holds(await rig.receiver.fetch(manifest), history[4])


async def test_a_delta_that_is_torn_or_leads_elsewhere_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True) as rig:
        history = make_history(2)
        [first] = await publish(rig, history[:1])
        infos, old, new = lay_out(history[1]), pack(history[0]), pack(history[1])
        digests = {"base_digest": digest_of(old), "digest": digest_of(new)}
        blocks = [*encode_blocks(old, new, infos)]
        rest = b"".join([*blocks, encode_trailer(infos, len(blocks))])
        good = encode_header(infos, **digests) + rest
        backwards = encode_header(infos, **{**digests, "base_digest": digests["digest"]}) + rest
        path = rig.publisher.store.incoming / "actor" / "1"
        hand_over = HandOver(
            policy="actor",
            version=1,
            delta=DeltaFile(path="actor/1", base=0),
            tensors=infos,
            digest=digests["digest"],
        )
        before = await rig.service.call("GET", "/v1/health", PublisherHealth)
        cases = [
            (good[:-9], "the delta ends"),
            (good[:200] + bytes([good[200] ^ 1]) + good[201:], "its checksum is wrong"),
            (backwards, "leads from"),
        ]
        for content, message in cases:
            path.write_bytes(content)
            with pytest.raises((WeightsError, WireError), match=message):
                await rig.service.call("POST", "/v1/publish", Manifest, body=hand_over)
        for name in ("../../etc/hostname", "actor/absent"):
            outside = msgspec.structs.replace(hand_over, delta=DeltaFile(path=name, base=0))
            with pytest.raises(WireError, match="is not a file inside"):
                await rig.service.call("POST", "/v1/publish", Manifest, body=outside)
        unknown = msgspec.structs.replace(hand_over, delta=DeltaFile(path="actor/1", base=7), version=8)
        path.write_bytes(good)
        with pytest.raises(RefusedError, match="is needed in full") as refusal:
            await rig.service.call("POST", "/v1/publish", Manifest, body=unknown)
        assert refusal.value.code == "full_needed"
        assert await rig.service.call("GET", "/v1/health", PublisherHealth) == before
        manifest = await rig.service.call("POST", "/v1/publish", Manifest, body=hand_over)
        assert (manifest.kind, manifest.files) == ("delta", first.files)
        assert_holds(await rig.receiver.fetch(manifest), history[1])


async def test_chains_with_eval_and_many_tasks_never_mix(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True, full_every=3) as rig:
        history = make_history(9)
        manifests = await publish(rig, history)
        order = [0, 3, 1, 8, 2, 8, 5, 7, 8, 0]
        snapshots = await asyncio.gather(*(rig.receiver.fetch(manifests[v]) for v in order))
        for version, snapshot in zip(order, snapshots, strict=True):
            assert_holds(snapshot, history[version])


async def test_a_cut_chain_resumes(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, delta=True, chunk_bytes=4096) as rig:
        history = make_history(3, size=200_000)
        manifests = await publish(rig, history)
        await rig.receiver.fetch(manifests[0])
        rig.reader.reads.clear()
        arrived: list[int] = []

        def fail(url: str, count: int, data: bytes) -> bytes:
            if count > 2:
                raise UnavailableError("gone")
            arrived.append(count)
            return data

        rig.reader.script = fail
        with pytest.raises(UnavailableError, match="gone"):
            await rig.receiver.fetch(manifests[2])
        before = {rig.reader.reads[count - 1][1:] for count in arrived}
        assert before
        rig.reader.reads.clear()
        rig.reader.script = lambda url, count, data: data
        assert_holds(await rig.receiver.fetch(manifests[2]), history[2])
        assert before.isdisjoint({read[1:] for read in rig.reader.reads})
