"""Reads the examples out of README.md and docs/, so that tests can run them as they are printed.

A fenced block is run by a test unless a comment right above it says otherwise:

    <!-- not run: REASON -->    no test runs it
    <!-- in the run -->         python: after the commands above it, where the run folder is
"""

import importlib.util
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from drivers.system_driver import ROOT

DOCS = ROOT / "docs"
IN_THE_RUN = "in the run"
NOT_RUN = "not run: "

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)
_MARKER = re.compile(r"<!-- (.*) -->\s*\Z")
_ENDS_AT_ONCE = frozenset({"--help", "--version"})


@dataclass(frozen=True)
class Block:
    """One fenced example."""

    page: str
    line: int
    language: str
    text: str
    marker: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        return not self.marker.startswith(NOT_RUN)

    @property
    def commands(self) -> list[str]:
        """Its lines, continued ones joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]

    @property
    def is_quick(self) -> bool:
        """Whether all of it are commands of ours that end at once and change nothing."""
        return all(
            words[0] == "astraflow" and _ENDS_AT_ONCE & set(words) and not {">", "|", "&"} & set(words)
            for words in map(shlex.split, self.commands)
        )


def pages() -> list[Path]:
    """All pages, the tutorial early: its run folder is used further on."""
    first = [DOCS / "installation.md", DOCS / "tutorial.md", ROOT / "README.md", ROOT / "AGENTS.md"]
    rest = sorted(path for path in DOCS.rglob("*.md") if DOCS / "site" not in path.parents)
    return [*first, *(path for path in rest if path not in first)]


def blocks(language: str, *, of: Sequence[Path] | None = None) -> list[Block]:
    """All fenced examples of a language, page by page."""
    return [block for path in of or pages() for block in _blocks_of(path) if block.language == language]


def _blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()].rstrip("\n")
        marker = _MARKER.search(before.rpartition("\n")[2])
        found.append(
            Block(
                page=path.relative_to(ROOT).as_posix(),
                line=text.count("\n", 0, match.start()) + 1,
                language=match["language"],
                text=re.sub(rf"^{match['indent']}", "", match["text"], flags=re.M),
                marker=marker[1] if marker else "",
            )
        )
    return found


def tool(name: str) -> ModuleType:
    """A module of `tools/`, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module
