"""Measures what short commands cost: the CPU seconds of each command and of all processes that it starts.

Two more figures show how low a command can get: `python -c pass`, and importing Typer and Pydantic. `status`
asks a live run without rollout services, so that its processes only wait. The first run of each command isn't
counted, because it fills the file cache.

With `--beside FOLDER`, each command also runs in another checkout with its own `.venv`. The two take turns.

    python benchmarks/commands.py [--repeats 5] [--beside ../other]
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from harness import Runs, report, show_table, tree_cpu_s

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "recipes/quickstart.yaml"
SPEC = "recipes/models/quickstart.yaml"
MODEL = "models/quickstart"
BARS = {
    "version_cpu_s": 0.2,
    "recipes_list_cpu_s": 0.4,
    "status_cpu_s": 0.6,
    "dry_run_cpu_s": 1.0,
    "doctor_cpu_s": 5.0,
}
START_S = 180.0
"""Time within which a run must be waiting for rollout services."""


def commands_of(checkout: Path, run_dir: Path) -> dict[str, list[str]]:
    """Returns what is measured in a checkout, given the folder of a live run."""
    python = [str(checkout / ".venv/bin/python")]
    astraflow = [str(checkout / ".venv/bin/astraflow")]
    return {
        "python_cpu_s": [*python, "-c", "pass"],
        "typer_and_pydantic_cpu_s": [*python, "-c", "import pydantic, typer; pydantic.BaseModel"],
        "version_cpu_s": [*astraflow, "--version"],
        "recipes_list_cpu_s": [*astraflow, "recipes", "list"],
        "status_cpu_s": [*astraflow, "status", str(run_dir)],
        "dry_run_cpu_s": [*astraflow, "run", RECIPE, "--dry-run"],
        "doctor_cpu_s": [*astraflow, "doctor", RECIPE],
    }


def cpu_s(command: list[str], checkout: Path) -> float:
    """Runs a command. Returns its CPU seconds, including those of processes that it waited for."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=checkout, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{output.read().decode()}")
    return used.ru_utime + used.ru_stime


@contextmanager
def waiting_run(checkout: Path, run_dir: Path) -> Iterator[float]:
    """Starts a run without rollout services, and waits until its processes rest.

    Yields the CPU seconds that the command itself, without its services, took until its first line.
    """
    command = [str(checkout / ".venv/bin/astraflow"), "run", RECIPE, "--run-dir", str(run_dir), "--plain"]
    with subprocess.Popen(
        [*command, "rollout.services=0"], cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        assert run.stdout is not None
        run.stdout.readline()
        times = psutil.Process(run.pid).cpu_times()
        try:
            end_s = time.monotonic() + START_S
            used_s = 0.0
            while (now_s := tree_cpu_s(run.pid)) - used_s > 0.1:
                if time.monotonic() > end_s:
                    raise SystemExit(f"the run in {run_dir} did not come to rest within {START_S:g} s")
                used_s = now_s
                time.sleep(2.0)
            yield times.user + times.system
        finally:
            run.send_signal(signal.SIGINT)


def measure(checkouts: Mapping[str, Path], repeats: int) -> dict[str, dict[str, Runs]]:
    """Measures all commands in each checkout, in turns. Returns figures by the name of the checkout."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        commands: dict[str, dict[str, list[str]]] = {}
        found: dict[str, dict[str, Runs]] = {}
        for name, checkout in checkouts.items():
            first_line_s = stack.enter_context(waiting_run(checkout, folder / name))
            commands[name] = commands_of(checkout, folder / name)
            found[name] = {"first_line_cpu_s": Runs((first_line_s,))}
        for figure in commands[next(iter(checkouts))]:
            seconds: dict[str, list[float]] = {name: [] for name in checkouts}
            for _ in range(repeats + 1):
                for name, checkout in checkouts.items():
                    seconds[name].append(cpu_s(commands[name][figure], checkout))
            for name, values in seconds.items():
                found[name][figure] = Runs(tuple(values[1:]))
        return found


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="another checkout with its own .venv")
    options = parser.parse_args()
    checkouts = {"here": ROOT, **({"beside": options.beside.resolve()} if options.beside else {})}
    for checkout in checkouts.values():
        if not (checkout / MODEL).is_dir():
            command = [str(checkout / ".venv/bin/astraflow"), "model", "init", SPEC, "--out", MODEL]
            subprocess.run(command, cwd=checkout, check=True, stdout=sys.stderr)
    found = measure(checkouts, options.repeats)
    rows = [[figure, *(found[name][figure] for name in checkouts)] for figure in found["here"]]
    show_table("CPU seconds", ["figure", *checkouts], rows)
    others = {f"beside_{figure}": runs for figure, runs in found.get("beside", {}).items()}
    report({**found["here"], **others}, at_most=BARS)


if __name__ == "__main__":
    main()
