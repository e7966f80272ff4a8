"""`make paper`: the results of the AstraFlow paper in kind, each by one command beside its baseline.

Each row runs a benchmark, and puts what it printed into docs/paper.md, with the command, the date, the load
of the machine by others and the time it took. A row that has been run alone leaves the others on the page as
they are.

    python benchmarks/paper.py [--row NAME] [--list]
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "paper.md"
SAYS = "https://arxiv.org/abs/2605.15565"


@dataclass(frozen=True)
class Row:
    """One result."""

    name: str
    title: str
    text: str
    """What is compared, and what of it is emulated or computed."""
    command: tuple[str, ...] = ()
    """The benchmark and its arguments; empty: there is none yet."""
    pictures: tuple[tuple[str, str], ...] = ()
    """(file in docs/images, what it shows)."""
    figures: tuple[str, ...] = ()
    """Names in the benchmark's last line that are shown; empty: all."""


ROWS = (
    Row(
        "multi-policy",
        "Several policies, nobody waits",
        "Two policies on ten devices, against all synchronous schedules, over a range of loads. Devices "
        "are emulated; the sweep's clock is virtual. "
        "[How](benchmarks.md#two-policies-on-emulated-devices).",
        ("multi_policy.py",),
        (
            (
                "multi_policy_sweep.png",
                "Seconds of each synchronous schedule divided by AstraFlow's, over the load",
            ),
        ),
        (
            "speedup_vs_plain_range",
            "speedup_vs_best_range",
            "speedup_unequal",
            "speedup_unequal_range",
            "num_lost",
            "services_speedup_vs_colocated",
            "virtual_speedup_vs_colocated",
            "others_load",
            "verdict",
        ),
    ),
    Row(
        "single-policy",
        "Several policies against one",
        "A solver with a verifier and a second try, against the same solver alone with as many rollouts, "
        "and with 2.5 times as many. Real training on the CPU; accuracy on held-out tasks.",
        ("single_policy.py", "--picture", "docs/images/paper_single_policy.png"),
        (("paper_single_policy.png", "Held-out accuracy over episodes, two policies and one"),),
    ),
    Row(
        "deltas",
        "Small versions",
        "A version of a 14B model as a delta, against the full version and against index and value of "
        "each change. The changes are those of a real run of the tiny model, encoded and decoded for "
        "real; the sizes of the 14B model are computed from the bytes per weight of each kind of tensor, "
        "and the times from the sizes.",
        ("delta_14b.py", "--picture", "docs/images/paper_deltas.png"),
        (("paper_deltas.png", "Size of one version of a 14B model: full, delta, index and value"),),
    ),
    Row(
        "pools",
        "Pools of different sizes, two of them far away",
        "The quickstart, trained by three pools of 1x, 2x and 4x slots, two of which reach dataflow and "
        "publisher through 4 Gbit/s and 300 ms each way, against one local pool of as many slots. Real "
        "training; the links are emulated by a proxy. A step takes a fifth of a second here, so what comes "
        "through the links is some versions old, which costs accuracy at the same number of steps; a step of "
        "a large model takes minutes.",
        ("learning_pools.py", "--picture", "docs/images/paper_pools.png"),
        (("paper_pools.png", "Held-out accuracy over steps, one local pool and three pools"),),
    ),
    Row(
        "edf",
        "EDF against FIFO where long means hard",
        "The quickstart's model on sums of which the hard half takes six times as long. Real training; "
        "the clock is virtual. The table shows the lengths of what was dropped beside those of what was "
        "trained.",
        ("long_tasks.py", "--picture", "docs/images/paper_edf.png"),
        (("paper_edf.png", "How long trained and dropped groups were, three samplers"),),
    ),
    Row(
        "scaling",
        "Auto-scaling",
        "Not yet: rollout services join and leave at any moment, but nothing starts or stops them by itself.",
    ),
)
HEAD = f"""# The paper's results, in kind

The [paper]({SAYS}) measured on clusters of GPUs. This page has the same six results in kind: on two CPU
cores, with emulated devices or tiny models where there were GPUs, each beside its baseline. What is
emulated, virtual or computed says so. Written by `make paper`; one row by `make paper ROW=NAME`.
"""


def section_of(page: str, name: str) -> str:
    """A row's part of the page; empty if it was never run."""
    found = re.search(rf"<!-- row {name} -->\n(.*?)<!-- end of row -->\n", page, re.DOTALL)
    return found[1] if found else ""


def heading(row: Row) -> str:
    """What every row begins with."""
    return f"## {row.title}\n\n{row.text}\n\n"


def run(row: Row) -> str:
    """Runs a row. Returns: its section. Raises: CalledProcessError if the benchmark fails."""
    load_before = os.getloadavg()[0]
    began_s = time.monotonic()
    argv = [sys.executable, str(ROOT / "benchmarks" / row.command[0]), *row.command[1:]]
    done = subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    minutes = (time.monotonic() - began_s) / 60
    *table, last = done.stdout.rstrip("\n").split("\n")
    figures = json.loads(last)
    shown = {name: figures[name] for name in row.figures or sorted(figures) if name in figures}
    command = shlex.join(("python", f"benchmarks/{row.command[0]}", *row.command[1:]))
    date = time.strftime("%Y-%m-%d")
    conditions = f"{minutes:.1f} min on {os.cpu_count()} cores, load average {load_before:.1f} before it"
    lines = [
        f"`{command}`, {date}: {conditions}.",
        "",
        "| figure | value |",
        "|---|---|",
        *(f"| `{name}` | {_text(value)} |" for name, value in shown.items()),
        "",
        "```text",
        *(line.rstrip() for line in table),
        "```",
        "",
        *(f"![{alt}](images/{file})\n" for file, alt in row.pictures),
    ]
    return heading(row) + "\n".join(lines) + "\n"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return " to ".join(_text(entry) for entry in value)
    return str(value)


def write(fresh: dict[str, str]) -> None:
    """Writes the page: fresh sections, and those of the other rows as they were."""
    page = PAGE.read_text() if PAGE.is_file() else ""
    parts = [HEAD]
    for row in ROWS:
        unrun = heading(row) + (f"Not run yet: `make paper ROW={row.name}`.\n\n" if row.command else "")
        section = fresh.get(row.name) or section_of(page, row.name) or unrun
        parts.append(f"<!-- row {row.name} -->\n{section}<!-- end of row -->\n")
    PAGE.write_text("\n".join(parts))


def main(names: list[str]) -> int:
    """Runs rows; a row that fails is named at the end, and keeps its old section."""
    failed: list[str] = []
    for row in ROWS:
        if row.name not in names or not row.command:
            continue
        print(f"== {row.name}: {row.title}", file=sys.stderr, flush=True)
        try:
            write({row.name: run(row)})
        except subprocess.CalledProcessError as err:
            failed.append(f"{row.name} (exit status {err.returncode})")
    write({row.name: heading(row) for row in ROWS if not row.command})
    print(f"wrote {PAGE}")
    for name in failed:
        print(f"failed: {name}; its old section is kept", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [row.name for row in ROWS]
    parser.add_argument("--row", choices=known, help="run only this one (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{row.name:16}{row.title}" for row in ROWS))
        sys.exit(0)
    sys.exit(main([given.row] if given.row else known))
