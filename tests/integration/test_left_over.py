"""What a test of real processes leaves behind is ended, and said if nothing else has failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivers.system_driver import ROOT, wait_gone

LEAVES_TWO = """
import subprocess, sys
import pytest

pytestmark = pytest.mark.system
STARTS = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600'], stdout=2).pid, flush=True)"

def leave(folder):
    own = subprocess.Popen([sys.executable, "-c", STARTS + "; time.sleep(600)"], stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL, text=True, start_new_session=True)
    folder.joinpath("pids").write_text(f"{own.pid} {own.stdout.readline()}")

def test_that_fails(tmp_path):
    leave(tmp_path)
    assert False

@pytest.mark.timeout(6)
def test_that_hangs(tmp_path):
    leave(tmp_path)
    subprocess.run([sys.executable, "-c", STARTS + "; time.sleep(600)"], stdout=(tmp_path / "more").open("w"))

def test_that_passes(tmp_path):
    leave(tmp_path)
"""
SOON = """
from drivers import left_over

left_over.ENDS_WITHIN_S = 0.5
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [("fails", "assert False"), ("hangs", "Timeout"), ("passes", "the test left processes running")],
)
def test_no_process_outlives_a_test(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(LEAVES_TWO)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = system\n")
    (tmp_path / "conftest.py").write_text(SOON)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "drivers.left_over", "-p", "no:randomly"]
    done = subprocess.run(
        [*argv, "-p", "no:cacheprovider", "--basetemp", "base", "-k", name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert says in done.stdout
    pids = " ".join(
        path.read_text() for path in (tmp_path / "base").rglob("*") if path.name in {"pids", "more"}
    )
    assert len(pids.split()) >= 2, done.stdout
    assert wait_gone([int(pid) for pid in pids.split()], timeout_s=5) == []
