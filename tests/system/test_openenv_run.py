"""A run of real processes trains on an unmodified server of OpenEnv, in the library's own environment."""

import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from drivers.system_driver import ROOT, Runs

pytestmark = [pytest.mark.system, pytest.mark.interop, pytest.mark.timeout(600)]

VENV = ROOT / ".venv-openenv"


@pytest.fixture
def address() -> Iterator[str]:
    """The websocket of a server of the library."""
    assert VENV.exists(), f"no {VENV}: `make .venv-openenv` installs it"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [VENV / "bin" / "python", ROOT / "tests" / "drivers" / "openenv_sums.py", str(port)]
    )
    try:
        deadline_s = time.monotonic() + 120
        while not listens(port):
            assert server.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        yield f"ws://127.0.0.1:{port}/ws"
    finally:
        server.kill()
        server.wait()


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def test_a_run_trains_on_a_server_and_its_audit_is_exact(runs: Runs, address: str) -> None:
    args = {"url": address, "tasks": 500, "action": "message", "shows": "text"}
    tasks = {
        "environments": {"sums": {"use": "astraflow.addons.envs.openenv:OpenEnv", "args": args}},
        "sources": {"sums": {"name": "environment"}},
    }
    run = runs.start(runs.recipe(steps=5, tasks=tasks, workflow={"name": "environment", "max_turns": 1}))
    assert run.finish() == 0, run.report()
    assert run.summary()["audit_ok"]
