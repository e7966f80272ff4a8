"""How `make` installs torch, by real pip and make, from indexes that offer tiny wheels named torch."""

import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from drivers.docs_driver import tool
from drivers.package_driver import environment_with_pip
from drivers.system_driver import ROOT
from drivers.wheel_driver import make_wheel

VERSION = tool("install_torch").VERSION
CPU = f"{VERSION}+cpu"
NOWHERE = "http://127.0.0.1:9/simple"
"""Port 9 is `discard`: nothing listens there, so this is an index without network."""

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.xdist_group("install_torch"),  # one worker makes the environment
]


class Indexes:
    """A package index and PyTorch's CPU index, as folders that an HTTP server shows."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url

    def offer(self, index: str, *versions: str) -> str:
        """The URL of an index with these versions of torch."""
        torch = self.folder / index / "torch"
        torch.mkdir(parents=True)
        for version in versions:
            make_wheel(torch, "torch", version)
        return f"{self.url}/{index}"


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder, logging nothing."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[Indexes]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Indexes(tmp_path, f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment without torch, whose pip is that of this Python."""
    return environment_with_pip(tmp_path_factory.mktemp("environment") / "venv")


def install(environment: Path, index: str, cpu_index: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """`make .venv/.torch` in an environment from which torch is gone, with these indexes only."""
    for left in environment.glob("lib/python*/site-packages/torch-*"):
        for file in left.iterdir():
            file.unlink()
        left.rmdir()
    (environment / ".torch").unlink(missing_ok=True)
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("INSTALLER", "MAKE", "PIP_", "TORCH"))
    }
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    return subprocess.run(
        ["make", f"VENV={environment}", f"{environment}/.torch"],
        cwd=ROOT,
        env={**inherited, **pip, "INSTALLER": "pip", "TORCH": "cpu", "TORCH_CPU_INDEX": cpu_index, **more},
        capture_output=True,
        text=True,
        check=False,
    )


def installed(environment: Path) -> list[str]:
    found = environment.glob("lib/python*/site-packages/torch-*.dist-info")
    return [path.name.removeprefix("torch-").removesuffix(".dist-info") for path in found]


def test_the_cpu_build_is_taken_from_pytorchs_index(environment: Path, indexes: Indexes) -> None:
    done = install(environment, indexes.offer("pypi", VERSION), indexes.offer("cpu", CPU))
    assert done.returncode == 0, done.stderr
    assert installed(environment) == [CPU]
    assert "GB" not in done.stdout
    assert (environment / ".torch").is_file()


def test_where_only_a_cuda_build_is_offered_its_size_is_said(environment: Path, indexes: Indexes) -> None:
    done = install(environment, indexes.offer("pypi", VERSION), indexes.offer("cpu", "2.1.0+cpu"))
    assert done.returncode == 0, done.stderr
    assert installed(environment) == [VERSION]
    assert f"/cpu/torch/ has no torch=={CPU} for Python" in done.stdout
    assert "about 2.7 GB" in done.stdout


def test_a_cpu_index_that_cannot_be_reached_is_named(environment: Path, indexes: Indexes) -> None:
    done = install(environment, indexes.offer("pypi", VERSION), NOWHERE)
    assert done.returncode == 0, done.stderr
    assert installed(environment) == [VERSION]
    assert f"{NOWHERE}/torch/ cannot be reached" in done.stdout
    assert "about 2.7 GB" in done.stdout


def test_without_network_a_folder_of_wheels_is_enough(environment: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "torch", CPU)
    done = install(environment, NOWHERE, NOWHERE, PIP_FIND_LINKS=str(tmp_path / "wheels"))
    assert done.returncode == 0, done.stderr
    assert installed(environment) == [CPU]
    assert "reached" not in done.stdout


def test_without_network_and_wheels_make_fails_and_says_why(environment: Path) -> None:
    done = install(environment, NOWHERE, NOWHERE)
    assert done.returncode == 2
    assert installed(environment) == []
    assert f"{NOWHERE}/torch/ cannot be reached" in done.stdout
    assert f"not installed; pip found no torch=={VERSION} for Python" in done.stdout
    assert not (environment / ".torch").exists()


def test_a_build_that_is_named_goes_to_pip_as_it_is(environment: Path, indexes: Indexes) -> None:
    other = indexes.offer("other", "2.9.1+rocm6.4", "2.12.0+rocm6.4")
    done = install(environment, NOWHERE, NOWHERE, TORCH=f"torch>=2.8,<2.10 --index-url {other}")
    assert done.returncode == 0, done.stderr
    assert installed(environment) == ["2.9.1+rocm6.4"]


def test_a_failure_that_is_not_a_missing_build_leads_to_no_larger_download(
    environment: Path, indexes: Indexes
) -> None:
    cpu_index = indexes.offer("cpu", CPU)
    next((indexes.folder / "cpu" / "torch").glob("*.whl")).write_bytes(b"cut off")
    done = install(environment, indexes.offer("pypi", VERSION), cpu_index)
    assert done.returncode == 2
    assert installed(environment) == []
    assert "invalid" in done.stderr


def test_a_gpu_is_found_by_its_devices_or_by_nvidias_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_found = tool("install_torch").gpu_found
    devices = f"{tmp_path}/nvidia[0-9]*"
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_found(devices) == ""
    program.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    program.chmod(0o755)
    assert gpu_found(devices) == ""
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    assert gpu_found(devices) == "nvidia-smi lists GPU 0: NVIDIA H200"
    (tmp_path / "nvidia0").touch()
    assert gpu_found(devices) == f"{tmp_path}/nvidia0 exists"


def test_the_texts_for_users_say_what_make_does() -> None:
    made = tool("install_torch")
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert made.CPU_INDEX in page
    assert made.SIZE.removeprefix("about ") in page
    assert made.SIZE.removeprefix("about ") in readme
