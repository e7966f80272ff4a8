"""A test that its timeout can't end, or that crashes, fails with its stack, and the others go on."""

import os
import subprocess
import sys
from pathlib import Path

from drivers.system_driver import ROOT

HANGS = """
import asyncio
import os
import time
import pytest

async def the_inner_one():
    await asyncio.Event().wait()

@pytest.mark.timeout(1)
async def test_that_waits():
    await asyncio.gather(the_inner_one())

@pytest.fixture
def swallower():
    yield
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

@pytest.mark.timeout(1)
def test_whose_teardown_swallows_the_timeout(swallower):
    pass

def test_that_crashes():
    os.abort()

@pytest.mark.parametrize("number", range(3))
def test_of_others(number):
    pass
"""


def test_tests_that_hang_fail_and_say_where(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HANGS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 10\nasyncio_mode = auto\n")
    (tmp_path / "conftest.py").write_text("from drivers import hung_tests\n\nhung_tests.GRACE_S = 1.0\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "drivers.hung_tests", "-p", "no:randomly"]
    done = subprocess.run(
        [*argv, "-p", "no:cacheprovider", "--basetemp", "base"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "crashed while running 'test_it.py::test_whose_teardown_swallows_the_timeout'" in done.stdout
    assert "stacks of gw0, which hung or crashed" in done.stdout
    assert "in swallower" in done.stdout
    assert "Fatal Python error: Aborted" in done.stdout
    assert "3 failed, 4 passed" in done.stdout, done.stdout
    assert "in the_inner_one" in done.stdout.partition("where tasks wait")[2]
