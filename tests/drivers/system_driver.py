"""Runs `astraflow` as its users do: commands, processes, their lines, their files."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, TextIO

import psutil
import pytest
import yaml

from drivers.warm_programs import ROOT, Program, WarmPrograms, environment

SUMS = {
    "name": "reasoning_gym",
    "dataset": "basic_arithmetic",
    "split": "train",
    "size": 2000,
    "args": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]},
}


_COMMAND = ("-m", "astraflow.cli.main")
WARM = WarmPrograms()
"""The programs of this worker's tests."""


def astraflow(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """A command that ends by itself."""
    return WARM.run([*_COMMAND, *arguments], environment())


def python(*argv: str, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """A script or code, with its arguments."""
    return WARM.run(argv, environment(), folder)


def start_command(arguments: Sequence[str], out: int) -> Program:
    """Starts a command, whose output and errors go to `out`."""
    with open(os.devnull, "rb") as nothing:
        return WARM.start([*_COMMAND, *arguments], environment(), [nothing.fileno(), out, out])


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills, once in a session however many workers ask for it; the others wait."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, is_made = shared / f"once-{name}", shared / f"once-{name}.made"
    with (shared / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # what a try left that failed
            folder.mkdir()
            make(folder)
            is_made.touch()
    return folder


def init_models(folder: Path, *names: str, steps: int) -> None:
    """Makes tiny models in a folder, with a few steps of warm start. The model `actor` is of the quickstart's
    spec, any other of the spec of its name."""
    for name in names:
        spec = f"recipes/models/{'quickstart' if name == 'actor' else name}.yaml"
        done = astraflow("model", "init", spec, f"warm_start.steps={steps}", "--out", str(folder / name))
        assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Place:
    """Where a run's launcher is started: the command `astraflow` there, and its environment."""

    command: tuple[str, ...] = (sys.executable, *_COMMAND)
    env: dict[str, str] = field(default_factory=environment)

    def start(self, arguments: Sequence[str], out: int) -> Program:
        """Starts a command as a new process there."""
        return subprocess.Popen(
            [*self.command, *arguments],
            cwd=ROOT,
            env=self.env,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


@dataclass
class Started:
    """A run in its own process; its lines are read as they come."""

    process: Program
    output: TextIO
    run_dir: Path
    lines: list[str] = field(default_factory=list)

    def read_until(self, text: str) -> str:
        """The first line with `text`. Fails if the output ends before."""
        for line in self.output:
            self.lines.append(line)
            if text in line:
                return line
        pytest.fail(f"the run ended without {text!r}:\n{self.report()}")

    def finish(self) -> int:
        """Its exit code, after the rest of its lines."""
        self.lines += list(self.output)
        return self.process.wait()

    def pid_of(self, service: str) -> int:
        """The process id of a service, as `run.json` says."""
        record = json.loads((self.run_dir / "run.json").read_text())
        return next(int(s["pid"]) for s in record["services"] if s["name"] == service)

    def pids(self) -> list[int]:
        record = json.loads((self.run_dir / "run.json").read_text())
        return [int(service["pid"]) for service in record["services"] if service["pid"]]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def report(self) -> str:
        """What it printed, and the ends of its logs."""
        logs = [f"== {p.name}\n{p.read_text()[-1500:]}" for p in sorted((self.run_dir / "logs").glob("*"))]
        return "".join(self.lines) + "\n".join(logs)


def url_of(run: Started) -> str:
    """Where the run's dataflow answers; nothing is printed before somebody joins, so `run.json` says it."""
    record, deadline = run.run_dir / "run.json", time.monotonic() + 60
    while True:
        url = str(json.loads(record.read_text())["url"]) if record.exists() else ""
        with contextlib.suppress(OSError, HTTPException):
            if url:
                urllib.request.urlopen(f"{url}/v1/health", timeout=5).close()
                return url
        assert time.monotonic() < deadline, run.report()
        time.sleep(0.2)


class Terminals:
    """Commands that run side by side, each with its own output file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[Program] = []

    def start(self, *arguments: str) -> Program:
        with self._next_log().open("wb") as out:
            self._running.append(start_command(arguments, out.fileno()))
        return self._running[-1]

    def start_program(self, *argv: str) -> Program:
        with self._next_log().open("wb") as out:
            self._running.append(subprocess.Popen(argv, cwd=ROOT, env=environment(), stdout=out, stderr=out))
        return self._running[-1]

    def _next_log(self) -> Path:
        return self._folder / f"terminal-{len(self._running)}.log"

    def texts(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()}" for p in sorted(self._folder.glob("terminal-*.log")))

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()


@dataclass
class Runs:
    """Starts runs of small recipes; ends what a test left running."""

    models: Path
    folder: Path
    started: list[Started] = field(default_factory=list)

    def recipe(
        self, *, policies: tuple[str, ...] = ("actor",), steps: int = 5, services: int = 1, **sections: object
    ) -> Path:
        """A recipe file whose episodes take milliseconds."""
        table = {"group_size": 4, "groups_per_batch": 4, "max_staleness": 2}
        train = {"steps": steps, "lr": 1e-4, "checkpoint_every": 2}
        recipe: dict[str, object] = {
            "name": "small",
            "tasks": {"sources": {"sums": SUMS}, "reward": {"name": "exact"}, "extract": "after_equals"},
            "policies": {
                name: {
                    "model": str(self.models / name),
                    "sampling": {"max_tokens": 8},
                    "table": table,
                    "train": train,
                }
                for name in policies
            },
            "rollout": {
                "services": services,
                "max_episodes": 16,
                "engine": {"name": "torch", "max_context": 48},
            },
            "dataflow": {"lease_timeout_s": 4.0, "heartbeat_s": 0.5},
        }
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe | sections))
        return path

    def start(self, recipe: Path, *arguments: str, name: str = "run", place: Place | None = None) -> Started:
        """Starts `astraflow run` with plain lines: as a new process at a place, or a forked one on this
        machine."""
        run_dir = self.folder / name
        argv = ["run", str(recipe), *arguments, "--run-dir", str(run_dir), "--plain"]
        read_fd, out = os.pipe()
        try:
            process = start_command(argv, out) if place is None else place.start(argv, out)
        finally:
            os.close(out)
        run = Started(process, os.fdopen(read_fd), run_dir)
        self.started.append(run)
        return run

    def close(self) -> None:
        for run in self.started:
            if run.process.poll() is None:
                run.process.send_signal(signal.SIGKILL)
            run.process.wait()
            run.output.close()


def wait_gone(pids: list[int], *, timeout_s: float) -> list[int]:
    """Those of these processes that still run after the timeout."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for taken in sockets:
            taken.bind(("127.0.0.1", 0))
        return [int(taken.getsockname()[1]) for taken in sockets]


def service_of(run: Started, name: str) -> dict[str, Any]:
    """A process of the run, as `run.json` says."""
    record = json.loads((run.run_dir / "run.json").read_text())
    return next(service for service in record["services"] if service["name"] == name)


def wait_until(run: Started, is_so: Callable[[], bool], *, timeout_s: float) -> None:
    """Waits for something that no line of the run tells."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if run.process.poll() is not None:
            run.finish()
            pytest.fail(f"the run ended:\n{run.report()}")
        assert time.monotonic() < deadline, run.report()
        time.sleep(0.2)


def wait_for_nothing(left_over: Callable[[], list[str]], *, timeout_s: float) -> None:
    """Waits until a cluster holds nothing any more. Fails with what is left."""
    deadline = time.monotonic() + timeout_s
    while (left := left_over()) and time.monotonic() < deadline:
        time.sleep(0.3)
    assert left == []


def places_of(run: Started, service: str) -> list[str]:
    """The machines or nodes that a service was started on, one after the other, as its gathered log says."""
    path = run.run_dir / "logs" / f"{service}.log"
    text = path.read_text() if path.exists() else ""
    return re.findall(r"^--- on (?:machine|node) (\S+)$", text, re.MULTILINE)


def interrupt(run: Started) -> int:
    """Ctrl-C; returns the exit code."""
    os.kill(run.process.pid, signal.SIGINT)
    return run.finish()


def num_steps(run: Started) -> int:
    """Committed steps, as the run's own file says; the lines that are printed leave some out."""
    path = run.run_dir / "metrics.jsonl"
    return path.read_text().count('"kind":"step"') if path.exists() else 0


def own_address() -> str:
    """An address of this machine that is not loopback."""
    found = [a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family == 2]
    return next((address for address in found if not address.startswith("127.")), "")
