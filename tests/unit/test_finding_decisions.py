"""A newcomer finds the file that decides something in two steps: the package, then the file."""

import ast
import re
from pathlib import Path

import pytest

import astraflow

PACKAGE = Path(astraflow.__file__).parent
QUESTION = re.compile(r"^ {4}(\S.*\?) +(\w+\.py) +(.+)$", re.M)
"""A line of a package's docstring: question, file, and the functions or classes that answer it."""


def answers(package: Path) -> dict[str, tuple[str, list[str]]]:
    """Question -> file and names, from a package's docstring."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    indented = "\n".join(f"    {line.strip()}" for line in docstring.splitlines())
    return {q: (file, names.split(", ")) for q, file, names in QUESTION.findall(indented)}


def packages() -> list[Path]:
    return [init.parent for init in PACKAGE.rglob("__init__.py") if answers(init.parent)]


@pytest.mark.parametrize(
    ("package", "question", "file"),
    [
        ("dataflow/core", "May this service lease an episode?", "leases.py"),
        ("dataflow/core", "What is this episode's advantage?", "valuation.py"),
        ("rollout", "When is a version served?", "policy_host.py"),
    ],
)
def test_a_packages_docstring_names_the_file_that_decides(package: str, question: str, file: str) -> None:
    # First step: the drawing of the packages names this one.
    assert package.partition("/")[0] in str(astraflow.__doc__)
    # Second step: its docstring names the file.
    assert answers(PACKAGE / package)[question][0] == file


def test_every_named_file_defines_what_answers_the_question() -> None:
    assert len(packages()) > 4
    for package in packages():
        for question, (file, names) in answers(package).items():
            source = (package / file).read_text(encoding="utf-8")
            missing = [name for name in names if not re.search(rf"(def|class) {name}\b", source)]
            assert not missing, f"{package.name}/{file} does not define {missing} ({question})"
