"""What a power cut leaves: only what was synced, under names whose folder was synced afterwards."""

import os
from pathlib import Path

import msgspec
import pytest

from astraflow.types import Manifest
from astraflow.weights.manifest import build_manifest, pack
from astraflow.weights.stores.chunk_store import ChunkStore
from astraflow.weights.stores.object_stores import FolderStore
from drivers.weight_fakes import make_weights


class Disk:
    """Notes, at each fsync, what it made durable: a file's inode, or the names in a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.files: set[int] = set()
        self.names: dict[Path, dict[str, int]] = {}
        self.events: list[str] = []

    def fsync(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").resolve()
        if path.is_dir():
            self.names[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
            self.events.append(f"names of {path.relative_to(self._root)}")
        else:
            self.files.add(os.fstat(fd).st_ino)
            self.events.append(f"file in {path.parent.relative_to(self._root)}")

    def survives(self, path: Path) -> bool:
        """Whether the file is there whole after a power cut."""
        names, inode = self.names.get(path.parent.resolve(), {}), path.stat().st_ino
        return names.get(path.name) == inode and inode in self.files


def stored(store: ChunkStore, *, is_linked: bool = False) -> Manifest:
    weights = make_weights()
    manifest = build_manifest("actor", 0, weights, chunk_bytes=4096)
    data = pack(weights).data
    chunks = ()
    for at in range(0, len(data), 4096):
        source = store.incoming / str(at) if is_linked else None
        if source is not None:
            source.write_bytes(data[at : at + 4096])
        chunks += (store.put(data[at : at + 4096], source),)
    assert chunks == manifest.chunks
    store.add(msgspec.structs.replace(manifest, chunks=chunks))
    return manifest


@pytest.mark.parametrize("is_linked", [False, True])
def test_an_announced_version_survives_a_power_cut(tmp_path: Path, is_linked: bool) -> None:
    disk = Disk(tmp_path)
    store = ChunkStore(tmp_path, keep=4, fsync=disk.fsync)
    manifest = stored(store, is_linked=is_linked)
    assert len(manifest.chunks) > 1
    assert all(disk.survives(store.path(chunk.hash)) for chunk in manifest.chunks)
    assert disk.survives(tmp_path / "manifests" / "actor" / "0.json")
    assert "actor" in disk.names[tmp_path / "manifests"], "the folder of a new policy is a name as well"
    store.close()


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_manifest_is_durable_only_after_its_chunks(tmp_path: Path, is_linked: bool) -> None:
    disk = Disk(tmp_path)
    store = ChunkStore(tmp_path, keep=4, fsync=disk.fsync)
    stored(store, is_linked=is_linked)
    written = disk.events.index("file in manifests/actor")
    assert disk.events.index("names of chunks") < written
    assert "file in chunks" not in disk.events[disk.events.index("names of chunks") :]
    store.close()


@pytest.mark.parametrize("name", ["chunks/abc", "manifests/actor/0.json"])
async def test_what_is_put_into_a_folder_store_survives_a_power_cut(tmp_path: Path, name: str) -> None:
    disk = Disk(tmp_path)
    await FolderStore(tmp_path / "store", fsync=disk.fsync).put(name, b"bytes")
    path = tmp_path / "store" / name
    assert disk.survives(path)
    for folder in path.parents:
        if folder == tmp_path / "store":
            break
        assert folder.name in disk.names[folder.parent]
