"""Runs the paper's results on a real model, and writes docs/paper.md. `paper_rows.py` has the rows.

As soon as an arm of a row and seed ends, its result is in benchmarks/results/paper/ROW-SEED.json, with
commit, date, and machine. What is there is skipped, so an interrupted command continues where it was. Delete
a file to measure it again. A row that is a program has one file, ROW.json. The page is made from the files.

    python benchmarks/paper.py [--rows NAME ...] [--seeds 0 1 2] [--arms NAME ...]
    python benchmarks/paper.py --list             # the cost of each row, and what is missing
    python benchmarks/paper.py --page             # runs nothing: writes the page
    python benchmarks/paper.py --steps 2 --results /tmp/trial --rows deltas    # a trial of a few steps
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from arms import ROOT, Found, Result, provenance, run_arm
from harness import MOST_LOAD
from paper_rows import ROWS, Row
from plots import draw_curves

PAGE = ROOT / "docs" / "paper.md"
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results" / "paper"
SEEDS = (0, 1, 2)
RULES = {"shown": "**Shown**", "half": "**Half shown**", "missed": "**Missed**"}
HEAD = """# The paper's results

*Written by `make paper`; don't edit.*

The [paper](https://arxiv.org/abs/2605.15565) measured on clusters of GPUs. This page has its tables and
figures on two CPU cores: with SmolLM2, a chat model of 135 million parameters, and real services, or where
that doesn't fit, with emulated devices under a virtual clock. Each row needs three seeds. `make paper` runs
what is missing, `make paper ROWS="data deltas" SEEDS="0 1"` a part of it, and `make paper ARGS=--list` prints
what each row costs.
"""


# --- running --------------------------------------------------------------------------------------


def path_of(results: Path, row: Row, seed: int) -> Path:
    """Returns the file with a row's results of a seed."""
    return results / f"{row.name}-{seed}.json"


def read(results: Path, row: Row, seed: int) -> dict[str, Result]:
    """Returns arm -> result of what is there."""
    path = path_of(results, row, seed)
    return json.loads(path.read_text(encoding="utf-8"))["arms"] if path.is_file() else {}


def write(path: Path, content: object) -> None:
    """Writes a result at once, so that an interruption leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_rounded(content), indent=1, ensure_ascii=False) + "\n"
    path.with_suffix(".part").write_text(text, encoding="utf-8")
    path.with_suffix(".part").replace(path)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in cast("dict[str, Any]", value).items()}
    return list(map(_rounded, cast("list[Any]", value))) if isinstance(value, list) else value


def run_arms(row: Row, seed: int, results: Path, only: Sequence[str], steps: int) -> None:
    """Runs the arms of a row and seed that have no result yet. Raises: what a run raises."""
    for arm in row.arms:
        found = read(results, row, seed)
        if arm.name in found or (only and arm.name not in only):
            continue
        print(f"== {row.name}, seed {seed}: {arm.name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="astraflow-paper-") as scratch:
            found[arm.name] = run_arm(arm, seed, Path(scratch), steps=steps)
        write(path_of(results, row, seed), {"row": row.name, "seed": seed, "arms": found})


def run_program(row: Row, results: Path) -> None:
    """Runs a row that is a program, unless its result is there. Raises: CalledProcessError if it fails."""
    path = results / f"{row.name}.json"
    if path.is_file() and "commit" in json.loads(path.read_text(encoding="utf-8")):
        return
    print(f"== {row.name}: {shlex.join(row.program)}", file=sys.stderr, flush=True)
    measured, began_s = provenance(), time.monotonic()
    argv = [sys.executable, str(ROOT / "benchmarks" / row.program[0]), *row.program[1:]]
    done = subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    *output, last = done.stdout.rstrip("\n").split("\n")
    record = measured | {
        "minutes": round((time.monotonic() - began_s) / 60),
        "figures": json.loads(last),
        "output": [line.rstrip() for line in output],
    }
    write(path, record)


# --- the page -------------------------------------------------------------------------------------


def found_of(row: Row, results: Path) -> tuple[Found | None, list[int]]:
    """Returns the results of all seeds that have every arm, and these seeds."""
    paths = results.glob(f"{row.name}-[0-9].json")
    seeds = sorted(int(path.stem.removeprefix(f"{row.name}-")) for path in paths)
    complete = {seed: own for seed in seeds if len(own := read(results, row, seed)) == len(row.arms)}
    names = [arm.name for arm in row.arms]
    found = {name: [own[name] for own in complete.values()] for name in names}
    return (Found(found) if complete else None), list(complete)


def verdict_of(row: Row, results: Path = RESULTS) -> str:
    """Returns the first words about a row: its verdict, and the figures behind it."""
    if row.program:
        path = results / f"{row.name}.json"
        if not path.is_file():
            return "**Not run yet**"
        verdict, text = row.judge_figures(json.loads(path.read_text(encoding="utf-8"))["figures"])
        return f"{RULES[verdict]}: {text}"
    found, seeds = found_of(row, results)
    if found is None:
        return "**Not run yet**"
    verdict, text = row.judge(found)
    short = "" if len(seeds) >= len(SEEDS) else f" ({len(seeds)} of {len(SEEDS)} seeds)"
    return f"{RULES[verdict]}{short}: {text}"


def section(row: Row) -> str:
    """Returns a row's part of the page, from its recorded results."""
    lines = [f"## {row.title}", "", f"{verdict_of(row)}.", "", row.text, ""]
    if row.program:
        return "\n".join([*lines, *_program_lines(row)])
    found, seeds = found_of(row, RESULTS)
    if found is not None:
        lines += _arm_lines(row, found, seeds)
    return "\n".join(lines)


def _program_lines(row: Row) -> list[str]:
    path = RESULTS / f"{row.name}.json"
    if not path.is_file():
        return []
    record = json.loads(path.read_text(encoding="utf-8"))
    facts = ", ".join(str(record[key]) for key in ("date", "commit", "machine") if key in record)
    lines = [
        *_figure_lines(row, record["figures"]),
        "",
        f"`python benchmarks/{' '.join(row.program)}`, {facts} "
        f"([all figures](../benchmarks/results/paper/{row.name}.json))",
        "",
    ]
    return [*lines, f"![{row.title}](images/{row.picture})", ""] if row.picture else lines


def _figure_lines(row: Row, figures: dict[str, Any]) -> list[str]:
    shown = [f"| {meaning} | {_text(figures[name])} |" for name, meaning in row.figures if name in figures]
    return ["| Result | Figure |", "|---|---|", *shown]


def _arm_lines(row: Row, found: Found, seeds: Sequence[int]) -> list[str]:
    has_scores = all(result["points"] for runs in found.results.values() for result in runs)
    scores = ("score",) if has_scores else ()
    lines = [
        f"| {' | '.join(('arm', *scores, *row.columns))} |",
        f"|{'---|' * (1 + len(scores) + len(row.columns))}",
    ]
    for arm in found.results:
        last = [_text(found.final(arm))] if has_scores else []
        cells = [*last, *(_text(found.mean(arm, name)) for name in row.columns)]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    runs = [result for each in found.results.values() for result in each]
    facts = [sorted({str(result[key]) for result in runs}) for key in ("date", "commit", "machine")]
    load = max(result["others_load"] for result in runs)
    busy = f"; **others used up to {load:g} cores**" if load > MOST_LOAD else ""
    links = ", ".join(f"[seed {n}](../benchmarks/results/paper/{row.name}-{n}.json)" for n in seeds)
    lines += ["", f"Means over seeds. {'; '.join(', '.join(each) for each in facts)}{busy} ({links}).", ""]
    if has_scores:
        lines += [f"![{row.title}, curves](images/paper_{row.name}.png)", ""]
    return lines


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(entry)}" for key, entry in cast("dict[str, Any]", value).items())
    return " to ".join(map(_text, cast("list[Any]", value))) if isinstance(value, list) else str(value)


