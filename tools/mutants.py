"""Breaks the source in small ways, one at a time, and counts how many of these mutants the related tests
notice.

`make mutants` tries a sample: SAMPLE mutants for each folder of the package, the same ones for the same
SEED. `make mutants PACKAGE=trainer` tries one folder and those below it. A mutant is one change inside a
function: another operator, number, boundary, argument, or keyword. mutmut finds the changes. Changes of text
are left out, because they only change words, and so are those of zip's `strict`, which only asserts
something. The related tests of a file are the unit, golden, property, and integration tests that import it,
directly or through other modules, and those in the folder of unit tests that mirrors its own; at most the 8
nearest test files run. If they notice nothing, the system tests of the mutant's part of the package run. The
program prints each survivor and lists them in `--survivors`, and then prints the share of mutants that were
noticed.
"""

import argparse
import ast
import contextlib
import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"
TIERS = ("unit", "golden", "property", "integration")
"""Folders of tests, the fastest first."""
LEFT_OUT = "not gpu and not long and not vllm and not trackers and not interop"
SYSTEM_TESTS = {
    "": ("whole_runs",),
    "addons": (),
    "addons/agents": ("agent_sandbox", "agent_box"),
    "addons/cluster": ("nodes_run", "own_launcher"),
    "addons/doctor": ("commands",),
    "addons/drop_batch": ("dropped_batches",),
    "addons/envs": ("openenv_run", "hosted_run"),
    "addons/evaluation": ("evaluation_rounds",),
    "addons/exact": ("ranks_run",),
    "addons/experiments": ("sweep",),
    "addons/export": ("commands",),
    "addons/lending": ("lending_run",),
    "addons/sandbox": ("sandbox_attacks",),
    "addons/tinker": ("tinker_loop",),
    "addons/trackers": ("whole_runs",),
    "addons/view": ("viewer", "viewer_sweeps", "stopped_parts"),
    "addons/watch": ("stopped_parts", "planted_faults"),
    "cli": ("audit_commands", "whole_runs"),
    "dataflow": ("whole_runs", "audit_commands"),
    "processes": ("whole_runs", "fork_server_run", "ranks_run"),
    "report": ("whole_runs", "stopped_parts"),
    "rollout": ("whole_runs", "mixed_pool", "evaluation_rounds"),
    "run": ("whole_runs", "fork_server_run", "policy_roles_run"),
    "service": ("whole_runs", "https"),
    "trainer": ("whole_runs", "ranks_run"),
    "weights": ("whole_runs", "weights_kills", "weights_stores"),
}
"""Folder of the package -> the files in `tests/system` or `tests/integration` that run it. A folder without
an entry has its parent's."""
MOST_TESTS = 8
"""Largest number of test files that run for a mutant. A file that everything imports would have hundreds."""
MOST_STEPS = 3
"""Largest number of imports between a test and a source file that it is related to."""
NO_TESTS = 5
"""pytest's exit code if it found no test."""
NOTICED, SURVIVED, UNTESTED = "noticed", "survived", "untested"
BROKEN = "left out, because its test fails without a change too"
_ORDER = (UNTESTED, SURVIVED, BROKEN, NOTICED)
"""Outcomes of a mutant's groups of tests: the last one that any group has is the mutant's."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    file: Path
    """Path below `src`, for example `astraflow/trainer/packing.py`."""
    function: str
    code: str
    """Contents of the whole changed file."""
    diff: str
    """The changed lines, joined into one line."""

    @property
    def description(self) -> str:
        return f"{self.file}: {self.function}: {self.diff}"


_STRICT = re.compile(r"strict=\w+|[\s,]+(?=\))|,\s*(?=strict=)")
"""The keyword `strict` of a call, and the commas around it."""


# --- mutants --------------------------------------------------------------------------------------


def folders(package: str) -> Iterator[tuple[str, list[Path]]]:
    """Yields each folder of the package with its files. `package` names one folder; empty for all."""
    files = defaultdict[str, list[Path]](list)
    for path in sorted((SOURCE / "astraflow").rglob("*.py")):
        folder = path.parent.relative_to(SOURCE / "astraflow").as_posix()
        if path.name != "__init__.py" and (not package or f"{folder}/".startswith(f"{package}/")):
            files[folder].append(path.relative_to(SOURCE))
    yield from files.items()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change that mutmut proposes. The changed file is written only if the change is drawn."""

    file: Path
    function: str
    module: Any
    """The file as libcst parses it."""
    mutation: Any

    def mutant(self) -> Mutant:
        """The change, applied."""
        from libcst import Module

        changed = self.module.deep_replace(self.mutation.original_node, self.mutation.mutated_node)
        if not isinstance(changed, Module):
            raise TypeError(f"{self.file}: mutmut replaced the whole file instead of a part of it")
        before = self.module.code.splitlines()
        lines = difflib.unified_diff(before, changed.code.splitlines(), lineterm="", n=0)
        diff = [line[0] + " " + line[1:].strip() for line in list(lines)[2:] if line[0] in "+-"]
        return Mutant(self.file, self.function, changed.code, "  ".join(diff))


