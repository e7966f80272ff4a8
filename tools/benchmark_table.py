"""Writes the tables of docs/benchmarks.md from the JSON files in benchmarks/results/.

    python tools/benchmark_table.py            # writes the tables
    python tools/benchmark_table.py --check    # exit code 1 if the tables are not up to date

Each row is one entry of a file's `claims`. The contents of `more` and `tables` are only for readers of the
file. A result whose program was removed names the last commit that has it (`last_program`), and is in the
second table. In a clone with the whole history, `--check` also fails if a file names a commit that doesn't
exist.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- The table is written by tools/benchmark_table.py. -->\n"
END = "<!-- end of the table -->\n"
REMOVED = (
    "The programs of the following results were removed. The commit is the last one that has the program.\n"
)
HEADER = ("Benchmark", "Claim", "Last figure", "Spread", "Date", "Machine")


def tables() -> str:
    """Returns both tables as Markdown, with one row per claim, sorted by benchmark."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    current = [result for result in results if "last_program" not in result]
    return f"{table(current)}\n{REMOVED}\n{table([each for each in results if each not in current])}"


def table(results: list[dict[str, Any]]) -> str:
    """Returns one table."""
    rows = [HEADER, ("---",) * len(HEADER), *(row for result in results for row in rows_of(result))]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def rows_of(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns the rows of one benchmark. Only the first has its name, date, and machine."""
    name = result["benchmark"]
    link = f"[`{name}`](../benchmarks/results/{name}.json)"
    if "last_program" in result:
        link += f" at `{result['last_program']}`"
    rows: list[tuple[str, ...]] = []
    for claim in result["claims"]:
        first, date, machine = ("", "", "") if rows else (link, result["date"], result["machine"])
        rows.append((first, claim["claim"], figure_of(claim), claim.get("spread", ""), date, machine))
    return rows


def figure_of(claim: dict[str, Any]) -> str:
    """Returns the newest value with its unit and target, and whether it misses the target."""
    value, unit = claim["value"], claim.get("unit", "")
    text = f"{value:,}" if isinstance(value, int) else str(value)
    text += unit if unit == "x" else f" {unit}" if unit else ""
    if "target" not in claim:
        return text
    return f"{text} ({claim['target']})" if claim["met"] else f"{text} (**missed:** {claim['target']})"


def page() -> str:
    """Returns the page with fresh tables."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def unknown_commits() -> list[str]:
    """Returns a line for each result whose commit isn't in the history. Without a history, returns none."""
    if _git("rev-parse", "--is-shallow-repository") != "false":
        return []
    results = {path.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return [
        f"benchmarks/results/{name} names commit {commit}, which git doesn't know"
        for name, result in results.items()
        for commit in (result["commit"], result.get("last_program", "HEAD"))
        if not _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    ]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> int:
    """Writes the tables, or checks them."""
    if "--check" in sys.argv[1:]:
        if problems := unknown_commits():
            print("\n".join(problems), file=sys.stderr)
            return 1
        if page() != PAGE.read_text(encoding="utf-8"):
            print(f"{PAGE.relative_to(ROOT)} is out of date; run `make docs`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
