"""One CPU thread for every process that a test starts, since more of them on few cores only slow each other;
and the quickstart's own model, which takes half a minute to warm-start: built once, kept in pytest's cache.
"""

import os
from pathlib import Path

import pytest

from system_driver import astraflow

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


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
