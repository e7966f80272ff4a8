import os
from pathlib import Path

import msgspec
import pytest

from astraflow.errors import ConfigError
from astraflow.types import Chunk, FileInfo, Manifest, Shortcut
from astraflow.weights.manifest import build_manifest, hash_bytes, pack
from astraflow.weights.stores.chunk_store import ChunkStore
from drivers.weight_fakes import make_host_tensor


def add_version(
    store: ChunkStore,
    version: int,
    *,
    seed: int | None = None,
    policy: str = "actor",
    shortcut: Shortcut | None = None,
) -> Manifest:
    """A version of one tensor and one file that all versions share."""
    weights = [make_host_tensor(shape=(16,), seed=version if seed is None else seed)]
    chunk = store.put(pack(weights).data)
    file = FileInfo(name="config.json", chunk=store.put(b"{}"))
    manifest = build_manifest(policy, version, weights, chunk_bytes=4096, files=(file,))
    manifest = msgspec.structs.replace(manifest, shortcut=shortcut)
    assert manifest.chunks == (chunk,)
    store.add(manifest)
    return manifest


def chunk_files(folder: Path) -> set[str]:
    return set(os.listdir(folder / "chunks"))


def test_a_reopened_folder_holds_the_same_versions(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, keep=4)
    manifests = [add_version(store, v) for v in range(3)]
    store.close()
    again = ChunkStore(tmp_path, keep=4)
    assert again.versions() == {"actor": (0, 1, 2)}
    assert [again.manifest("actor", v) for v in range(3)] == manifests
    assert again.usage() == (4, 3 * 64 + 2)
    again.close()


def test_a_reopened_folder_keeps_the_chunks_of_a_shortcut_until_its_version_goes(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, keep=1)
    add_version(store, 0)
    delta = store.put(b"the delta")
    shortcut = Shortcut(base=0, encoding="astraflow-delta-1", chunks=(delta,))
    add_version(store, 1, shortcut=shortcut)
    before = chunk_files(tmp_path)
    store.close()
    again = ChunkStore(tmp_path, keep=1)
    assert delta.hash in chunk_files(tmp_path) == before
    assert again.path(delta.hash).read_bytes() == b"the delta"
    assert again.size(delta.hash) == delta.num_bytes
    add_version(again, 2)
    assert again.retain("actor", []) == (0, 1)
    assert again.size(delta.hash) is None
    assert delta.hash not in chunk_files(tmp_path)
    again.close()


def test_retention_keeps_the_newest_the_needed_and_the_shared_file(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, keep=2)
    manifests = [add_version(store, v) for v in range(6)]
    assert store.retain("actor", [1]) == (0, 2, 3)
    kept = {manifests[v].chunks[0].hash for v in (1, 4, 5)} | {manifests[0].files[0].chunk.hash}
    assert chunk_files(tmp_path) == kept
    assert store.retain("other", []) == ()
    store.close()
    again = ChunkStore(tmp_path, keep=2)
    assert again.versions() == {"actor": (1, 4, 5)}
    again.close()


def test_the_base_of_a_kept_delta_stays(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, keep=1)
    add_version(store, 0)
    add_version(store, 1)
    last = msgspec.structs.replace(add_version(store, 2), kind="delta", base=0)
    store.add(last)
    assert store.retain("actor", []) == (1,)
    store.close()


def test_equal_content_is_stored_once_and_survives_one_of_its_owners(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, keep=1)
    first = add_version(store, 0, seed=7)
    path = store.path(first.chunks[0].hash)
    inode = path.stat().st_ino
    second = add_version(store, 1, seed=7)
    assert first.chunks == second.chunks
    assert path.stat().st_ino == inode  # it was not written again
    assert store.usage()[0] == 2
    store.retain("actor", [])
    assert store.size(second.chunks[0].hash) == 64
    store.close()


def test_a_publication_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, keep=1)
    kept = add_version(store, 0)
    chunks = [store.put(b"abandoned"), store.put(b"{}")]
    store.release(chunks)
    assert chunk_files(tmp_path) == {kept.chunks[0].hash, kept.files[0].chunk.hash}
    assert store.size(chunks[0].hash) is None
    store.close()


def test_what_a_crash_left_half_done_goes_at_opening(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, keep=1)
    kept = add_version(store, 0)
    store.put(b"no manifest names this")
    store.close()
    (tmp_path / "chunks" / f"{'0' * 32}.1.tmp").write_bytes(b"half")
    (tmp_path / "manifests" / "actor" / "1.json.1.tmp").write_bytes(b"{")
    again = ChunkStore(tmp_path, keep=1)
    assert chunk_files(tmp_path) == {kept.chunks[0].hash, kept.files[0].chunk.hash}
    assert os.listdir(tmp_path / "manifests" / "actor") == ["0.json"]
    again.close()


@pytest.mark.parametrize("damage", ["shorter", "missing", "manifest"])
def test_a_damaged_version_is_dropped_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = ChunkStore(tmp_path, keep=4)
    broken = add_version(store, 0)
    add_version(store, 1)
    path = store.path(broken.chunks[0].hash)
    store.close()
    if damage == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "missing":
        path.unlink()
    else:
        (tmp_path / "manifests" / "actor" / "0.json").write_text("{}")
    again = ChunkStore(tmp_path, keep=4)
    assert again.versions() == {"actor": (1,)}
    assert "is removed" in caplog.text
    assert len(chunk_files(tmp_path)) == 2
    again.close()


def test_a_damaged_chunk_is_written_again(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, keep=4)
    chunk = store.put(b"sound bytes")
    store.path(chunk.hash).write_bytes(b"rotten byte")
    assert store.put(b"sound bytes") == chunk == Chunk(hash=hash_bytes(b"sound bytes"), num_bytes=11)
    assert store.path(chunk.hash).read_bytes() == b"sound bytes"
    store.close()


def test_a_chunk_that_cannot_be_written_is_not_there(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, keep=4)
    (tmp_path / "chunks").rmdir()
    with pytest.raises(OSError, match="No such file"):
        store.put(b"lost")
    assert store.usage() == (0, 0)
    assert store.size(hash_bytes(b"lost")) is None
    store.close()


def test_a_folder_that_could_not_be_opened_can_be_once_it_is_in_order(tmp_path: Path) -> None:
    ChunkStore(tmp_path, keep=1).close()
    foreign = tmp_path / "manifests" / "notes.txt"
    foreign.write_text("not a folder")
    with pytest.raises(NotADirectoryError):
        ChunkStore(tmp_path, keep=1)
    foreign.unlink()
    ChunkStore(tmp_path, keep=1).close()


def test_one_folder_has_one_owner(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, keep=4)
    with pytest.raises(ConfigError, match="in use by another publisher"):
        ChunkStore(tmp_path, keep=4)
    store.close()
    ChunkStore(tmp_path, keep=4).close()
