"""One CPU thread for every process that a test starts, since more of them on few cores only slow each other;
and the quickstart's own model, which takes half a minute to warm-start: built once, kept in pytest's cache.
"""

import os
from pathlib import Path

import pytest

from system_driver import astraflow

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def quickstart_model(pytestconfig: pytest.Config) -> Path:
    """The model that `make quickstart` starts from; built again when its spec or its code changed."""
    assert pytestconfig.cache is not None, "pytest's cache is off"
    out = pytestconfig.cache.mkdir("models") / "quickstart"
    done = astraflow("model", "init", "recipes/models/quickstart.yaml", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return out
