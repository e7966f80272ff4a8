"""A tiny model made once a session."""

from pathlib import Path

import pytest

from drivers.system_driver import init_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `actor`, which knows nothing."""
    folder = tmp_path_factory.mktemp("models")
    init_models(folder, "actor", steps=0)
    return folder
