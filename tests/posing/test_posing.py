"""The code of GPU runs on posing GPUs, in processes that have them (see `gpus.py`)."""

import subprocess
import sys
from pathlib import Path

import pytest

from drivers.system_driver import ROOT, made_once
from posing.build import build_library, find_compiler
from posing.gpus import environment

pytestmark = pytest.mark.timeout(600)
ON_GPUS = "tests/posing/on_gpus"
GROUPS = {
    "runs": [f"{ON_GPUS}/test_run.py", f"{ON_GPUS}/test_one_gpu.py"],
    "measures": [f"{ON_GPUS}/test_checks.py", f"{ON_GPUS}/test_phases.py"],
}
"""Files that one process tests. The rest is the third group."""
GROUPS["parts"] = [
    "tests/gpu/test_one_device.py",
    *sorted(
        {f"{ON_GPUS}/{path.name}" for path in (Path(__file__).parent / "on_gpus").glob("test_*.py")}
        - {file for files in GROUPS.values() for file in files}
    ),
]
VARIABLES = {"runs": {"CUDA_VISIBLE_DEVICES": "6,4,2,0", "NCCL_SHM_DISABLE": "1"}}
"""As a scheduler sets them, in a container with little shared memory. All programs of a group have the same,
so that they can be forked."""


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not find_compiler():
        pytest.skip("no C++ compiler, so there are no posing GPUs")
    assert pytestconfig.cache is not None, "pytest's cache is off"
    found: list[Path] = []
    folder = pytestconfig.cache.mkdir("posing")
    made_once(tmp_path_factory, "posing", lambda _: found.append(build_library(folder)))
    return found[0] if found else build_library(folder)


@pytest.mark.parametrize("group", GROUPS)
def test_what_runs_on_gpus_runs_on_posing_gpus(library: Path, group: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs"]
    command = [sys.executable, "-m", "pytest", *options, *GROUPS[group]]
    variables = environment(library, **VARIABLES.get(group, {}))
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-2000:]