def candidates_of(file: Path) -> list[Candidate]:
    """All changes of a file except those of a text."""
    from libcst import FunctionDef
    from mutmut.mutation.file_mutation import create_mutations

    text = (SOURCE / file).read_text(encoding="utf-8")
    module, mutations, _, _ = create_mutations(str(file), text)
    found: list[Candidate] = []
    for mutation in mutations:
        function = mutation.contained_by_top_level_function
        before = module.code_for_node(mutation.original_node)
        if isinstance(function, FunctionDef) and '"' not in before and "'" not in before:
            found.append(Candidate(file, function.name.value, module, mutation))
    return found


def sample(files: Sequence[Path], number: int, seed: int) -> list[Mutant]:
    """Some mutants of a folder's files, drawn at random: the same ones for the same seed."""
    # A folder's draw depends on its own name alone, so that PACKAGE tries what the whole sample tries.
    draw = random.Random(f"{seed} {files[0].parent}")
    every = [candidate for file in files for candidate in candidates_of(file)]
    drawn = [(each.module.code, each.mutant()) for each in draw.sample(every, min(number, len(every)))]
    return [mutant for code, mutant in drawn if _STRICT.sub("", mutant.code) != _STRICT.sub("", code)]


# --- related tests --------------------------------------------------------------------------------


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Returns the modules that a file imports, and those that it names in a text, for a later import."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = re.fullmatch(r"(astraflow(?:\.\w+)+)(?::\w+)?", node.value)
            names |= {named[1]} if named else set()
    return frozenset(names)


@cache
def modules_of(test: Path) -> frozenset[str]:
    """Returns the modules of the package that a test imports, directly or through the helpers next to it."""
    found: set[str] = set()
    to_read = [test]
    read: set[Path] = set()
    while to_read:
        path = to_read.pop()
        read.add(path)
        names = imports_of(path)
        found |= {name for name in names if name.startswith("astraflow")}
        helpers = {TESTS.joinpath(*name.split(".")).with_suffix(".py") for name in names}
        to_read += [helper for helper in helpers - read if helper.exists()]
    return frozenset(found)


@cache
def importers_of(module: str) -> frozenset[str]:
    """Returns the modules of the package that import a module."""
    return frozenset(
        ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in SOURCE.rglob("*.py")
        if module in imports_of(path)
    )


def shares_name(test: Path, file: Path) -> bool:
    """Returns whether a test is named after a file, or after the first words of its name."""
    own = test.stem.removeprefix("test_")
    return file.stem in own or f"{file.stem}_".startswith(f"{own}_")


@cache
def tests_of(file: Path) -> tuple[Path, ...]:
    """Returns the tests that are nearest to a source file, at most `MOST_TESTS` files.

    First come the tests that import the file, then those in its mirrored folder and those named after its
    folder: they often reach it through a recipe, a command, or an entry point. Next come the tests of the
    modules that import the file, and so on for a few steps. Among tests at the same distance, those named
    after the file come first, then those in its mirrored folder.
    """
    tests = [test for tier in TIERS for test in sorted((TESTS / tier).rglob("test_*.py"))]
    mirrored = TESTS / "unit" / file.parent.relative_to("astraflow")
    tests.sort(key=lambda test: (not shares_name(test, file), test.parent != mirrored))
    modules = frozenset({".".join(file.with_suffix("").parts)})
    found = [test for test in tests if modules & modules_of(test)]
    found += [test for test in tests if test not in found and test.parent == mirrored]
    named = f"test_{file.parent.name}"
    found += [test for test in tests if test not in found and f"{test.stem}_".startswith(f"{named}_")]
    for _ in range(MOST_STEPS):
        found += [test for test in tests if test not in found and modules & modules_of(test)]
        if len(found) >= MOST_TESTS:
            break
        modules = frozenset[str]().union(*map(importers_of, modules))
    return tuple(found[:MOST_TESTS])


def system_tests_of(file: Path) -> tuple[Path, ...]:
    """Returns the system tests of the part of the package that a source file is in."""
    folder = file.parent.relative_to("astraflow").as_posix()
    while folder not in SYSTEM_TESTS:
        folder = folder.rpartition("/")[0]
    return tuple(
        test
        for name in SYSTEM_TESTS[folder]
        for tier in ("system", "integration")
        if (test := TESTS / tier / f"test_{name}.py").exists()
    )


# --- running --------------------------------------------------------------------------------------


def run_tests(tests: Sequence[str], copy: Path, limit_s: float) -> tuple[int, str]:
    """Runs tests with a copy of the source. Returns pytest's exit code (1 if time ran out) and the first
    failed test. Nothing that the tests started is left running.
    """
    cache = ROOT / ".pytest_cache/mutants"  # some tests need one, for the model that they share
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-o", f"cache_dir={cache}",
               "-m", LEFT_OUT, *tests]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    # The output goes to a file: a process that outlives pytest would keep a pipe open.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        tests_run = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = tests_run.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tests_run.pid, signal.SIGKILL)
            tests_run.wait()
        output.seek(0)
        return code, first_failed(output.read())


