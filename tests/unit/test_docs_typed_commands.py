"""Commands on pages that need minutes, a GPU, or other machines.

No test runs them, so each is parsed as the command line parses it, and its recipe is loaded with its
overrides. Where a recipe is only an example (`my.yaml`), the quickstart takes its place.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from astraflow.cli.main import app
from astraflow.recipe.gallery import recipe_file
from astraflow.recipe.recipe import load_recipe
from drivers.docs_driver import blocks
from drivers.system_driver import ROOT

_LOADS_RECIPE = frozenset({"run", "try", "plan", "bundle"})
_ELSEWHERE = frozenset(
    {
        ".venv-harbor/bin/harbor",
        "cd",
        "curl",
        "echo",
        "git",
        "hf",
        "kubectl",
        "make",
        "openssl",
        "pip",
        "podman",
        "python",
        "sh",
        "ssh",
        "trap",
        "wait",
        ".venv/bin/python",
    }
)
"""Programs that are not AstraFlow's. `make` has a test of its own below."""


def commands() -> list[tuple[str, list[str]]]:
    """Each command of the blocks that no test runs: where it stands, and its words."""
    found: list[tuple[str, list[str]]] = []
    for block in blocks("bash"):
        if not block.is_run:
            found += [(block.name, words) for words in map(words_of, block.commands) if words]
    return found


def words_of(command: str) -> list[str]:
    """A command up to what the shell makes of it: `a && b`, a pipe, or a comment."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=";&|>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set(";&|>"):
            break
        words.append(word)
    return words


def parse(words: list[str]) -> dict[str, Any]:
    """The parameters that the command line gets. Raises: click's UsageError if it is wrong."""
    command: Any = typer.main.get_command(app)
    context: Any = None
    name = "astraflow"
    rest = words
    while hasattr(command, "get_command"):
        context = command.context_class(command, info_name=name, parent=context)
        name, *rest = rest
        command = command.get_command(context, name)
        assert command is not None, f"`{name}` is not a command"
    return command.make_context(name, rest, parent=context).params


OURS = [(place, words[1:]) for place, words in commands() if words[0].endswith("astraflow")]


@pytest.mark.parametrize(("place", "words"), OURS, ids=[f"{place} {words[0]}" for place, words in OURS])
def test_a_command_that_no_test_runs_can_be_typed(
    place: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    given = parse(words)
    if words[0] in _LOADS_RECIPE:
        named = Path(given["recipe"])
        is_example = named.name in {"my.yaml", "mine.yaml", "recipe.yaml"}
        file = ROOT / "recipes" / "quickstart.yaml" if is_example else recipe_file(str(named))[0]
        launcher = [f"launcher={{name: {on}}}"] if (on := given.get("on")) else []
        load_recipe(file, [*launcher, *(given.get("overrides") or [])])


def test_the_commands_of_other_programs_are_known() -> None:
    """A misspelled `astraflw` would otherwise pass for another program's."""
    others = {words[0] for _, words in commands()} - {"astraflow", ".venv/bin/astraflow"}
    assert others <= _ELSEWHERE


def test_what_make_is_asked_for_exists() -> None:
    targets = set(re.findall(r"^([\w./-]+(?: [\w./-]+)*):", (ROOT / "Makefile").read_text(), flags=re.M))
    names = {name for group in targets for name in group.split()}
    asked = {words[1] for _, words in commands() if words[0] == "make"}
    assert asked
    assert asked <= names


def test_there_are_such_commands() -> None:
    assert len(OURS) > 40
