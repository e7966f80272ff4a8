"""Generated pages are those of the code as it is."""

import importlib.util
from types import ModuleType

import pytest

from docs_driver import ROOT


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["recipe_reference", "command_reference"])
def test_the_page_is_up_to_date(name: str) -> None:
    made = tool(name)
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run `make docs`"


def test_the_command_reference_holds_every_option() -> None:
    text = tool("command_reference").page()
    for part in ("## run", "--run-dir PATH", "## model init", "--out PATH", "Required", "## join", "--allow"):
        assert part in text
