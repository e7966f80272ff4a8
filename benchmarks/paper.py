"""Reproduces the results of the AstraFlow paper in kind (`make paper`): each with one command, and with its
baseline.

Each row runs a benchmark and records its output in benchmarks/results/paper/ROW.json, with the command, the
date, and the duration. docs/paper.md is made from these files, so running one row doesn't change the others.

    python benchmarks/paper.py [--row NAME] [--list] [--page]
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "paper.md"
RESULTS = ROOT / "benchmarks" / "results" / "paper"


@dataclass(frozen=True)
class Row:
    """One result."""

    name: str
    title: str
    text: str
    """What is compared, and which parts are emulated or computed."""
    command: tuple[str, ...]
    """The benchmark and its arguments."""
    figures: tuple[tuple[str, str], ...]
    """(name in the benchmark's last line, meaning) of each figure on the page."""
    picture: tuple[str, str]
    """(file in docs/images, what it shows)."""


ROWS = (
    Row(
        "multi-policy",
        "Several policies that don't wait for each other",
        "Two policies share ten devices: ten settings, three seeds, emulated devices, virtual clock. With "
        "lending, a trainer's devices generate while it waits. The bound is "
        "the time of a step if no device ever waited. A switch between tasks costs 5 % of it, in all "
        "schedules. Whole runs of 10 to 40 steps include their end, which waits for the last episodes. With "
        "real services, 12 steps at load 0.8 without lending were 2.62 times as fast as colocated training, "
        "and 2.59 times on the virtual clock (measured with commit `91905eb38f`; "
        "[details](benchmarks.md#two-policies-on-emulated-devices)).",
        ("multi_policy.py",),
        (
            (
                "speedup_vs_plain_range",
                "Speedup over the better plain synchronous schedule, with lending (paper: 2.7)",
            ),
            ("speedup_vs_plain_geomean", "Its geometric mean at loads up to 1.6"),
            ("speedup_vs_best_range", "Speedup over the fastest synchronous schedule, by cost of a switch"),
            ("speedup_vs_best_range_fixed_split", "The same without lending, cost 5 %"),
            ("frac_of_bound_min", "Least share of the bound, loads from 1.6, whole run (target 0.95)"),
            ("frac_of_bound_min_steady", "The same in the steady state"),
            ("idle_frac", "Largest idle share of the devices in the steady state, loads from 1.6"),
            ("idle_frac_fixed_split", "The same without lending"),
        ),
        (
            "multi_policy_sweep.png",
            "Seconds of each schedule divided by AstraFlow's with lending, over the load; switches cost 5 %",
        ),
    ),
    Row(
        "single-policy",
        "Two policies and one",
        "A solver with a verifier and a second try is compared with the same solver alone, with as many "
        "rollouts and with 2.5 times as many. Training is real and runs on the CPU, with three seeds. "
        "With 2.5 times the rollouts, the solver alone is slightly better.",
        ("single_policy.py", "--picture", "docs/images/paper_single_policy.png"),
        (
            ("two_accuracy", "Held-out accuracy, two policies"),
            ("one_accuracy", "Held-out accuracy, one policy, as many rollouts"),
            ("one_more_accuracy", "Held-out accuracy, one policy, 2.5 times as many"),
        ),
        ("paper_single_policy.png", "Held-out accuracy over episodes, two policies and one"),
    ),
    Row(
        "deltas",
        "Small weight versions",
        "A version of a 14B model as a delta is compared with the full version, and with the index and "
        "value of each change. The changes come from a real run of the tiny model, encoded and decoded "
        "for real. The sizes for 14B are computed from the bytes per weight of each kind of tensor.",
        ("delta_14b.py", "--picture", "docs/images/paper_deltas.png"),
        (
            ("delta_gb", "Size in GB, by learning rate (full: 29.5)"),
            ("times_smaller", "Times smaller than full"),
            ("times_smaller_than_index_and_value", "Times smaller than index and value"),
        ),
        ("paper_deltas.png", "Size of one version of a 14B model: full, delta, index and value"),
    ),
    Row(
        "pools",
        "Pools of different sizes, two of them far away",
        "Three pools of 1x, 2x, and 4x slots train the quickstart. Two of them reach the dataflow and "
        "the publisher through an emulated link of 4 Gbit/s and 300 ms each way. They are compared with "
        "one local pool of as many slots. Training is real, with three seeds. A step takes a fifth of a "
        "second here, so episodes from the far pools are several versions old, which costs accuracy. A "
        "step of a large model takes minutes.",
        ("learning_pools.py", "--picture", "docs/images/paper_pools.png"),
        (
            ("three_pools_accuracy", "Held-out accuracy after 120 steps, three pools"),
            ("one_pool_accuracy", "The same, one local pool"),
            ("seconds_ratio", "Seconds to 0.75, three pools divided by one"),
            ("far_frac", "Share of the episodes from the far pools"),
        ),
        ("paper_pools.png", "Held-out accuracy over steps, one local pool and three pools"),
    ),
    Row(
        "edf",
        "EDF when long tasks are hard",
        "EDF came after the paper: its prototype compares `edf` with `fifo`, the order of arrival, which is "
        "`sweep` here. The two take equally long, and `edf` drops fewer groups. `fifo` here waits for slow "
        "groups and drops none. The quickstart's model learns sums, and the hard half takes six times as "
        "long. Training is real, with three seeds, and the clock is virtual. All dropped groups are hard.",
        ("long_tasks.py", "--picture", "docs/images/paper_edf.png"),
        (
            ("edf_virtual_s", "Units of time, `edf`"),
            ("sweep_virtual_s", "Units of time, `sweep`"),
            ("edf_dropped_frac", "Groups dropped as stale, `edf`"),
            ("sweep_dropped_frac", "Groups dropped as stale, `sweep`"),
            ("edf_hard_accuracy", "Accuracy on hard tasks, `edf`"),
            ("sweep_hard_accuracy", "Accuracy on hard tasks, `sweep`"),
            ("fifo_hard_accuracy", "Accuracy on hard tasks, `fifo`"),
            ("edf_speedup_vs_fifo", "Speedup of `edf` over `fifo`"),
        ),
        ("paper_edf.png", "How long trained and dropped groups were, three samplers"),
    ),
    Row(
        "scaling",
        "Auto-scaling",
        "A [pool that sizes itself](pools.md#pool) is compared with a fixed pool of 11 services, on "
        "the load of the paper. Devices are emulated, and the clock is virtual. The paper saves 0.13 of "
        "all GPU-hours ([details](benchmarks.md#a-pool-that-sizes-itself)). Spot machines at 0.3 of the "
        "price trained 2.11 times the tokens per dollar (measured with commit `91905eb38f`).",
        ("autoscale.py",),
        (
            ("paper_total_saved_frac", "Share of all GPU-hours saved"),
            ("paper_rollout_saved_frac", "Share of the rollout services' GPU-hours saved"),
            ("paper_wall_ratio", "Time divided by that of the fixed pool"),
        ),
        ("autoscale.png", "Services over the share of the time, for each load"),
    ),
)
HEAD = """# The paper's results, in kind

*Written by `make paper`; don't edit.*

The [paper](https://arxiv.org/abs/2605.15565) measured on clusters of GPUs. This page has its results
in kind, and EDF's, on two CPU cores, with emulated devices or tiny models in place of GPUs. Run all of them
with `make paper`, or one with `make paper ROW=NAME`.
"""


def run(row: Row) -> None:
    """Runs a row and records its output. Raises: CalledProcessError if the benchmark fails."""
    load_before = os.getloadavg()[0]
    began_s = time.monotonic()
    argv = [sys.executable, str(ROOT / "benchmarks" / row.command[0]), *row.command[1:]]
    done = subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    *output, last = done.stdout.rstrip("\n").split("\n")
    record = {
        "command": shlex.join(("python", f"benchmarks/{row.command[0]}", *row.command[1:])),
        "date": time.strftime("%Y-%m-%d"),
        "minutes": round((time.monotonic() - began_s) / 60),
        "cores": os.cpu_count(),
        "load_before": round(load_before, 1),
        "figures": json.loads(last),
        "output": [line.rstrip() for line in output],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{row.name}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def section(row: Row) -> str:
    """Returns a row's part of the page, from its recorded result."""
    lines = [f"## {row.title}", "", row.text, ""]
    path = RESULTS / f"{row.name}.json"
    if not path.is_file():
        return "\n".join([*lines, f"Not run yet: `make paper ROW={row.name}`.", ""])
    record = json.loads(path.read_text(encoding="utf-8"))
    minutes = f", {record['minutes']} min on {record['cores']} cores" if record["minutes"] else ""
    figures = record["figures"]
    file, alt = row.picture
    lines += [
        "| Result | Figure |",
        "|---|---|",
        *(f"| {meaning} | {_text(figures[name])} |" for name, meaning in row.figures if name in figures),
        "",
        f"`{record['command']}`, {record['date']}{minutes} "
        f"([all figures](../benchmarks/results/paper/{row.name}.json))",
        "",
        f"![{alt}](images/{file})",
        "",
    ]
    return "\n".join(lines)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return " to ".join(_text(entry) for entry in value)
    return str(value)


def page() -> str:
    """Returns the whole page, from the recorded results."""
    return "\n".join([HEAD, *map(section, ROWS)])


def main(names: list[str]) -> int:
    """Runs rows and writes the page. A row that fails is named at the end, and keeps its old result."""
    failed: list[str] = []
    for row in ROWS:
        if row.name not in names:
            continue
        print(f"== {row.name}: {row.title}", file=sys.stderr, flush=True)
        try:
            run(row)
        except subprocess.CalledProcessError as err:
            failed.append(f"{row.name} (exit status {err.returncode})")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
    for name in failed:
        print(f"failed: {name}; its old result is kept", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [row.name for row in ROWS]
    parser.add_argument("--row", choices=known, help="run only this one (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument(
        "--page", action="store_true", help="run nothing: write the page from recorded results"
    )
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{row.name:16}{row.title}" for row in ROWS))
        sys.exit(0)
    sys.exit(main([] if given.page else [given.row] if given.row else known))
