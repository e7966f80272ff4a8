"""Tiny models made once a session, and a port that is taken."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivers.system_driver import init_models, made_once


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models `actor` and `verifier`, barely trained."""

    return made_once(
        tmp_path_factory, "models", lambda folder: init_models(folder, "actor", "verifier", steps=20)
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])
