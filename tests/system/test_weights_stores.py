"""Versions by way of a store: a folder, and a real server of the S3 protocol (`moto_server`)."""

import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.errors import UnavailableError, WeightsError
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.types import Manifest
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.config import WeightsConfig
from astraflow.weights.publisher import Publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver
from drivers.weight_fakes import make_weights, trained

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
MOTO = shutil.which("moto_server", path=os.pathsep.join([str(ROOT / ".venv-s3/bin"), os.environ["PATH"]]))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if MOTO is None:
        pytest.skip("no moto_server: `make .venv-s3` installs it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [MOTO, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for_port(port, process)
        request = urllib.request.Request(f"{endpoint}/weights", method="PUT")
        urllib.request.urlopen(request, timeout=20).close()
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }.items():
            monkeypatch.setenv(name, value)
        yield "s3://weights/run-1"
    finally:
        process.terminate()
        process.wait(timeout=20)


def wait_for_port(port: int, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    """A server of somebody else's that says nothing when it is up."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        with socket.socket() as caller:
            if caller.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process.poll() is None, "moto_server ended"
        assert time.monotonic() < give_up_at, "moto_server does not listen"
        time.sleep(0.1)


async def stream(url: str, folder: Path, *, deadline_s: float = 60.0) -> None:
    """Full and delta versions through the store alone; a late joiner finds its way; what is old goes."""
    config = WeightsConfig(chunk_bytes=4096, delta=True, keep=1, full_every=3, store=url, is_store_only=True)
    publisher = Publisher(folder / "weights", config, "http://nobody-can-reach-this")
    service = ServiceClient("http://publisher", transport=MemoryTransport(publisher))
    client = PublisherClient(service, publisher.store.incoming, delta=True)
    follower, late = (
        Receiver(folder / "a", deadline_s=deadline_s),
        Receiver(folder / "b", deadline_s=deadline_s),
    )
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    files = {"config.json": folder / "config.json"}
    weights, manifests = make_weights(), list[Manifest]()
    for version in range(6):
        manifests.append(await client.publish("actor", version, weights, files if version == 0 else {}))
        assert [source.url for source in manifests[-1].sources] == [f"{url}/chunks"]
        snapshot = await follower.fetch(manifests[-1])
        assert_equal(snapshot.tensors, weights)
        del snapshot
        await client.forget("actor", [version])
        previous, weights = weights, trained(weights, version)
    assert {"full", "delta"} == {manifest.kind for manifest in manifests}
    joined = await late.fetch(manifests[-1])
    assert_equal(joined.tensors, previous)
    assert (joined.model_dir / "config.json").is_file()
    stranger = Receiver(folder / "c", deadline_s=deadline_s)
    with pytest.raises((WeightsError, UnavailableError), match=r"'actor' version 0|not in"):
        await stranger.fetch(manifests[0])
    for receiver in (follower, late, stranger):
        await receiver.close()
    await service.close()
    publisher.store.close()


def assert_equal(found: tuple[HostTensor, ...], expected: list[HostTensor]) -> None:
    assert [t.data.tobytes() for t in found] == [t.data.tobytes() for t in expected]


async def test_a_folder_carries_a_stream(tmp_path: Path) -> None:
    await stream(f"file://{tmp_path}/shared", tmp_path)
    left = list((tmp_path / "shared" / "manifests" / "actor").iterdir())
    assert len(left) <= 4


async def test_an_s3_server_carries_a_stream(bucket: str, tmp_path: Path) -> None:
    await stream(bucket, tmp_path)


async def test_a_store_that_fails_is_left_out_unless_it_is_the_only_source(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    url = f"file://{tmp_path}/file/below"
    for is_only in (False, True):
        config = WeightsConfig(store=url, is_store_only=is_only)
        publisher = Publisher(tmp_path / f"weights-{is_only}", config, "http://publisher")
        service = ServiceClient("http://publisher", transport=MemoryTransport(publisher), patience_s=0.1)
        client = PublisherClient(service, publisher.store.incoming, delta=True)
        if is_only:
            with pytest.raises(UnavailableError, match="cannot be put into"):
                await client.publish("actor", 0, make_weights(), {})
        else:
            manifest = await client.publish("actor", 0, make_weights(), {})
            assert [source.url for source in manifest.sources] == ["http://publisher"]
        await service.close()
        publisher.store.close()
