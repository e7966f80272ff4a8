"""The table of agent programs names each program, with the version that the requirements pin."""

import ast
from pathlib import Path

import pytest

from drivers.agent_driver import PROGRAMS, Row, pinned, rows


def test_each_program_has_a_row_and_each_row_a_program() -> None:
    assert sorted(row.program for row in rows()) == sorted(path.name for path in PROGRAMS.glob("*.py"))
    assert len(rows()) >= 12


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.program)
def test_a_row_names_the_pinned_version_and_what_ran(row: Row) -> None:
    assert row.version == pinned()[row.library][1]
    assert row.forms, "a row without a form that ran"


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.name)
def test_a_program_knows_nothing_of_astraflow_but_its_models_name(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert not [name for name in imported if name and name.startswith("astraflow")]
    assert text.count("ASTRAFLOW") == text.count("ASTRAFLOW_MODEL") == 1
