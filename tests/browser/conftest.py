"""Runs for a browser to look at, the browser, and viewers."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drivers.page_driver import AXE, Browser, answers
from drivers.system_driver import Terminals, free_ports, init_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `actor`, barely trained."""
    folder = tmp_path_factory.mktemp("models")
    init_models(folder, "actor", steps=20)
    return folder


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Chromium without a window, which takes seconds to start. Its profile is a new one."""
    missing = [program for program in ("chromium", "chromedriver") if not shutil.which(program)]
    if missing:
        pytest.skip(f"{missing[0]} is missing; on Debian: apt-get install chromium chromium-driver")
    if not AXE.is_file():
        pytest.skip("axe-core is missing: `make web/node_modules`, which needs npm")
    made = Browser()
    yield made
    made.close()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """Chromium with a new tab, of a desk's size, in the light."""
    chromium.renew()
    return chromium


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    made = Terminals(tmp_path)
    yield made
    made.close()


@pytest.fixture
def view(browser: Browser, terminals: Terminals) -> Callable[[Path], str]:
    """Starts `astraflow view` on a folder. Returns: the address that it prints, once it answers."""

    def start(folder: Path) -> str:
        url = f"http://127.0.0.1:{free_ports(1)[0]}"
        terminals.start("view", str(folder), "--port", url.rpartition(":")[2])
        browser.until(lambda: url in terminals.texts() and answers(url), "the viewer")
        return url

    return start
