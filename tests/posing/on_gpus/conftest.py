"""These tests need posing GPUs. `test_posing.py` runs them, in processes that have them."""

import os
from pathlib import Path

import pytest

from drivers.system_driver import init_models

collect_ignore_glob = [] if "ASTRAFLOW_POSING_LIBRARY" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `actor`, hardly trained."""
    folder = tmp_path_factory.mktemp("models")
    init_models(folder, "actor", steps=1)
    return folder
