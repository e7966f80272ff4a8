"""A store that is kept equal to a publisher's folder."""

import os
from pathlib import Path

import pytest

from astraflow import wire
from astraflow.errors import ConfigError, UnavailableError, WeightsError
from astraflow.types import Manifest
from astraflow.weights.manifest import build_manifest, pack
from astraflow.weights.stores.chunk_store import ChunkStore
from astraflow.weights.stores.object_stores import FolderStore, Mirror, ObjectReader, make_store
from drivers.weight_fakes import make_weights


class Counted(FolderStore):
    """A folder that counts what is put into it, and that may be full."""

    is_full = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.names: list[str] = []

    async def put(self, name: str, content: Path | bytes) -> None:
        if self.is_full:
            raise OSError("no space left")
        self.names.append(name)
        await super().put(name, content)


def published(chunks: ChunkStore, version: int) -> Manifest:
    weights = make_weights(2, seed=version)
    manifest = build_manifest("actor", version, weights, chunk_bytes=4096)
    data = pack(weights).data
    for at in range(0, len(data), 4096):
        chunks.put(data[at : at + 4096])
    chunks.add(manifest)
    return manifest


async def test_a_version_is_uploaded_whole_once_and_removed_again(tmp_path: Path) -> None:
    chunks = ChunkStore(tmp_path / "own", keep=4)
    store = Counted(tmp_path / "store")
    mirror = Mirror(f"file://{tmp_path}/store/", store)
    assert (mirror.link.kind, mirror.link.url) == ("file", f"file://{tmp_path}/store/chunks")
    manifest = published(chunks, 0)
    hashes = {chunk.hash for chunk in manifest.chunks}
    await mirror.upload(manifest, chunks)
    await mirror.upload(manifest, chunks)
    assert sorted(store.names[: len(hashes)]) == sorted(f"chunks/{name}" for name in hashes)
    assert store.names[len(hashes) :] == ["manifests/actor/0.json"] * 2  # chunks that are there stay
    stored = tmp_path / "store"
    assert wire.decode((stored / "manifests/actor/0.json").read_bytes(), Manifest, wire.JSON) == manifest
    for name in hashes:
        assert (stored / "chunks" / name).read_bytes() == chunks.path(name).read_bytes()
    await mirror.forget("actor", [0], hashes)
    assert os.listdir(stored / "manifests/actor") == os.listdir(stored / "chunks") == []
    await mirror.upload(manifest, chunks)
    assert set(os.listdir(stored / "chunks")) == hashes
    chunks.close()


async def test_a_store_that_fails_gets_no_manifest_and_the_rest_later(tmp_path: Path) -> None:
    chunks = ChunkStore(tmp_path / "own", keep=4)
    store = Counted(tmp_path / "store")
    mirror = Mirror("s3://bucket/run", store)
    manifest = published(chunks, 3)
    store.is_full = True
    with pytest.raises(
        UnavailableError, match=r"'actor' version 3 cannot be put into s3://bucket/run/chunks"
    ):
        await mirror.upload(manifest, chunks)
    assert not (tmp_path / "store").exists()
    store.is_full = False
    await mirror.upload(manifest, chunks)
    assert len(store.names) == len(manifest.chunks) + 1
    chunks.close()


async def test_only_folders_and_buckets_are_stores(tmp_path: Path) -> None:
    assert isinstance(make_store(f"file://{tmp_path}/a%20b"), FolderStore)
    with pytest.raises(ConfigError, match="https://example"):
        make_store("https://example.com/store")
    with pytest.raises(UnavailableError, match="s3://bucket/prefix is expected"):
        await ObjectReader().read("http://10.0.0.1/chunks", "0" * 32, start=0, end=1)
    with pytest.raises((UnavailableError, WeightsError)):
        await ObjectReader().manifest("file:///etc", "actor", 0)
