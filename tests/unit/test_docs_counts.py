"""The counts that README and docs name are those of the code, and they stay within their limits."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from astraflow.losses.factory import LOSSES
from astraflow_conformance.rules import RULES

_ROOT = Path(__file__).parents[2]
_ABOUT = 0.05
"""How far a count that is given as "about" may be off, so that not every new test changes the docs."""


def text_of(page: str) -> str:
    """A page with its line breaks as blanks."""
    return " ".join((_ROOT / page).read_text().split())


def named(page: str, pattern: str) -> list[int]:
    """The numbers of the only place in a page that has this form."""
    found = re.findall(pattern, text_of(page))
    assert len(found) == 1, f"{page} has {len(found)} places with {pattern!r}"
    numbers = found[0] if isinstance(found[0], tuple) else (found[0],)
    return [int(number.replace(",", "")) for number in numbers]


# --- tests ----------------------------------------------------------------------------------------


def marks_of(nodes: list[ast.expr]) -> set[str]:
    """The names of the pytest marks in some expressions."""
    return {
        part.attr
        for node in nodes
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Attribute)
        and part.value.attr == "mark"
    }


def page_marks(page: ast.Module) -> set[str]:
    """The marks of all tests of a file."""
    assigned = [node for node in page.body if isinstance(node, ast.Assign)]
    return marks_of(
        [node.value for node in assigned if any(ast.unparse(name) == "pytestmark" for name in node.targets)]
    )


@cache
def num_test_functions() -> tuple[int, Counter[str]]:
    """How many test functions CI runs, and of each file how many it leaves out."""
    makefile = (_ROOT / "Makefile").read_text()
    left_out = set(re.findall(r"not (\w+)", re.findall(r'-m "(not [^"]*)"', makefile)[0]))
    num_in_ci = 0
    others: Counter[str] = Counter()
    for path in sorted((_ROOT / "tests").rglob("test_*.py")):
        page = ast.parse(path.read_text())
        for node in page.body:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if not is_function or not node.name.startswith("test_"):
                continue
            if left_out & (page_marks(page) | marks_of(node.decorator_list)):
                others[str(path.relative_to(_ROOT))] += 1
            else:
                num_in_ci += 1
    return num_in_ci, others


@pytest.mark.parametrize(
    ("page", "pattern"),
    [
        (
            "docs/testing.md",
            r"about ([\d,]+) test functions\. `make test-all` also runs about ([\d,]+) that CI leaves out",
        ),
    ],
)
def test_the_docs_say_how_many_tests_run_in_ci_and_how_many_do_not(page: str, pattern: str) -> None:
    num_in_ci, others = num_test_functions()
    for said, true in zip(named(page, pattern), (num_in_ci, others.total()), strict=True):
        assert said == pytest.approx(true, rel=_ABOUT), f"{page} says about {said}, there are {true}"


# --- other counts ---------------------------------------------------------------------------------


def test_the_docs_say_how_many_losses_there_are() -> None:
    names, formulas = named("docs/losses.md", r"There are (\d+) names for (\d+) formulas")
    assert (names, formulas) == (len(LOSSES), len(set(LOSSES.values())))
    assert named("README.md", r"\[(\d+) policy losses\]") == [len(LOSSES)]


def test_the_docs_say_how_many_rules_the_protocol_has() -> None:
    pattern = (
        r"There are (\d+) rules: (\d+) for a dataflow, (\d+) for a rollout service, (\d+) for a trainer, "
        r"and (\d+) for the columns"
    )
    of = Counter(number[0] for number in RULES)
    assert named("docs/protocol/conformance.md", pattern) == [len(RULES), of["D"], of["W"], of["T"], of["C"]]


def test_the_path_of_an_item_is_as_long_as_the_docs_say() -> None:
    page = (_ROOT / "docs/architecture.md").read_text()
    steps = {int(number) for number in re.findall(r"^ ?(\d+)  [\w/]+\.py", page, flags=re.MULTILINE)}
    assert steps == set(range(1, len(steps) + 1))
    assert named("docs/architecture.md", r"open these (\d+) files in this order") == [len(steps)]


@pytest.mark.parametrize("page", ["README.md", "docs/protocol/index.md"])
def test_the_scripted_worker_is_as_short_as_the_docs_say(page: str) -> None:
    (said,) = named(
        page, r"`examples/scripted_worker\.py`(?:\]\([^)]*\))? is a rollout service (?:in|of) (\d+) lines"
    )
    assert len((_ROOT / "examples/scripted_worker.py").read_text().splitlines()) <= said


# --- limits ---------------------------------------------------------------------------------------


def test_the_readme_and_the_glossary_stay_short() -> None:
    assert len((_ROOT / "README.md").read_text().splitlines()) <= 120
    terms = (_ROOT / "docs/glossary.md").read_text().partition("|---|---|\n")[2].partition("\n\n")[0]
    assert len(terms.splitlines()) <= 40


_GENERATED = (
    "commands.md",
    "recipes.md",
    "recipes/*.md",
    "protocol/items.md",
    "protocol/rules.md",
    "watchdog.md",
)
_GENERATED += ("full_recipes.md", "code_map.md", "gallery.md", "gallery_real.md", "paper.md")
"""Pages below docs/ that programs write, as a whole."""
_MAX_WORDS = 50_000


def test_the_hand_written_pages_stay_short() -> None:
    """Words are what `wc -w` counts. The table of benchmarks is made from files in benchmarks/results/."""
    docs = _ROOT / "docs"
    generated = {path for pattern in _GENERATED for path in docs.glob(pattern)}
    pages = [
        path for path in docs.rglob("*.md") if path not in generated and docs / "site" not in path.parents
    ]
    num_words = 0
    for path in [*pages, _ROOT / "README.md"]:
        text = path.read_text()
        if path == docs / "benchmarks.md":
            text = re.sub(r"<!-- The table is written.*<!-- end of the table -->", "", text, flags=re.DOTALL)
        num_words += len(text.split())
    assert num_words <= _MAX_WORDS
