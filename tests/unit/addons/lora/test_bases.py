"""Adapters on their way from trainers to services: their base is published, fetched and held once."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from astraflow import wire
from astraflow.addons.export.saved_versions import SavedVersions
from astraflow.addons.lora.bases import AdapterPublisher, BaseFetcher
from astraflow.errors import WeightsError
from astraflow.models.adapters import BASE_FILE, is_adapter
from astraflow.types import Manifest
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manifest import read_base
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.snapshot import read_model, with_base
from drivers.trainer_builders import save_model
from drivers.weight_fakes import WeightRig, weight_rig

ADAPTED = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[WeightRig]:
    async with weight_rig(tmp_path, delta=True, keep=8) as rig:
        yield rig


def make_factors(seed: int, rank: int = 64) -> list[HostTensor]:
    """An adapter of one projection of the model. Its rank is so large that a delta is worthwhile."""
    random = np.random.default_rng(seed)
    return [
        HostTensor(
            f"base_model.model.{ADAPTED}.lora_{kind}.weight",
            shape,
            "float32",
            random.normal(size=shape).astype("<f4").reshape(-1).view(np.uint8),
        )
        for kind, shape in (("A", (rank, 16)), ("B", (32, rank)))
    ]


def changed(factors: list[HostTensor]) -> list[HostTensor]:
    """The next version: one value of each factor is another."""
    result: list[HostTensor] = []
    for tensor in factors:
        data = tensor.data.copy()
        data[0] += 1
        result.append(replace(tensor, data=data))
    return result


def publisher(rig: WeightRig, model_dir: Path) -> AdapterPublisher:
    """What a session of a trainer publishes with."""
    client = PublisherClient(rig.service, rig.publisher.store.incoming, delta=True)
    return AdapterPublisher(
        client, rig.service, rig.publisher.store.incoming, model_dir=model_dir, chunk_bytes=4096
    )


def files(model_dir: Path) -> dict[str, Path]:
    return {"config.json": model_dir / "config.json"}


def contents(tensors: tuple[HostTensor, ...] | list[HostTensor]) -> list[tuple[str, bytes]]:
    return [(tensor.name, tensor.data.tobytes()) for tensor in tensors]


def bases_of(rig: WeightRig) -> list[str]:
    return [policy for policy in rig.publisher.store.versions() if policy.startswith("base-")]


async def test_a_version_has_its_factors_alone_and_arrives_with_its_base(
    rig: WeightRig, model_dir: Path
) -> None:
    own = publisher(rig, model_dir)
    factors = make_factors(0)
    first = await own.publish("solver", 0, factors, files(model_dir))
    second = await own.publish("solver", 1, changed(factors), {})
    assert {tensor.name for tensor in first.tensors} == {tensor.name for tensor in factors}
    assert (first.kind, second.kind) == ("full", "delta")
    base_bytes = sum(tensor.data.nbytes for tensor in read_model(model_dir))
    assert sum(chunk.num_bytes for chunk in first.chunks) < 0.5 * base_bytes
    fetcher = BaseFetcher(rig.receiver)
    for manifest, expected in ((first, factors), (second, changed(factors))):
        snapshot = await fetcher.fetch(manifest)
        assert contents(snapshot.tensors) == contents([*read_model(model_dir), *expected])
        assert snapshot.base == bases_of(rig)[0]
    assert snapshot.changes is not None
    assert {name for name, at in snapshot.changes.find().items() if at.size} == {t.name for t in factors}


async def test_policies_and_sessions_with_one_base_publish_fetch_and_hold_it_once(
    rig: WeightRig, model_dir: Path
) -> None:
    manifests: list[Manifest] = []
    for version, policy in enumerate(
        ("solver", "verifier", "solver")
    ):  # the last is a session after a restart
        factors = make_factors(version)
        manifests.append(await publisher(rig, model_dir).publish(policy, version, factors, files(model_dir)))
    (base,) = bases_of(rig)
    assert rig.publisher.store.versions()[base] == (0,)
    fetcher = BaseFetcher(rig.receiver)
    snapshots: list[WeightSnapshot] = [await fetcher.fetch(manifest) for manifest in manifests]
    whole = rig.publisher.store.manifest(base, 0)
    assert whole is not None
    hashes = {chunk.hash for chunk in whole.chunks}
    fetched = [chunk for _, chunk, start, _ in rig.reader.reads if chunk in hashes and start == 0]
    assert len(fetched) == len(hashes), "each chunk of the base is read once"
    bases = [[t.data for t in s.tensors if not is_adapter(t.name)] for s in snapshots]
    assert all(np.shares_memory(*pair) for pair in zip(bases[0], bases[1], strict=True))


async def test_a_base_whose_upload_to_the_store_failed_is_uploaded_by_the_next_session(
    model_dir: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.write_text("no folder")
    config = WeightsConfig(store=f"file://{store}", chunk_bytes=4096)
    rig = WeightRig(tmp_path / "rig", config)
    await publisher(rig, model_dir).publish("solver", 0, make_factors(0), files(model_dir))
    store.unlink()
    await publisher(rig, model_dir).publish("solver", 1, make_factors(1), files(model_dir))
    (base,) = bases_of(rig)
    assert (store / "manifests" / base / "0.json").is_file()
    await rig.receiver.close()
    rig.publisher.store.close()


async def test_another_base_is_another_version_and_the_old_one_is_let_go(
    rig: WeightRig, model_dir: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path / "other", initializer_range=0.2)
    first = await publisher(rig, model_dir).publish("solver", 0, make_factors(0), files(model_dir))
    second = await publisher(rig, other).publish("solver", 1, make_factors(0), files(other))
    assert len(bases_of(rig)) == 2
    fetcher = BaseFetcher(rig.receiver)
    one, two = await fetcher.fetch(first), await fetcher.fetch(second)
    assert one.base != two.base
    assert contents(two.tensors) == contents([*read_model(other), *make_factors(0)])
    assert [*fetcher._bases] == [two.base]


async def test_a_kept_version_is_read_with_its_base_and_without_its_own_files(
    rig: WeightRig, model_dir: Path, tmp_path: Path
) -> None:
    own = publisher(rig, model_dir)
    await own.publish("solver", 0, make_factors(0), files(model_dir))
    await own.publish("solver", 1, changed(make_factors(0)), {})
    for version, factors in ((0, make_factors(0)), (1, changed(make_factors(0)))):
        stored = SavedVersions(rig.folder / "weights", "solver").read(version)
        assert contents(stored.tensors) == contents([*read_model(model_dir), *factors])
        assert [*stored.files] == ["config.json"]


async def test_merged_versions_pass_through(rig: WeightRig, model_dir: Path) -> None:
    weights = read_model(model_dir)
    manifest = await publisher(rig, model_dir).publish("solver", 0, weights, files(model_dir))
    assert not bases_of(rig)
    assert [info.name for info in manifest.files] == ["config.json"]
    assert contents((await BaseFetcher(rig.receiver).fetch(manifest)).tensors) == contents(weights)


async def test_an_adapter_that_does_not_name_its_base_is_refused(rig: WeightRig, model_dir: Path) -> None:
    client = PublisherClient(rig.service, rig.publisher.store.incoming)
    manifest = await client.publish("solver", 0, make_factors(0), files(model_dir))
    with pytest.raises(WeightsError, match=r"has no adapter_base\.json, which names their base"):
        await BaseFetcher(rig.receiver).fetch(manifest)


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (lambda base: msgspec.structs.replace(base, policy="actor"), "its base is full version 'actor'"),
        (lambda base: msgspec.structs.replace(base, digest="0" * 32), "expected full version 'base-"),
        (lambda base: msgspec.structs.replace(base, tensors=base.tensors[1:]), "leaves a gap"),
    ],
)
async def test_a_base_under_another_name_is_refused(
    rig: WeightRig, model_dir: Path, forge: Callable[[Manifest], Manifest], said: str
) -> None:
    manifest = await publisher(rig, model_dir).publish("solver", 0, make_factors(0), files(model_dir))
    content = (rig.publisher.store.incoming / BASE_FILE).read_bytes()
    forged = wire.encode(forge(wire.decode(content, Manifest, wire.JSON)), wire.JSON)
    with pytest.raises(WeightsError, match=said):
        read_base(manifest, forged)
    with pytest.raises(WeightsError, match="the manifest of its base is damaged"):
        read_base(manifest, content[:-1])


def test_tensors_are_completed_only_if_all_are_adapters(model_dir: Path) -> None:
    factors = make_factors(0)
    assert contents(with_base(factors, model_dir)) == contents([*read_model(model_dir), *factors])
    weights = read_model(model_dir)
    assert with_base(weights, model_dir) == weights
    assert with_base((), model_dir) == ()
