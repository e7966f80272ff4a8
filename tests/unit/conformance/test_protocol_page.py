"""The table of error codes on the protocol page is that of the code; version 1 stays as it is."""

import ast
import json
import re
from pathlib import Path

import pytest

from astraflow.dataflow.service.openapi import openapi_json
from astraflow_conformance.report import Checks

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "protocol" / "index.md").read_text(encoding="utf-8")
FROZEN = json.loads((ROOT / "tests" / "golden" / "openapi-v1.json").read_text(encoding="utf-8"))
DOCUMENT = json.loads(openapi_json())
FOR_CALLERS_ONLY = {"redirect", "unknown"}
"""Codes that a client gives itself to answers that it does not follow, or cannot read."""


def codes_of(path: Path) -> set[str]:
    """Error codes that a module gives: `refuse("code", ...)`, `code="code"`, and statuses with their code."""
    codes: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "refuse":
            codes |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
        if isinstance(node, ast.keyword) and node.arg == "code":
            codes |= {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            status, code = node.elts
            if (
                isinstance(status, ast.Constant)
                and isinstance(code, ast.Constant)
                and isinstance(status.value, int)
                and 400 <= status.value < 600
            ):
                codes |= {code.value} if isinstance(code.value, str) else set()
    return {code for code in codes if isinstance(code, str)}


def test_every_error_code_of_the_dataflow_is_in_the_table_and_no_other() -> None:
    package = ROOT / "src" / "astraflow"
    files = [*(package / "dataflow").rglob("*.py"), package / "errors.py"]
    files += [*(package / "service").glob("*.py"), package / "weights" / "addresses.py"]
    given = set().union(*map(codes_of, files)) - FOR_CALLERS_ONLY
    table = PAGE.split("| status | code |")[1].split("- **Retries.**")[0]
    told: set[str] = set()
    for row in table.splitlines():
        told |= set(re.findall(r"`([a-z_]+)`", row.split("|")[2] if row.count("|") > 2 else ""))
    assert given - told == set(), "not in the table"
    assert told - given - {"refused"} == set(), "in the table, given nowhere"


@pytest.mark.parametrize("name", FROZEN["components"]["schemas"])
def test_an_item_of_version_1_keeps_its_fields_and_may_only_get_optional_ones(name: str) -> None:
    now, frozen = DOCUMENT["components"]["schemas"][name], FROZEN["components"]["schemas"][name]
    assert now.get("required", []) == frozen.get("required", [])
    for field, schema in frozen.get("properties", {}).items():
        assert now["properties"][field] == schema, field


def test_a_route_of_version_1_keeps_its_path_method_roles_and_bodies() -> None:
    now = DOCUMENT["paths"]
    for path, methods in FROZEN["paths"].items():
        for method, operation in methods.items():
            for key in ("operationId", "x-roles", "responses", "requestBody"):
                assert now[path][method].get(key) == operation.get(key), f"{method} {path}: {key}"


def test_a_rule_that_was_broken_once_stays_broken_and_one_never_seen_is_not_kept() -> None:
    checks = Checks(("D1", "D2", "D3"))
    assert not checks.that("D1", False, "first")
    checks.kept("D1")
    checks.broke("D1", "second")
    checks.kept("D2")
    checks.skip("D3", "no tokens")
    report = checks.report("dataflow", "x")
    assert [(v.rule, v.outcome, v.detail) for v in report.verdicts] == [
        ("D1", "broken", "first"),
        ("D2", "kept", ""),
        ("D3", "not checked", "no tokens"),
    ]
    assert (report.broken, report.unchecked, report.exit_code) == (("D1",), ("D3",), 1)
    assert json.loads(report.json())["verdicts"][0]["section"] == "Rules of the dataflow"


def test_nothing_checked_is_a_failure() -> None:
    assert Checks(("D1",)).report("dataflow", "x").exit_code == 1