def first_failed(output: str) -> str:
    """Returns the first failed test in pytest's output; empty if there is none. Its id may have spaces."""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if failed else ""


class Workshop:
    """Copies of the source, one per mutant that is tried at the same time."""

    def __init__(self, folder: Path, number: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._copies: SimpleQueue[Path] = SimpleQueue()
        for idx in range(number):
            copy = folder / str(idx) / SOURCE.name
            shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
            # The package reads recipes and examples from the folders next to it, and resolves links there.
            for path in ROOT.iterdir():
                if path.name in {"recipes", "examples"}:
                    shutil.copytree(path, copy.parent / path.name)
                elif path.is_dir() and path != SOURCE and not path.name.startswith("."):
                    (copy.parent / path.name).symlink_to(path)
            self._copies.put(copy)

    def outcome(self, mutant: Mutant) -> str:
        """Checks whether a related test fails with the mutant, and passes without it."""
        outcome = UNTESTED
        copy = self._copies.get()
        try:
            for tests in (tests_of(mutant.file), system_tests_of(mutant.file)):
                if tests and outcome in (UNTESTED, SURVIVED):
                    names = [str(test.relative_to(ROOT)) for test in tests]
                    outcome = max(outcome, self._outcome_of(mutant, names, copy), key=_ORDER.index)
        finally:
            self._copies.put(copy)
        return outcome

    def _outcome_of(self, mutant: Mutant, tests: Sequence[str], copy: Path) -> str:
        try:
            (copy / mutant.file).write_text(mutant.code, encoding="utf-8")
            code, failed = run_tests(tests, copy, self._limit_s)
        finally:
            shutil.copyfile(SOURCE / mutant.file, copy / mutant.file)
        if code == NO_TESTS:
            return UNTESTED
        # Without a failed test, the files could not be collected, or time ran out.
        if code and run_tests([failed] if failed else tests, copy, self._limit_s)[0]:
            return BROKEN
        return NOTICED if code else SURVIVED


def outcomes(mutants: Sequence[Mutant], num_workers: int, limit_s: float) -> Mapping[Mutant, str]:
    """Returns each mutant with its outcome. Prints the outcomes as they arrive, except for noticed
    mutants."""
    found: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_workers) as pool:
        Path(folder).chmod(0o755)  # some tests run programs as another user
        workshop = Workshop(Path(folder), num_workers, limit_s)
        for mutant, outcome in zip(mutants, pool.map(workshop.outcome, mutants), strict=True):
            if outcome != NOTICED:
                print(f"{outcome}: {mutant.description}", flush=True)
            if outcome != BROKEN:
                found[mutant] = outcome
    return found


def survivors(found: Mapping[Mutant, str]) -> list[str]:
    """Returns a line for each mutant that no test noticed."""
    return [f"{outcome}: {mutant.description}" for mutant, outcome in found.items() if outcome != NOTICED]


def summarize(found: Mapping[Mutant, str]) -> tuple[float, str]:
    """Returns the percentage of noticed mutants, and a sentence with the figures of core and add-ons."""
    of_core = [outcome for mutant, outcome in found.items() if "addons" not in mutant.file.parts]
    of_addons = [outcome for mutant, outcome in found.items() if "addons" in mutant.file.parts]
    parts = {"core": of_core, "add-ons": of_addons}
    texts = [f"{name} {each.count(NOTICED)} of {len(each)}" for name, each in parts.items() if each]
    num_noticed = list(found.values()).count(NOTICED)
    share = 100.0 * num_noticed / max(1, len(found))
    return share, f"{num_noticed} of {len(found)} mutants were noticed: {share:.1f} % ({', '.join(texts)})"


def main() -> int:
    """Runs the program. Returns 1 if fewer than `--least` percent of the mutants were noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=3, help="mutants per folder of the package")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn")
    parser.add_argument("--package", default="", help="a folder below src/astraflow, for example trainer")
    parser.add_argument("--least", type=float, default=80.0, help="percent to be noticed")
    parser.add_argument(
        "--survivors",
        type=Path,
        default=ROOT / "build" / "mutants.txt",
        help="file that lists unnoticed mutants",
    )
    parser.add_argument("--limit-s", type=float, default=240.0, help="time of one mutant's tests")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    args = parser.parse_args()
    started = time.monotonic()
    chosen = [
        mutant
        for _, files in folders(args.package)
        for mutant in sample(files, args.sample, args.seed)
    ]  # fmt: skip
    if not chosen:
        parser.error(f"there is no code in src/astraflow/{args.package}")
    found = outcomes(chosen, args.workers, args.limit_s)
    share, text = summarize(found)
    args.survivors.parent.mkdir(parents=True, exist_ok=True)
    args.survivors.write_text("".join(f"{line}\n" for line in survivors(found)), encoding="utf-8")
    minutes = (time.monotonic() - started) / 60
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    print(f"{text} (seed {args.seed}, {args.sample} per folder, commit {commit}, {minutes:.0f} min)")
    return int(share < args.least)


if __name__ == "__main__":
    sys.exit(main())
