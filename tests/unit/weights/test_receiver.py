import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from astraflow.errors import UnavailableError, WeightsError
from astraflow.types import Manifest, SourceLink
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.weights.readers import FileReader
from astraflow.weights.receiver import Receiver
from drivers.weight_fakes import URL, WeightRig, make_host_tensor, make_weights, weight_rig

OTHER = "http://other"


async def publish(rig: WeightRig, version: int = 0) -> Manifest:
    """A version of three chunks, with files."""
    manifest = await rig.client.publish("actor", version, make_weights(seed=version), rig.model_files())
    assert len(manifest.chunks) == 3
    return manifest


def with_sources(manifest: Manifest, *urls: str) -> Manifest:
    return msgspec.structs.replace(manifest, sources=tuple(SourceLink(kind="http", url=u) for u in urls))


def assert_holds(snapshot: WeightSnapshot, version: int = 0) -> None:
    given = make_weights(seed=version)
    assert snapshot.version == version
    assert [(t.name, t.shape, t.dtype) for t in snapshot.tensors] == [
        (t.name, t.shape, t.dtype) for t in given
    ]
    assert [t.data.tobytes() for t in snapshot.tensors] == [t.data.tobytes() for t in given]


def flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


async def test_a_version_arrives_bit_equal_with_its_files(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        snapshot = await rig.receiver.fetch(await publish(rig))
        assert_holds(snapshot)
        assert {p.name: p.read_text() for p in snapshot.model_dir.iterdir()} == {
            "config.json": '{\n  "model_type": "qwen3",\n  "dtype": "float32"\n}',  # of tensors of several
            "merges.txt": "",
        }
        assert [p.name for p in (tmp_path / "cache").iterdir()] == [snapshot.model_dir.name]


async def test_the_model_folder_is_fetched_once(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        first = await rig.receiver.fetch(await publish(rig, 0))
        later = await publish(rig, 1)
        rig.reader.reads.clear()
        second = await rig.receiver.fetch(later)
        assert second.model_dir == first.model_dir
        assert {chunk for _, chunk, _, _ in rig.reader.reads} == {c.hash for c in later.chunks}
        shutil.rmtree(first.model_dir)
        assert (await rig.receiver.fetch(later)).model_dir.joinpath("config.json").is_file()


async def test_a_damaged_chunk_is_refused_by_name(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = await publish(rig)
        rig.reader.script = lambda url, count, data: flip(data)
        with pytest.raises(
            WeightsError, match=r"'actor' version 0: chunk . .layer.*http://publisher: the bytes"
        ):
            await rig.receiver.fetch(manifest)
        assert not (tmp_path / "cache").exists()
        rig.reader.script = lambda url, count, data: data
        assert_holds(await rig.receiver.fetch(manifest))


async def test_a_damaged_file_on_the_publishers_disk_is_noticed(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = await publish(rig)
        path = tmp_path / "weights" / "chunks" / manifest.chunks[1].hash
        path.write_bytes(flip(path.read_bytes()))
        with pytest.raises(WeightsError, match="chunk 1 "):
            await rig.receiver.fetch(manifest)
        path.write_bytes(flip(path.read_bytes())[:-5])
        with pytest.raises((WeightsError, UnavailableError), match="chunk 1 "):
            await rig.receiver.fetch(manifest)


async def test_a_wrong_answer_length_is_noticed(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = await publish(rig)
        rig.reader.script = lambda url, count, data: data[:-1]
        with pytest.raises(WeightsError, match="1499 bytes for range 0-1499"):
            await rig.receiver.fetch(manifest)


async def test_a_missing_chunk_names_where_it_was_sought(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = await publish(rig)
        missing = msgspec.structs.replace(manifest.chunks[0], hash="0" * 32)
        wrong = msgspec.structs.replace(manifest, chunks=(missing, *manifest.chunks[1:]))
        with pytest.raises(WeightsError, match=r"hash 0{32}: http://publisher: chunk .* is not here"):
            await rig.receiver.fetch(wrong)


async def test_the_digest_binds_the_order_of_tensors(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = msgspec.structs.replace(await publish(rig), digest="0" * 32)
        with pytest.raises(WeightsError, match=r"the tensors hash to .* expected 0000"):
            await rig.receiver.fetch(manifest)


async def test_a_shape_that_does_not_fit_is_refused_before_any_read(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = await publish(rig)
        reshaped = msgspec.structs.replace(manifest.tensors[2], shape=(7, 7))
        tensors = (*manifest.tensors[:2], reshaped, *manifest.tensors[3:])
        with pytest.raises(WeightsError, match=r"'actor' version 0: tensor 'layer\.2'"):
            await rig.receiver.fetch(msgspec.structs.replace(manifest, tensors=tensors))
        assert rig.reader.reads == []


async def test_a_delta_of_an_unknown_encoding_is_refused(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        delta = msgspec.structs.replace(await publish(rig), kind="delta", base=0, encoding="gap8")
        with pytest.raises(WeightsError, match="unknown encoding 'gap8'"):
            await rig.receiver.fetch(delta)


async def test_a_version_for_which_there_is_no_memory_is_refused_and_the_one_here_stays(
    tmp_path: Path,
) -> None:
    def without_memory(url: str, count: int, data: bytes) -> bytes:
        raise MemoryError

    async with weight_rig(tmp_path) as rig:
        first = await rig.client.publish("actor", 0, make_weights(), rig.model_files())
        held = await rig.receiver.fetch(first)
        before = [tensor.data.tobytes() for tensor in held.tensors]
        sound, rig.reader.script = rig.reader.script, without_memory
        second = await rig.client.publish("actor", 1, make_weights(seed=1), {})
        with pytest.raises(WeightsError, match="'actor' version 1: this machine has no memory"):
            await rig.receiver.fetch(second)
        assert [tensor.data.tobytes() for tensor in held.tensors] == before
        rig.reader.script = sound
        assert (await rig.receiver.fetch(second)).version == 1


async def test_a_second_source_takes_over_and_what_arrived_is_kept(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = with_sources(await publish(rig), URL, OTHER)

        def fail_from_third(url: str, count: int, data: bytes) -> bytes:
            if url == URL and count > 2:
                raise UnavailableError("gone")
            return data

        rig.reader.script = fail_from_third
        assert_holds(await rig.receiver.fetch(manifest))
        got = sum(end - start for url, _, start, end in rig.reader.reads if url == OTHER)
        assert 0 < got < manifest.num_bytes


async def test_a_source_that_lies_is_passed_over(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = with_sources(await publish(rig), URL, OTHER)
        rig.reader.script = lambda url, count, data: flip(data) if url == URL else data
        assert_holds(await rig.receiver.fetch(manifest))


async def test_good_bytes_are_not_blamed_for_the_damaged_ones_kept_from_elsewhere(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = with_sources(await publish(rig), URL, OTHER)

        def lie_then_fail(url: str, count: int, data: bytes) -> bytes:
            if url == URL and count > 2:
                raise UnavailableError("gone")
            return flip(data) if url == URL else data

        rig.reader.script = lie_then_fail
        assert_holds(await rig.receiver.fetch(manifest))


async def test_a_transfer_that_was_cut_resumes_in_the_next_call(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = await publish(rig)
        arrived: list[int] = []

        def fail_from_fourth(url: str, count: int, data: bytes) -> bytes:
            if count > 3:
                raise UnavailableError("gone")
            arrived.append(count)
            return data

        rig.reader.script = fail_from_fourth
        with pytest.raises(UnavailableError, match=r"'actor' version 0: chunk .* gone"):
            await rig.receiver.fetch(manifest)
        before = {rig.reader.reads[count - 1][1:] for count in arrived}
        assert before
        rig.reader.reads.clear()
        rig.reader.script = lambda url, count, data: data
        assert_holds(await rig.receiver.fetch(with_sources(manifest, OTHER)))
        assert before.isdisjoint({read[1:] for read in rig.reader.reads})


async def test_a_newer_version_displaces_a_transfer_that_was_cut(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifests = [await publish(rig, v) for v in range(2)]

        def fail(url: str, count: int, data: bytes) -> bytes:
            raise UnavailableError("gone")

        rig.reader.script = fail
        with pytest.raises(UnavailableError):
            await rig.receiver.fetch(manifests[0])
        rig.reader.script = lambda url, count, data: data
        assert_holds(await rig.receiver.fetch(manifests[1]), 1)
        assert_holds(await rig.receiver.fetch(manifests[0]), 0)


async def test_the_deadline_keeps_what_arrived(tmp_path: Path) -> None:
    async with weight_rig(tmp_path, deadline_s=0.5) as rig:
        manifest = await publish(rig)
        never = asyncio.Event()

        class Stuck:
            num_reads = 0

            async def read(self, url: str, chunk_hash: str, *, start: int, end: int) -> bytes:
                self.num_reads += 1
                if self.num_reads > 2:
                    await never.wait()
                return await rig.http.read(url, chunk_hash, start=start, end=end)

        stuck = Stuck()
        rig.reader.inner = stuck
        with pytest.raises(UnavailableError, match=r"'actor' version 0: [1-9]\d* of \d+ bytes arrived in"):
            await rig.receiver.fetch(manifest)
        rig.reader.inner = rig.http
        assert_holds(await rig.receiver.fetch(manifest))


async def test_the_faster_source_is_tried_first(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = with_sources(await publish(rig), URL, OTHER)

        class Uneven:
            async def read(self, url: str, chunk_hash: str, *, start: int, end: int) -> bytes:
                rig.now_s += 0.02 if url == URL else 0.01
                return await rig.http.read(url, chunk_hash, start=start, end=end)

        rig.reader.inner = Uneven()
        await rig.receiver.fetch(with_sources(manifest, URL))
        await rig.receiver.fetch(manifest)
        assert_holds(await rig.receiver.fetch(manifest))
        rig.reader.reads.clear()
        await rig.receiver.fetch(manifest)
        assert {url for url, _, _, _ in rig.reader.reads} == {OTHER}


async def test_a_source_that_failed_is_tried_last(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = with_sources(await publish(rig), URL, OTHER)
        rig.reader.script = lambda url, count, data: flip(data) if url == URL else data
        await rig.receiver.fetch(manifest)
        rig.reader.reads.clear()
        assert_holds(await rig.receiver.fetch(manifest))
        assert {url for url, _, _, _ in rig.reader.reads} == {OTHER}


@pytest.mark.parametrize("sources", [(), (SourceLink(kind="s3", url="s3://bucket"),)])
async def test_without_a_readable_source_the_version_is_unavailable(
    tmp_path: Path, sources: tuple[SourceLink, ...]
) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = msgspec.structs.replace(await publish(rig), sources=sources)
        with pytest.raises(UnavailableError, match=r"names no source|'s3' cannot be read here"):
            await rig.receiver.fetch(manifest)


async def test_a_folder_of_chunks_is_a_source(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = await publish(rig)
        receiver = Receiver(tmp_path / "elsewhere")
        for url in ((tmp_path / "weights" / "chunks").as_uri(), str(tmp_path / "weights" / "chunks")):
            link = SourceLink(kind="file", url=url)
            assert_holds(await receiver.fetch(msgspec.structs.replace(manifest, sources=(link,))))
        await receiver.close()


async def test_a_folder_source_says_what_it_lacks(tmp_path: Path) -> None:
    reader = FileReader()
    (tmp_path / "short").write_bytes(b"12345")
    with pytest.raises(WeightsError, match="chunk absent is not in"):
        await reader.read(str(tmp_path), "absent", start=0, end=1)
    with pytest.raises(WeightsError, match="ends at 5, expected 9"):
        await reader.read(str(tmp_path), "short", start=0, end=9)
    with pytest.raises(UnavailableError, match="does not exist"):
        await reader.read(str(tmp_path / "none"), "absent", start=0, end=1)


async def test_many_fetches_at_once_all_get_their_version(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifests = [await publish(rig, v) for v in range(3)]
        other = await rig.client.publish("critic", 0, [make_host_tensor("c", (3,))], {})
        snapshots = await asyncio.gather(
            *(rig.receiver.fetch(m) for m in [*manifests, *manifests]), rig.receiver.fetch(other)
        )
        for i, snapshot in enumerate(snapshots[:-1]):
            assert_holds(snapshot, i % 3)
        assert snapshots[-1].policy == "critic"


async def test_snapshots_do_not_share_memory(tmp_path: Path) -> None:
    async with weight_rig(tmp_path) as rig:
        manifest = await publish(rig)
        first, second = await rig.receiver.fetch(manifest), await rig.receiver.fetch(manifest)
        first.tensors[0].data[:] = 0
        assert_holds(second)
