"""Settings of all tests, and the quickstart's own model.

Every process that a test starts has one CPU thread: on few cores, more of them only slow each other. The
model takes half a minute to warm-start, so it is built once and kept in pytest's cache.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from system_driver import astraflow

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# An example that the machine starved for a moment is no failure; pytest's timeout ends a test that hangs.
settings.register_profile("astraflow", deadline=None)
settings.load_profile("astraflow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start whole runs, or build the quickstart's model, share one worker: two runs at once would
    only slow each other. What is quick goes to the others meanwhile."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        if item.get_closest_marker("system") or "quickstart_model" in names:
            item.add_marker(pytest.mark.xdist_group("runs"))


@pytest.fixture(scope="session")
def quickstart_model(pytestconfig: pytest.Config) -> Path:
    """The model that `make quickstart` starts from; built again when its spec or its code changed."""
    assert pytestconfig.cache is not None, "pytest's cache is off"
    out = pytestconfig.cache.mkdir("models") / "quickstart"
    done = astraflow("model", "init", "recipes/models/quickstart.yaml", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return out
