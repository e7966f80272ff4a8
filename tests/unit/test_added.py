"""Parts of add-ons that the core uses: each exists, and is named if an installation leaves it out."""

import subprocess
import sys
from importlib.abc import MetaPathFinder
from typing import Any

import pytest

from astraflow import added
from astraflow.errors import ConfigError

PARTS = sorted(added._PLACES)  # pyright: ignore[reportPrivateUsage] - the list of all parts


class NoAddOns(MetaPathFinder):
    """Finds no add-on, as in an installation that leaves all of them out."""

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname.startswith("astraflow.addons"):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@pytest.fixture
def no_add_ons(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("astraflow.addons")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoAddOns(), *sys.meta_path])


@pytest.mark.parametrize("part", PARTS)
def test_every_part_exists(part: str) -> None:
    assert getattr(added, part) is not None


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.usefixtures("no_add_ons")
def test_a_part_that_is_left_out_is_named_with_its_add_on(part: str) -> None:
    with pytest.raises(ConfigError, match=r" needs astraflow\.addons\.[a-z0-9_]+, which this installation"):
        getattr(added, part)


def test_a_part_is_imported_only_when_it_is_used() -> None:
    code = "import sys, astraflow.added; print([m for m in sys.modules if m.startswith('astraflow.addons')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
