"""Runs for a browser to look at, and the browser."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivers.page_driver import AXE, Browser
from drivers.system_driver import init_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `actor`, barely trained."""
    folder = tmp_path_factory.mktemp("models")
    init_models(folder, "actor", steps=20)
    return folder


@pytest.fixture
def browser() -> Iterator[Browser]:
    """Chromium without a window. Its profile is a new one."""
    missing = [program for program in ("chromium", "chromedriver") if not shutil.which(program)]
    if missing:
        pytest.skip(f"{missing[0]} is missing; on Debian: apt-get install chromium chromium-driver")
    if not AXE.is_file():
        pytest.skip("axe-core is missing: `make web/node_modules`, which needs npm")
    made = Browser()
    yield made
    made.close()
