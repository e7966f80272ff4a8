"""The examples in README and docs: quick commands run, python runs, recipes are valid, links lead somewhere.

Commands that need a run are run by tests/system/test_docs_commands.py.
"""

import ast
import re
import shlex
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from astraflow.algorithms.credit import CreditConfig
from astraflow.algorithms.curation import CuratorConfig
from astraflow.algorithms.filters import FilterConfig
from astraflow.algorithms.limiters import LimiterConfig
from astraflow.algorithms.removers import RemoverConfig
from astraflow.algorithms.samplers import SamplerConfig
from astraflow.algorithms.shaping import ShapingConfig
from astraflow.cli.main import main
from astraflow.config import Use, load_attr
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.run_plan import uses
from drivers.docs_driver import IN_THE_RUN, NOT_RUN, Block, blocks, pages
from drivers.system_driver import ROOT

RECIPES = sorted([*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])
LANGUAGES = ("bash", "python", "yaml")


def named(block: Block) -> str:
    return block.name


@pytest.mark.parametrize("block", [b for b in blocks("bash") if b.is_run and b.is_quick], ids=named)
def test_quick_commands_run(
    block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    for command in block.commands:
        with pytest.raises(SystemExit) as caught:
            main(shlex.split(command)[1:])
        assert caught.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("block", [b for b in blocks("python") if not b.marker], ids=named)
def test_python_runs(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(block.text, block.name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", [b for b in blocks("yaml") if b.is_run], ids=named)
def test_recipes_on_pages_are_valid(block: Block, tmp_path: Path) -> None:
    """A part of a recipe is laid over the quickstart, and replaces sections of other variants."""
    mapping = yaml.safe_load(block.text)
    path = tmp_path / "recipe.yaml"
    if "name" not in mapping:
        quickstart = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(without_other_variants(quickstart, mapping)))
        mapping = {"extends": "base.yaml", **mapping}
    path.write_text(yaml.safe_dump(mapping))
    load_recipe(path)


def without_other_variants(base: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """The base, without the sections for which the part chooses another variant."""
    made = dict(base)
    for key, value in part.items():
        below = base.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            made[key] = without_other_variants(below, value)
            if value.get("name", value.get("use")) not in (None, below.get("name")):
                del made[key]
    return made


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_in_the_repository_load_with_their_components(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    if path.stem == "sum_agent":
        pytest.importorskip("openai", reason="needs openai (extra `test`)")
    for use in uses(load_recipe(path)):
        assert callable(load_attr(use.use))


@pytest.mark.parametrize("block", [b for x in LANGUAGES for b in blocks(x) if b.marker], ids=named)
def test_what_is_not_run_says_why(block: Block) -> None:
    reason = block.marker.removeprefix(NOT_RUN)
    assert block.marker == IN_THE_RUN or (reason != block.marker and len(reason) > 10)


@pytest.mark.parametrize("path", [*pages(), ROOT / "CONTRIBUTING.md"], ids=str)
def test_links_to_files_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r"(?:src|href)=\"([^\"#]+)", text)
    relative = [t for t in targets if not t.startswith(("http://", "https://", "mailto:"))]
    assert [t for t in relative if not (path.parent / t).exists()] == []


def test_commands_in_tables_of_the_readme_are_run_by_other_tests() -> None:
    """A command of ours is also in a block that is run; a benchmark exists."""
    rows = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    commands = re.findall(r"`((?:astraflow|make) [^`]+)` \|$", "\n".join(rows), flags=re.M)
    run = {command for block in blocks("bash") if block.is_run for command in block.commands}
    assert len(commands) > 5
    for command in commands:
        name = command.removeprefix("make bench NAME=")
        assert command in run or (ROOT / "benchmarks" / f"{name}.py").is_file(), command


def test_the_least_torch_on_the_page_is_that_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    floor = next(re.sub(r".*>=", "", item) for item in extras["torch"] if item.startswith("torch>="))
    assert f"torch >= {floor}" in (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")


def test_every_extra_is_on_the_page() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    assert [extra for extra in extras if f"`{extra}`" not in text] == []


def literals() -> str:
    """Every text in the package's code; what is put into it at run time shows as a line break."""
    found: list[str] = []
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "packages").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "\n" for p in node.values]
                found.append("".join(map(str, parts)))
    return "\n".join(found)


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    """Between placeholders (`...`, capitals), each message is literally in the code."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [line for line in text.partition("## Recipes")[2].splitlines() if line.startswith("| ")]
    column = "\n".join(row.split(" | ")[0] for row in rows)
    messages = [m[2] for m in re.finditer(r"(`+) ?(.+?) ?\1(?!`)", column)]
    parts = [part.strip(" '();:") for m in messages for part in re.split(r"\.\.\.|;|\b[A-Z]+\b|\bnan\b", m)]
    code = literals()
    assert len(parts) > 40
    assert [part for part in parts if part not in code] == []


def cells_in(row: str) -> int:
    return len(re.split(r"(?<!\\)\|", row.strip().removeprefix("|").removesuffix("|")))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_tables_have_a_header_and_rows_of_its_width(page: Path) -> None:
    """A blank line in a table, or a bar in a cell, would show its rows as plain text or shift them."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for table in re.findall(r"(?:^ *\|.*\n)+", text, flags=re.M):
        header, rule, *rows = [*table.splitlines(), ""]
        assert re.fullmatch(r"[\s|:-]+", rule), f"{page}: no header above {header!r}"
        wrong = [row for row in rows[:-1] if cells_in(row) != cells_in(header)]
        assert wrong == [], f"{page}: rows of another width than {header!r}"


def names_in(annotation: object) -> list[str]:
    """The names that a recipe may choose from in a union of variants."""
    configs = [c for c in typing.get_args(typing.get_args(annotation)[0]) if c is not Use]
    return [c.model_fields["name"].default for c in configs]


@pytest.mark.parametrize(
    ("heading", "union"),
    [
        ("Curators", CuratorConfig),
        ("Filters", FilterConfig),
        ("Shaping", ShapingConfig),
        ("Credit", CreditConfig),
        ("Samplers", SamplerConfig),
        ("Removers", RemoverConfig),
        ("Limiters", LimiterConfig),
    ],
)
def test_every_data_algorithm_is_on_its_page(heading: str, union: object) -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    assert [name for name in names_in(union) if f"`{name}`" not in section] == []
