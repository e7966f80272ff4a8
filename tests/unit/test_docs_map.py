"""The pages that lead through the code name files that exist."""

import ast
import re

from drivers.docs_driver import DOCS
from drivers.system_driver import ROOT

ARCHITECTURE = (DOCS / "architecture.md").read_text(encoding="utf-8")
MAX_FILES = 20
"""What a reader can be asked to open to follow one item."""


def modules() -> set[str]:
    """All modules with content, as paths from the repository."""
    found = [*(ROOT / "src").rglob("*.py"), *(ROOT / "packages").rglob("*.py")]
    return {file.relative_to(ROOT).as_posix() for file in found if file.read_text(encoding="utf-8").strip()}


def path_of_one_item() -> list[tuple[int, str]]:
    """(number, file) of each step, in the order of the page."""
    drawn = ARCHITECTURE.split("## The path of one item, file by file")[1].split("```")[1]
    return [(int(number), file) for number, file in re.findall(r"^ ?(\d+)  (\S+\.py)", drawn, re.M)]


def test_every_package_says_what_it_is_for() -> None:
    for init in (*(ROOT / "src").rglob("__init__.py"), *(ROOT / "packages").rglob("src/*/__init__.py")):
        assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), f"{init} has no docstring"


def test_the_path_of_one_item_leads_through_few_files_that_exist() -> None:
    steps = path_of_one_item()
    assert len(dict(steps)) == MAX_FILES
    assert {f"src/astraflow/{file}" for _, file in steps} <= modules()


def test_each_step_of_the_path_names_functions_of_its_file() -> None:
    drawn = ARCHITECTURE.split("## The path of one item, file by file")[1].split("```")[1]
    for file, names in re.findall(r"^ ?\d+  (\S+\.py) +((?:\w+, )*\w+):", drawn, re.M):
        source = (ROOT / "src" / "astraflow" / file).read_text(encoding="utf-8")
        for name in names.split(", "):
            assert re.search(rf"(def|class) {name}\b", source), f"{file} has no {name}"


def test_every_test_that_the_page_on_testing_names_exists() -> None:
    page = (DOCS / "testing.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 30
    for path, name in named:
        file = ROOT / path
        assert file.is_file(), f"docs/testing.md names {path}, which does not exist"
        assert f"def {name}" in file.read_text(encoding="utf-8"), f"{path} has no {name}"
