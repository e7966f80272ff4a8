import json
import shutil
from pathlib import Path

import msgspec
import pytest

from astraflow.errors import ConfigError, DataError, RefusedError, UnavailableError, WeightsError, WireError
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.types import (
    Chunk,
    FileInfo,
    HandOver,
    Manifest,
    PublisherHealth,
    ServedVersions,
    SourceLink,
)
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manifest import (
    SEGMENT_BYTES,
    build_manifest,
    check_manifest,
    cut,
    hash_bytes,
    lay_out,
    pack,
)
from astraflow.weights.publisher import Publisher
from astraflow.weights.publisher_client import PublisherClient
from drivers.weight_fakes import URL, make_host_tensor, make_weights, weight_rig


def make_hand_over(incoming: Path, *, version: int = 0, path: str = "actor/0.raw") -> HandOver:
    """Bytes in the incoming folder, and the table that fits them."""
    weights = make_weights()
    manifest = build_manifest("actor", version, weights, chunk_bytes=4096)
    file = FileInfo(name="config.json", chunk=Chunk(hash=hash_bytes(b"{}"), num_bytes=2))
    (incoming / "actor").mkdir(exist_ok=True)
    (incoming / "actor" / "0.raw").write_bytes(pack(weights).tobytes() + b"{}")
    return HandOver(
        policy="actor",
        version=version,
        path=path,
        tensors=manifest.tensors,
        digest=manifest.digest,
        files=(file,),
    )


# --- chunks that are handed over as files ---------------------------------------------------------

LARGE = [make_host_tensor("a", (500_001,), "bfloat16", seed=1), make_host_tensor("b", (70, 1000), seed=2)]
"""Three chunks of a segment each; the second one has bytes of both tensors."""


def make_folder(incoming: Path) -> tuple[HandOver, Path]:
    """A folder of chunks in the incoming folder, and the table that fits them."""
    manifest = build_manifest("actor", 0, LARGE, chunk_bytes=SEGMENT_BYTES)
    folder = incoming / "actor" / "0.chunks"
    folder.mkdir(parents=True)
    data = pack(LARGE).tobytes()
    for number, (start, end) in enumerate(cut(len(data), SEGMENT_BYTES)):
        (folder / str(number)).write_bytes(data[start:end])
    (folder / "files").write_bytes(b"{}")
    file = FileInfo(name="config.json", chunk=Chunk(hash=hash_bytes(b"{}"), num_bytes=2))
    hand_over = HandOver(
        policy="actor",
        version=0,
        path="actor/0.chunks",
        tensors=manifest.tensors,
        digest=manifest.digest,
        files=(file,),
    )
    return hand_over, folder


