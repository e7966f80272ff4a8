"""Writes docs/where_things_are.md: every file of the packages, with the first sentence of its docstring.

    python tools/where_things_are.py            # writes the page
    python tools/where_things_are.py --check    # exit code 1 if it is not up to date

What a folder is for is said here; what a file is for is said in the file.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "where_things_are.md"
LARGE = 400
"""Files with more lines are listed with their idea."""

_SENTENCE = re.compile(r"(.+?[.?!])(?=\s+[A-Z`(]|$)")


@dataclass(frozen=True)
class Folder:
    """A folder of a package, and what it is for."""

    path: str
    purpose: str

    @property
    def files(self) -> list[Path]:
        """Its modules; an empty `__init__.py` says nothing and is left out."""
        return sorted(
            file for file in (ROOT / self.path).glob("*.py") if file.read_text(encoding="utf-8").strip()
        )


FOLDERS = (
    Folder("src/astraflow", "What all parts share: items, seams, config, errors."),
    Folder("src/astraflow/service", "How a service runs, listens, is called, and protects itself."),
    Folder("src/astraflow/sandbox", "The sandbox: programs that a model wrote run in it, and reach nothing."),
    Folder(
        "src/astraflow/sandbox/inside",
        "What runs in a box, and makes one: scripts that need the standard library alone.",
    ),
    Folder("src/astraflow/hosts", "Hosts: environments in a Python of their own, in which episodes run."),
    Folder(
        "src/astraflow/hosts/inside",
        "What runs in a host: its program, in the standard library alone, and adapters to what it serves.",
    ),
    Folder("src/astraflow/envs", "Environments: where tasks come from, and how answers are scored."),
    Folder("src/astraflow/envs/data_sets", "Known data sets: prepared once, then read from a folder."),
    Folder("src/astraflow/retrieval", "Search indexes: built once, then searched by workflows."),
    Folder("src/astraflow/workflows", "Workflows: how policies and a task talk in one episode."),
    Folder(
        "src/astraflow/algorithms",
        "Data algorithms, in numpy: which tasks and groups are used, and with which advantages.",
    ),
    Folder("src/astraflow/losses", "Losses: functions from per-token columns to a loss, in torch."),
    Folder(
        "src/astraflow/models",
        "Models: load and build Hugging Face folders, adapters, the tiny model of the quickstart.",
    ),
    Folder(
        "src/astraflow/dataflow", "The dataflow service: HTTP routes, journal, and the loops around the core."
    ),
    Folder(
        "src/astraflow/dataflow/core",
        "The dataflow's state machine: all decisions, without sockets, tasks or clock.",
    ),
    Folder(
        "src/astraflow/rollout",
        "The rollout service: leases, episodes, recording, scoring, the agent gateway.",
    ),
    Folder("src/astraflow/rollout/engines", "Engines: what generates tokens for a rollout service."),
    Folder("src/astraflow/trainer", "The trainer: its loop, batches as columns, packing, checkpoints."),
    Folder("src/astraflow/trainer/backends", "Trainer backends: the owners of a model and its optimizer."),
    Folder(
        "src/astraflow/trainer/backends/tinker",
        "The verbs of the Tinker API, for training loops of your own.",
    ),
    Folder(
        "src/astraflow/weights",
        "Versions of weights on their way from a trainer to engines: publisher, receiver, peers, stores.",
    ),
    Folder("src/astraflow/weights/codec", "The delta encoding of versions."),
    Folder(
        "src/astraflow/trackers", "Trackers: where a run's metrics are shown besides, one file per library."
    ),
    Folder("src/astraflow/launch", "From a recipe to running processes, and everything that commands do."),
    Folder(
        "src/astraflow/launch/watch",
        "The watchdog: rules that say what is wrong with a run, why, and what to do.",
    ),
    Folder(
        "src/astraflow/view",
        "What people see of runs, live or not: an index beside the journal, a page, commands.",
    ),
    Folder("src/astraflow/cli", "The `astraflow` command: thin shells over `launch`."),
    Folder(
        "packages/astraflow-conformance/src/astraflow_conformance",
        "`astraflow conformance`: checks the rules of the protocol.",
    ),
    Folder(
        "packages/astraflow-paced/src/astraflow_paced",
        "Emulated GPUs: the engine, backend and workflow `paced`.",
    ),
)

HEAD = """# Where things are

*Generated from the files' docstrings by `make docs`; do not edit.*

Each table is one folder, with one line per file. [Architecture](architecture.md) draws
[the path of one item](architecture.md#the-path-of-one-item-file-by-file) through these files.

| outside the packages | what is there |
|---|---|
| `recipes/` | complete runs as YAML; `recipes/models/` has the specs of tiny models |
| `examples/` | parts of your own, each run by a test, and services written from the protocol page alone |
| `benchmarks/` | one file per benchmark, run by `make bench NAME=x` |
| `tests/` | `unit/` mirrors the package; the other folders are described in [style](style.md) |
| `tools/` | what `make docs` and `make check` run |
| `docs/` | these pages; `docs/adr/` has the decisions that would surprise a reader |
"""


def first_sentence(file: Path) -> str:
    """What a module's docstring says first, on one line."""
    told = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(told.split("\n\n")[0].split())
    found = _SENTENCE.match(paragraph)
    return (found[1] if found else paragraph).replace("|", "\\|")


def all_files() -> Iterator[Path]:
    """Every module of the packages that has content, whatever `FOLDERS` says."""
    for top in (ROOT / "src", ROOT / "packages"):
        for file in sorted(top.rglob("*.py")):
            if file.read_text(encoding="utf-8").strip():
                yield file


def table(folder: Folder) -> str:
    """One folder as a section of the page."""
    rows = [f"| `{file.name}` | {first_sentence(file)} |" for file in folder.files]
    head = [f"## {folder.path}", "", folder.purpose, "", "| file | what it is |", "|---|---|"]
    return "\n".join([*head, *rows, ""])


def large_files() -> str:
    """The files over `LARGE` lines, each with the one idea for which it is that long."""
    rows = [
        f"| `{file.relative_to(ROOT)}` | {first_sentence(file)} |"
        for file in all_files()
        if len(file.read_text(encoding="utf-8").splitlines()) > LARGE
    ]
    head = [
        f"## Files of more than {LARGE} lines",
        "",
        "A file may be long if it is one idea. This is the idea of each.",
        "",
        "| file | its idea |",
        "|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *map(table, FOLDERS), large_files()])


def main() -> int:
    """Writes or checks the page."""
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.name} is not up to date with the files; run `make docs`")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
