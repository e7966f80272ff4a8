"""Breaks the dataflow's core in small ways, one at a time, and counts how many of them the tests notice.

`make mutants` tries all (hours on few cores), `make mutants SAMPLE=400` as many, drawn at random but always
the same. What was tried before is not tried again: remove the folder `mutants` to begin anew. Prints each
survivor with what was changed, then the share that was noticed. mutmut does the work; its settings are in
pyproject.toml.
"""

import argparse
import ast
import difflib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "mutants" / "src" / "astraflow" / "dataflow" / "core"
SURVIVED = 0
UNTESTED = 33
"""Exit codes of a mutant's tests: all passed; there are none."""
ONE = "astraflow.dataflow.core.fates.x_num_live__mutmut_1"


def outcomes() -> dict[str, int | None]:
    """Mutant -> exit code of its tests; None if it was not tried."""
    found: dict[str, int | None] = {}
    for meta in sorted(CORE.glob("*.meta")):
        found |= json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
    return found


def bodies() -> Iterator[tuple[str, list[str]]]:
    """Each variant of each function, by mutmut's name for it, and its lines below the first."""
    for path in sorted(CORE.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and "__mutmut_" in node.name:
                yield f"astraflow.dataflow.core.{path.stem}.{node.name}", lines[node.lineno : node.end_lineno]


def changes(names: Sequence[str]) -> Iterator[str]:
    """What each of these mutants changed, one line each."""
    variants = dict(bodies())
    for name in names:
        original = variants.get(re.sub(r"\d+$", "orig", name), [])
        diff = difflib.unified_diff(original, variants.get(name, []), lineterm="", n=0)
        parts = [line[0] + " " + line[1:].strip() for line in diff if re.match(r"[-+](?![-+])", line)]
        yield f"{name.removeprefix('astraflow.dataflow.core.')}: {'  '.join(parts)}"


def run(names: Sequence[str], num_children: int) -> None:
    """Lets mutmut try these mutants, or all if there are none; one that was tried is left out."""
    command = [
        str(Path(sys.executable).parent / "mutmut"),
        "run",
        "--max-children",
        str(num_children),
        *names,
    ]
    subprocess.run(command, cwd=ROOT, check=True)


def main() -> int:
    """1 if fewer than `--least` percent were noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="mutants to try; 0: all")
    parser.add_argument("--least", type=float, default=85.0, help="percent to be noticed")
    args = parser.parse_args()
    num_children = os.cpu_count() or 1
    if not CORE.exists():
        run([ONE], num_children)
    chosen = sorted(outcomes())
    if args.sample:
        chosen = random.Random(4).sample(chosen, min(args.sample, len(chosen)))
    known = outcomes()
    todo = [name for name in chosen if known[name] is None]
    if todo:
        run(todo if args.sample else [], num_children)
    known = outcomes()
    tried = [name for name in chosen if known[name] is not None]
    alive = sorted(name for name in tried if known[name] in {SURVIVED, UNTESTED})
    print("\n".join(changes(alive)))
    by_file = Counter(name.split(".")[3] for name in alive)
    print(f"survivors: {', '.join(f'{num} in {file}.py' for file, num in by_file.most_common())}")
    share = 100.0 * (len(tried) - len(alive)) / max(1, len(tried))
    num_noticed = len(tried) - len(alive)
    print(f"{num_noticed} of {len(tried)} mutants were noticed: {share:.1f} % (of {len(known)} in all)")
    return int(share < args.least)


if __name__ == "__main__":
    sys.exit(main())