@pytest.mark.parametrize("can_link", [True, False])
async def test_chunks_are_written_once_where_the_file_system_has_links(
    tmp_path: Path, can_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no links here")

    if not can_link:
        monkeypatch.setattr("os.link", refuse)
    async with weight_rig(tmp_path, chunk_bytes=SEGMENT_BYTES) as rig:
        store = rig.publisher.store
        hand_over, folder = make_folder(store.incoming)
        inodes = {path.stat().st_ino for path in folder.iterdir()}
        manifest = await rig.service.call("POST", "/v1/publish", Manifest, body=hand_over)
        expected = build_manifest("actor", 0, LARGE, chunk_bytes=SEGMENT_BYTES)
        assert (manifest.chunks, manifest.files) == (expected.chunks, hand_over.files)
        is_same_file = [store.path(chunk.hash).stat().st_ino in inodes for chunk in manifest.chunks]
        assert is_same_file == [can_link] * 3
        shutil.rmtree(folder)
        snapshot = await rig.receiver.fetch(manifest)
        assert [t.data.tobytes() for t in snapshot.tensors] == [t.data.tobytes() for t in LARGE]
        assert not list((store.incoming.parent / "chunks").glob("*.tmp"))


@pytest.mark.parametrize("chunk_bytes", [SEGMENT_BYTES, 3 * SEGMENT_BYTES, 1 << 30, 4096, 0])
async def test_a_client_publishes_the_same_version_in_one_file_and_in_chunks(
    tmp_path: Path, chunk_bytes: int
) -> None:
    async with weight_rig(tmp_path, chunk_bytes=chunk_bytes or 4096) as rig:
        incoming = rig.publisher.store.incoming
        client = PublisherClient(rig.service, incoming, chunk_bytes=chunk_bytes)
        manifest = await client.publish("actor", 0, LARGE, rig.model_files())
        expected = build_manifest("actor", 0, LARGE, chunk_bytes=chunk_bytes or 4096)
        assert (manifest.chunks, manifest.digest) == (expected.chunks, expected.digest)
        snapshot = await rig.receiver.fetch(manifest)
        assert json.loads((snapshot.model_dir / "config.json").read_text())["model_type"] == "qwen3"
        assert list((incoming / "actor").iterdir()) == []
        assert await client.publish("actor", 0, LARGE, rig.model_files()) == manifest


async def test_chunks_that_were_refused_or_interrupted_are_taken_over_when_they_come_again(
    tmp_path: Path,
) -> None:
    async with weight_rig(tmp_path, chunk_bytes=SEGMENT_BYTES) as rig:
        hand_over, folder = make_folder(rig.publisher.store.incoming)
        wrong = msgspec.structs.replace(hand_over, digest="0" * 32)
        with pytest.raises(WireError, match="expected 0000"):
            await rig.service.call("POST", "/v1/publish", Manifest, body=wrong)
        chunk_hash = hash_bytes((folder / "0").read_bytes())
        # As if the publisher was killed after it had taken over the first chunk.
        (tmp_path / "weights" / "chunks" / chunk_hash).hardlink_to(folder / "0")
    async with weight_rig(tmp_path, chunk_bytes=SEGMENT_BYTES) as rig:
        assert list((tmp_path / "weights" / "chunks").iterdir()) == []
        manifest = await rig.service.call("POST", "/v1/publish", Manifest, body=hand_over)
        await rig.receiver.fetch(manifest)


@pytest.mark.parametrize("damage", ["missing", "longer", "shifted", "more", "link", "fewer files"])
async def test_chunks_of_other_sizes_than_those_of_the_table_are_refused(tmp_path: Path, damage: str) -> None:
    async with weight_rig(tmp_path, chunk_bytes=SEGMENT_BYTES) as rig:
        hand_over, folder = make_folder(rig.publisher.store.incoming)
        first = folder / "0"
        if damage in {"missing", "link"}:
            first.rename(folder.parent / "elsewhere")
        if damage == "link":
            first.symlink_to(folder.parent / "elsewhere")
        elif damage == "longer":
            first.write_bytes(bytes(SEGMENT_BYTES + 1))
        elif damage == "shifted":
            first.write_bytes(bytes(SEGMENT_BYTES - 1))
            (folder / "1").write_bytes(bytes(SEGMENT_BYTES + 1))
        elif damage == "more":
            (folder / "3").touch()
        elif damage == "fewer files":
            (folder / "files").write_bytes(b"")
        with pytest.raises(WireError, match="its table needs"):
            await rig.service.call("POST", "/v1/publish", Manifest, body=hand_over)
        health = await rig.service.call("GET", "/v1/health", PublisherHealth)
        assert (health.num_chunks, health.versions) == (0, ())


# --- versions -------------------------------------------------------------------------------------


async def test_a_version_is_cut_hashed_and_announced(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        weights = make_weights()
        manifest = await rig.client.publish("actor", 0, weights, rig.model_files())
        check_manifest(manifest)
        expected = build_manifest("actor", 0, weights, chunk_bytes=4096)
        assert (manifest.chunks, manifest.digest) == (expected.chunks, expected.digest)
        assert manifest.tensors == lay_out(weights)
        assert {f.name for f in manifest.files} == {"config.json", "merges.txt"}
        assert manifest.sources == (SourceLink(kind="http", url=URL),)
        assert await rig.service.call("GET", "/v1/manifests/actor/0", Manifest) == manifest
        assert list((rig.publisher.store.incoming / "actor").iterdir()) == []


async def test_the_config_of_version_0_names_the_dtype_of_its_tensors(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        files = rig.model_files()
        files["config.json"].write_text('{"torch_dtype": "bfloat16"}')
        snapshot = await rig.receiver.fetch(await rig.client.publish("actor", 0, [make_weights()[1]], files))
        config = json.loads((snapshot.model_dir / "config.json").read_text())
        assert config == {"torch_dtype": snapshot.tensors[0].dtype} != {"torch_dtype": "bfloat16"}
        assert files["config.json"].read_text() == '{"torch_dtype": "bfloat16"}'


async def test_later_versions_carry_the_files_of_the_first(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, keep=1) as rig:
        first = await rig.client.publish("actor", 0, make_weights(seed=0), rig.model_files())
        second = await rig.client.publish("actor", 1, make_weights(seed=1), {})
        assert second.files == first.files
        await rig.client.forget("actor", [])
        third = await rig.client.publish("actor", 2, make_weights(seed=2), {})
        assert third.files == first.files
        assert (await rig.receiver.fetch(third)).model_dir.joinpath("config.json").is_file()


async def test_publishing_the_same_again_answers_the_same(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        first = await rig.client.publish("actor", 0, make_weights(), rig.model_files())
        assert await rig.client.publish("actor", 0, make_weights(), rig.model_files()) == first


async def test_an_answer_that_was_lost_is_given_again_without_the_file(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        hand_over = make_hand_over(rig.publisher.store.incoming)
        first = await rig.service.call("POST", "/v1/publish", Manifest, body=hand_over)
        (rig.publisher.store.incoming / "actor" / "0.raw").unlink()
        assert await rig.service.call("POST", "/v1/publish", Manifest, body=hand_over) == first


async def test_a_version_never_changes(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        first = await rig.client.publish("actor", 0, make_weights(), {})
        with pytest.raises(RefusedError, match="version 0 is published with other content") as refusal:
            await rig.client.publish("actor", 0, make_weights(seed=1), {})
        assert refusal.value.code == "version_conflict"
        assert await rig.service.call("GET", "/v1/manifests/actor/0", Manifest) == first


async def test_a_sessions_first_version_replaces_one_that_a_dead_trainer_never_announced(
    tmp_path: Path,
) -> None:
    async with weight_rig(tmp_path) as rig:
        await rig.client.publish("actor", 0, make_weights(), rig.model_files())
        orphan = await rig.client.publish("actor", 1, make_weights(seed=1), {})
        restarted = PublisherClient(rig.service, rig.publisher.store.incoming)
        first = await restarted.publish("actor", 1, make_weights(seed=2), rig.model_files())
        assert first.digest != orphan.digest
        assert await rig.service.call("GET", "/v1/manifests/actor/1", Manifest) == first
        fetched = await rig.receiver.fetch(first)
        for got, expected in zip(fetched.tensors, make_weights(seed=2), strict=True):
            assert bytes(got.data) == bytes(expected.data)
        with pytest.raises(RefusedError, match="version 1 is published with other content"):
            await rig.client.publish("actor", 1, make_weights(seed=3), {})
        second = await restarted.publish("actor", 2, make_weights(seed=3), {})
        late = PublisherClient(rig.service, rig.publisher.store.incoming)
        with pytest.raises(RefusedError, match="version 1 is published with other content"):
            await late.publish("actor", 1, make_weights(seed=4), {})  # its successor has gone on
        assert await rig.service.call("GET", "/v1/manifests/actor/2", Manifest) == second


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/hostname", "actor/../../outside", "actor/link", "actor", "actor/absent", ""]
)
async def test_a_path_outside_incoming_is_refused(tmp_path: Path, path: str) -> None:
    async with weight_rig(tmp_path) as rig:
        hand_over = make_hand_over(rig.publisher.store.incoming, path=path)
        outside = rig.publisher.store.incoming.parent / "outside"
        outside.write_bytes((rig.publisher.store.incoming / "actor" / "0.raw").read_bytes())
        (rig.publisher.store.incoming / "actor" / "link").symlink_to(outside)
        with pytest.raises(WireError, match="is not a file inside"):
            await rig.service.call("POST", "/v1/publish", Manifest, body=hand_over)


async def test_bytes_that_do_not_fit_the_table_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        good = make_hand_over(rig.publisher.store.incoming)
        reshaped = (msgspec.structs.replace(good.tensors[0], shape=(2, 2)), *good.tensors[1:])
        wrong_file = FileInfo(name="config.json", chunk=Chunk(hash="0" * 32, num_bytes=2))
        script = FileInfo(name="modeling.py", chunk=good.files[0].chunk)
        cases = [
            (msgspec.structs.replace(good, tensors=reshaped), "'layer.0'"),
            (msgspec.structs.replace(good, tensors=good.tensors[:-1]), "its table needs"),
            (msgspec.structs.replace(good, digest="0" * 32), "expected 0000"),
            (msgspec.structs.replace(good, files=(wrong_file,)), "file 'config.json' does not hash"),
            (msgspec.structs.replace(good, files=(script,)), "cannot be published"),
            (msgspec.structs.replace(good, policy="../actor"), "policy name"),
        ]
        for hand_over, message in cases:
            with pytest.raises(WireError, match=message):
                await rig.service.call("POST", "/v1/publish", Manifest, body=hand_over)
        health = await rig.service.call("GET", "/v1/health", PublisherHealth)
        assert (health.num_chunks, health.versions) == (0, ())
        await rig.service.call("POST", "/v1/publish", Manifest, body=good)


async def test_a_disk_that_refuses_is_unavailable_and_leaves_nothing(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        hand_over = make_hand_over(rig.publisher.store.incoming)
        chunks = rig.publisher.store.incoming.parent / "chunks"
        chunks.rmdir()
        with pytest.raises(UnavailableError, match="publisher cannot store 'actor' version 0"):
            await rig.service.call("POST", "/v1/publish", Manifest, body=hand_over)
        chunks.mkdir()
        manifest = await rig.service.call("POST", "/v1/publish", Manifest, body=hand_over)
        await rig.receiver.fetch(manifest)


async def test_a_missing_model_file_is_the_callers_mistake(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        with pytest.raises(DataError, match=r"absent\.json cannot be read"):
            await rig.client.publish("actor", 0, make_weights(), {"config.json": tmp_path / "absent.json"})
        with pytest.raises(WeightsError, match="cannot be published"):
            await rig.client.publish("actor", 0, make_weights(), {"a.py": tmp_path / "a.py"})


async def test_what_a_killed_trainer_left_behind_goes_with_the_next_version(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        make_hand_over(rig.publisher.store.incoming)
        await rig.client.publish("actor", 0, make_weights(), {})
        assert list((rig.publisher.store.incoming / "actor").iterdir()) == []


async def test_forgotten_versions_go(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, keep=2) as rig:
        manifests = [await rig.client.publish("actor", v, make_weights(seed=v), {}) for v in range(4)]
        await rig.client.forget("actor", [0])
        health = await rig.service.call("GET", "/v1/health", PublisherHealth)
        assert health.versions == (ServedVersions(policy="actor", versions=(0, 2, 3)),)
        with pytest.raises(RefusedError, match=r"version 1 is not here; versions: \[0, 2, 3\]"):
            await rig.service.call("GET", "/v1/manifests/actor/1", Manifest)
        with pytest.raises(RefusedError, match="may have been forgotten"):
            await rig.service.fetch(f"/v1/chunks/{manifests[1].chunks[0].hash}", start=0, end=1)


async def test_ranges_are_served_as_http_defines_them(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = await rig.client.publish("actor", 0, make_weights(), {})
        chunk = manifest.chunks[0]
        data = pack(make_weights()).tobytes()[: chunk.num_bytes]
        transport = MemoryTransport(rig.publisher)

        async def get(header: str) -> tuple[int, bytes]:
            headers = {"range": header} if header else {}
            reply = await transport.request(
                "GET", f"/v1/chunks/{chunk.hash}", headers=headers, body=b"", timeout_s=5
            )
            return reply.status, reply.body

        assert await get("") == (200, data)
        assert await get("bytes=10-19") == (206, data[10:20])
        assert await get("bytes=4000-99999") == (206, data[4000:])
        assert await get("bytes=4000-") == (206, data[4000:])
        assert await get("bytes=-7") == (206, data[-7:])
        for bad in ("bytes=5000-6000", "bytes=20-10", "bytes=-0", "bytes=-", "bytes=0-1,4-5", "lines=1-2"):
            assert (await get(bad))[0] == 416


@pytest.mark.parametrize("target", ["/v1/chunks/..%2f..%2flock", "/v1/chunks/lock", "/v1/manifests/../0"])
async def test_only_known_chunks_are_served(tmp_path: Path, target: str) -> None:
    async with weight_rig(tmp_path) as rig:
        reply = await MemoryTransport(rig.publisher).request("GET", target, headers={}, body=b"", timeout_s=5)
        assert reply.status == 404


async def test_roles_may_only_what_they_need(tmp_path: Path) -> None:
    tokens = {"t": "trainer", "w": "worker", "v": "viewer"}
    publisher = Publisher(tmp_path / "weights", WeightsConfig(), URL, tokens=tokens)
    clients = {
        name: ServiceClient(URL, token=name, transport=MemoryTransport(publisher))
        for name in ("t", "w", "v", "")
    }
    hand_over = make_hand_over(publisher.store.incoming)
    for name in ("w", "v", ""):
        with pytest.raises(RefusedError) as refusal:
            await clients[name].call("POST", "/v1/publish", Manifest, body=hand_over)
        assert refusal.value.status in {401, 403}
    manifest = await clients["t"].call("POST", "/v1/publish", Manifest, body=hand_over)
    path = f"/v1/chunks/{manifest.chunks[0].hash}"
    assert len(await clients["w"].fetch(path, start=0, end=4)) == 4
    with pytest.raises(RefusedError, match="role 'viewer' is not allowed"):
        await clients["v"].fetch(path, start=0, end=4)
    await clients[""].call("GET", "/v1/health", PublisherHealth)
    publisher.store.close()


def test_a_publisher_whose_store_cannot_be_made_does_not_hold_the_folder(tmp_path: Path) -> None:
    unknown = WeightsConfig.model_construct(store="ftp://elsewhere")
    with pytest.raises(ConfigError, match="is expected"):
        Publisher(tmp_path, unknown)
    Publisher(tmp_path, WeightsConfig()).store.close()


async def test_a_restarted_publisher_serves_what_it_had(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = await rig.client.publish("actor", 0, make_weights(), rig.model_files())
    async with weight_rig(tmp_path) as rig:
        assert await rig.service.call("GET", "/v1/manifests/actor/0", Manifest) == manifest
        snapshot = await rig.receiver.fetch(manifest)
        assert [t.data.tobytes() for t in snapshot.tensors] == [t.data.tobytes() for t in make_weights()]