def page() -> str:
    """Returns the whole page, from the recorded results."""
    table = ["| Row | Result | Verdict |", "|---|---|---|"]
    table += [f"| `{row.name}` | {row.title} | {verdict_of(row).partition(':')[0]} |" for row in ROWS]
    return "\n".join([HEAD, *table, "", *map(section, ROWS)])


def draw(row: Row) -> None:
    """Draws the curves of a row that has any."""
    found, _ = found_of(row, RESULTS)
    if found is None or not all(result["points"] for runs in found.results.values() for result in runs):
        return
    curves = {arm: found.curve(arm, row.axis[0]) for arm in found.results}
    draw_curves(curves, IMAGES / f"paper_{row.name}.png", over=row.axis[1], lowest=0.0)


def listing(rows: Sequence[Row], seeds: Sequence[int], results: Path) -> str:
    """Returns what each row costs, and how much of it is missing."""
    lines: list[str] = []
    for row in rows:
        total = len(row.arms) * len(seeds) or 1
        is_done = (results / f"{row.name}.json").is_file()
        done = sum(len(read(results, row, seed)) for seed in seeds) if row.arms else int(is_done)
        cost = f"{row.minutes:5.0f} min {'per seed' if row.arms else 'in all  '}"
        lines.append(f"{row.name:15}{cost}  {total - done:2} of {total:2} runs missing  {row.title}")
    return "\n".join(lines)


def main(given: argparse.Namespace) -> int:
    """Runs rows and writes the page. What fails is named at the end; everything else is run."""
    rows = [row for row in ROWS if not given.rows or row.name in given.rows]
    results: Path = given.results or RESULTS
    if given.list:
        print(listing(rows, given.seeds, results))
        return 0
    failed: list[str] = []
    # All rows have a first seed before any has a second. Programs come last: the race takes hours.
    jobs = [(row, seed) for seed in given.seeds for row in rows if row.arms]
    jobs += [(row, 0) for row in rows if row.program]
    for row, seed in () if given.page else jobs:
        try:
            if row.program:
                run_program(row, results)
            else:
                run_arms(row, seed, results, given.arms, given.steps)
        except (Exception, SystemExit) as err:  # noqa: BLE001 - the other rows still run
            failed.append(f"{row.name}, seed {seed}: {type(err).__name__}: {err}")
    if results == RESULTS:
        for row in rows:
            draw(row)
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE}")
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--arms", nargs="+", default=[], help="only these arms")
    parser.add_argument("--steps", type=int, default=0, help="a trial of so many steps; needs --results")
    parser.add_argument("--results", type=Path, help="folder of the results (default: the repository's)")
    parser.add_argument("--list", action="store_true", help="print what each row costs and what is missing")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page")
    arguments = parser.parse_args()
    if arguments.steps and arguments.results is None:
        parser.error("--steps is for trials, whose results don't belong into the repository; add --results")
    sys.exit(main(arguments))
