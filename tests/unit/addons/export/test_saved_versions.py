"""Versions read from a publisher's folder while the publisher holds it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from astraflow.addons.export.saved_versions import SavedVersions
from astraflow.errors import DataError, WeightsError
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.types import FileInfo
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manifest import build_manifest, cut, pack
from astraflow.weights.publisher import Publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.stores.chunk_store import ChunkStore
from drivers.weight_fakes import make_weights, trained, weight_rig

CHUNK_BYTES = 4096


def tensors(seed: int) -> tuple[HostTensor, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        HostTensor(name, (64, 40), "float32", rng.integers(0, 255, 64 * 40 * 4, dtype=np.uint8))
        for name in ("a", "b")
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Versions 3 and 4 of `actor`, in a store that is open."""
    store = ChunkStore(tmp_path, keep=4)
    for version in (3, 4):
        files = (FileInfo(name="config.json", chunk=store.put(b'{"n": 1}')),)
        data = pack(tensors(version)).data
        for start, end in cut(data.nbytes, CHUNK_BYTES):
            store.put(data[start:end])
        store.add(build_manifest("actor", version, tensors(version), chunk_bytes=CHUNK_BYTES, files=files))
    yield tmp_path
    store.close()


def test_a_version_is_read_bit_by_bit_with_its_files(folder: Path, tmp_path: Path) -> None:
    stored = SavedVersions(folder, "actor")
    assert stored.versions() == (3, 4)
    version = stored.read(3)
    assert [t.data.tobytes() for t in version.tensors] == [t.data.tobytes() for t in tensors(3)]
    snapshot = version.snapshot(tmp_path / "model")
    assert (snapshot.version, snapshot.model_dir.name) == (3, "model")
    assert (tmp_path / "model" / "config.json").read_bytes() == b'{"n": 1}'


def test_the_newest_version_is_the_default(folder: Path) -> None:
    assert SavedVersions(folder, "actor").read().manifest.version == 4


def test_a_version_that_is_not_kept_names_those_that_are(folder: Path) -> None:
    with pytest.raises(DataError, match=r"version 2 is not kept \(there are: 3, 4\)"):
        SavedVersions(folder, "actor").read(2)
    with pytest.raises(DataError, match="no version is stored"):
        SavedVersions(folder, "verifier").read()


def test_a_damaged_chunk_is_an_error(folder: Path) -> None:
    for path in (folder / "chunks").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(WeightsError, match="is damaged"):
        SavedVersions(folder, "actor").read()


def test_a_chunk_that_went_meanwhile_is_an_error(folder: Path) -> None:
    for path in (folder / "chunks").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="is the version still kept"):
        SavedVersions(folder, "actor").read()


async def test_deltas_are_applied_to_the_full_version_before_them(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, WeightsConfig(keep=8, delta=True))
    service = ServiceClient("http://publisher", transport=MemoryTransport(publisher))
    client = PublisherClient(service, publisher.store.incoming, delta=True)
    weights = make_weights()
    contents: dict[int, list[bytes]] = {}
    for version in range(3):
        manifest = await client.publish("actor", version, weights, {})
        contents[version] = [tensor.data.tobytes() for tensor in weights]
        weights = trained(weights, seed=version)
    assert manifest.kind == "delta"
    stored = SavedVersions(tmp_path, "actor")
    for version, expected in contents.items():
        assert [t.data.tobytes() for t in stored.read(version).tensors] == expected
    await service.close()
    publisher.store.close()


async def test_versions_published_as_deltas_are_read_from_the_publishers_folder(tmp_path: Path) -> None:
    history = [list(tensors(1))]
    async with weight_rig(tmp_path, delta=True, full_every=2) as rig:
        while len(history) < 4:
            history.append(trained(history[-1], seed=len(history)))
        for version, weights in enumerate(history):
            files = {} if version else rig.model_files()
            await rig.client.publish("actor", version, weights, files)
        stored = SavedVersions(tmp_path / "weights", "actor")
        for version, weights in enumerate(history):
            found = stored.read(version).tensors
            assert [t.data.tobytes() for t in found] == [t.data.tobytes() for t in weights]
