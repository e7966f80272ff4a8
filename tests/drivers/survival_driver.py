"""Runs the real quickstart beside one kind of trouble, and judges how it ended.

A trouble is an async function of the running run. It starts with the run, waits for its own moment, and is
cancelled at the run's end. What a run must show whatever the trouble: exit code 0, all steps, its accuracy,
staleness within the bound, an audit that holds.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import UnavailableError
from astraflow.service.client import ServiceClient
from drivers.kill_driver import tail, wrong_figures
from drivers.system_driver import ROOT, astraflow, environment

__all__ = ["RunningRun", "Survivor", "survive"]

_log = logging.getLogger(__name__)

_RECIPE = ROOT / "recipes" / "quickstart.yaml"
_PATIENCE_S = 5.0


@dataclass
class RunningRun:
    """What a trouble may look at and touch."""

    run_dir: Path
    url: str

    def pid_of(self, service: str) -> int:
        """The process id of a service, as `run.json` says."""
        record = json.loads((self.run_dir / "run.json").read_text())
        return next(int(s["pid"]) for s in record["services"] if s["name"] == service)

    @contextlib.asynccontextmanager
    async def dataflow(self):
        """A client of the run's dataflow."""
        client = ServiceClient(self.url, patience_s=_PATIENCE_S)
        try:
            yield DataflowClient(client)
        finally:
            await client.close()

    async def until_step(self, num_steps: int) -> None:
        """Returns once so many steps are committed."""
        async with self.dataflow() as dataflow:
            after = -1
            while after + 1 < num_steps:
                with contextlib.suppress(UnavailableError):
                    for record in await dataflow.steps("actor", after, 5.0):
                        after = record.step


@dataclass
class Survivor:
    """How a run ended, and what is wrong with that."""

    run_dir: Path
    exit_code: int = -1
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    problems: list[str] = field(default_factory=list[str])

    def report(self) -> str:
        """The figures, what is wrong, and the ends of all logs."""
        logs = [self.run_dir.with_suffix(".out"), *sorted((self.run_dir / "logs").glob("*"))]
        figures = {name: self.summary.get(name) for name in ("heldout_after", "staleness_max", "audit_ok")}
        told = [f"exit code {self.exit_code}, {figures}", *(f"PROBLEM: {text}" for text in self.problems)]
        return "\n".join([*told, *(f"{path.name}:\n{tail(path)}" for path in logs)])

    def log_of(self, name: str) -> str:
        """A log of the run, or `out` for what it printed."""
        path = self.run_dir.with_suffix(".out") if name == "out" else self.run_dir / "logs" / f"{name}.log"
        return path.read_text(errors="replace")


def survive(
    model: Path,
    run_dir: Path,
    *,
    trouble: Callable[[RunningRun], Awaitable[None]] | None = None,
    recipe: Path = _RECIPE,
    overrides: Sequence[str] = (),
    deadline_s: float = 400.0,
) -> Survivor:
    """Runs the quickstart in `run_dir` beside the trouble, and judges it.

    A run that takes longer than `deadline_s` is ended; the result says so. Raises what the trouble raises.
    """
    return asyncio.run(_survive(model, run_dir, trouble, recipe, overrides, deadline_s))


async def _survive(
    model: Path,
    run_dir: Path,
    trouble: Callable[[RunningRun], Awaitable[None]] | None,
    recipe: Path,
    overrides: Sequence[str],
    deadline_s: float,
) -> Survivor:
    survivor = Survivor(run_dir)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "astraflow.cli.main", "run", str(recipe), f"policies.actor.model={model}"]
    with run_dir.with_suffix(".out").open("ab") as output:
        launcher = _started([*argv, *overrides, "--run-dir", str(run_dir), "--plain"], output)
        troubled: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(deadline_s):
                if trouble is not None:
                    troubled = asyncio.create_task(_make_trouble(trouble, run_dir, launcher))
                survivor.exit_code = await asyncio.to_thread(launcher.wait)
        except TimeoutError:
            survivor.problems.append(f"the run did not end within {deadline_s:.0f} s")
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(15)
                launcher.kill()
            if troubled is not None:
                troubled.cancel()
                await asyncio.gather(troubled, return_exceptions=True)
    if troubled is not None and not troubled.cancelled() and (error := troubled.exception()):
        raise error
    _judge(survivor)
    _log.info("%s: exit code %d, %s", run_dir.name, survivor.exit_code, survivor.problems or "survived")
    return survivor


def _started(argv: Sequence[str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    env = {**environment(), "PYTHONPATH": str(ROOT / "tests")}
    return subprocess.Popen(argv, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True)


async def _make_trouble(
    trouble: Callable[[RunningRun], Awaitable[None]], run_dir: Path, launcher: "subprocess.Popen[bytes]"
) -> None:
    record = run_dir / "run.json"
    while not record.exists():
        if launcher.poll() is not None:
            return
        await asyncio.sleep(0.05)
    await trouble(RunningRun(run_dir, str(json.loads(record.read_text())["url"])))


def _judge(survivor: Survivor) -> None:
    if survivor.exit_code != 0:
        survivor.problems.append(f"exit code {survivor.exit_code}")
    if not (survivor.run_dir / "summary.json").is_file():
        survivor.problems.append("there is no summary.json")
        return
    survivor.summary = json.loads((survivor.run_dir / "summary.json").read_text())
    survivor.problems += wrong_figures(survivor.summary)
    audited = astraflow("audit", str(survivor.run_dir))
    if audited.returncode != 0:
        survivor.problems.append(f"astraflow audit: {audited.stdout}{audited.stderr}")
