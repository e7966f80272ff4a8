"""The code of GPU runs on posing GPUs, each file of tests in a process of its own (see `gpus.py`)."""

import subprocess
import sys
from pathlib import Path

import pytest

from drivers.system_driver import ROOT, made_once
from posing.build import build_library, find_compiler
from posing.gpus import environment

pytestmark = pytest.mark.timeout(600)
FILES = [
    "tests/gpu/test_one_device.py",
    *sorted(
        f"tests/posing/on_gpus/{path.name}" for path in (Path(__file__).parent / "on_gpus").glob("test_*.py")
    ),
]


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not find_compiler():
        pytest.skip("no C++ compiler, so there are no posing GPUs")
    assert pytestconfig.cache is not None, "pytest's cache is off"
    found: list[Path] = []
    folder = pytestconfig.cache.mkdir("posing")
    made_once(tmp_path_factory, "posing", lambda _: found.append(build_library(folder)))
    return found[0] if found else build_library(folder)


@pytest.mark.parametrize("file", FILES)
def test_on_posing_gpus(library: Path, file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", file]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(library), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-2000:]
