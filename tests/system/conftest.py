"""Tiny models made once a session, and runs that leave nothing behind."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from system_driver import Runs, astraflow


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models `actor` and `verifier`, barely trained."""
    folder = tmp_path_factory.mktemp("models")
    for name, spec in (("actor", "quickstart"), ("verifier", "verifier")):
        done = astraflow(
            "model", "init", f"recipes/models/{spec}.yaml", "warm_start.steps=20", "--out", str(folder / name)
        )
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def runs(models: Path, tmp_path: Path) -> Iterator[Runs]:
    made = Runs(models, tmp_path)
    yield made
    made.close()


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])
