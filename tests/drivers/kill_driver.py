"""Runs the real quickstart and kills parts of it (SIGKILL) at seeded moments; says how the run ended.

    driver (one event loop)
    watches   steps, versions: long-polls of the dataflow    -> when to kill
    reads     run.json                                       -> which process
    starts    `astraflow run`, again after the launcher died -> exit code

A moment is a number of committed steps and a fraction of a second after that commit. `trainer after
publishing` is a moment of its own: the trainer is frozen as soon as the version of a checkpointed step is
listed; if its step is not committed yet it is killed there, else it goes on and the next such step is tried.
Whether the kill hit is read from what was committed later: the version died with its trainer.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import UnavailableError
from astraflow.service.client import ServiceClient
from astraflow.types import StepRecord
from drivers.system_driver import ROOT, astraflow, environment

__all__ = ["TARGETS", "WINDOW", "Kill", "Outcome", "run_with_kills", "tail", "wrong_figures"]

_log = logging.getLogger(__name__)

WINDOW = "trainer after publishing"
_PROCESSES = {
    "trainer": "trainer-actor",
    WINDOW: "trainer-actor",
    "publisher": "publisher-actor",
    "rollout-0": "rollout-0",
    "rollout-1": "rollout-1",
    "dataflow": "dataflow",
    "launcher": "",
}
TARGETS = tuple(_PROCESSES)

_RECIPE = "recipes/quickstart.yaml"
_NUM_STEPS = 100
_CHECKPOINT_EVERY = 10
_LAST_KILL = 94
"""Steps committed at the latest planned kill: before the next-to-last commit, whatever the delay."""
_LONGEST_DELAY_S = 0.6
"""About a step."""
_PATIENCE_S = 5.0
"""Between two looks at the launcher while the dataflow does not answer."""
_GONE_S = 15.0
_LEAST_HELDOUT = 0.80


@dataclass(frozen=True)
class Kill:
    """One kill that happened."""

    target: str
    num_committed: int
    """Steps that were committed when it fell."""
    num_frozen: int = 0
    """How often the trainer was frozen in the window, the last time for good."""


@dataclass
class Outcome:
    """How a run ended, and what is wrong with that."""

    run_dir: Path
    seed: int
    kills: list[Kill] = field(default_factory=list[Kill])
    exit_code: int = -1
    wall_s: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    problems: list[str] = field(default_factory=list[str])

    @property
    def redone_steps(self) -> int:
        """Steps that a restarted trainer did again."""
        return sum(policy["redone_steps"] for policy in self.summary.get("policies", ()))

    def row(self) -> str:
        """One line with every figure."""
        kills = ", ".join(f"{kill.target} @{kill.num_committed}" for kill in self.kills)
        figures = {
            name: self.summary.get(name)
            for name in ("heldout_after", "staleness_max", "staleness_bound", "audit_ok", "rl_wall_s")
        }
        told = ", ".join(f"{name} {value}" for name, value in figures.items())
        return (
            f"seed {self.seed}: {kills}: exit {self.exit_code}, {told}, redone {self.redone_steps}, "
            f"{self.wall_s:.0f} s"
        )

    def report(self) -> str:
        """All of it, with what the run printed and the ends of its logs."""
        printed = self.run_dir.with_suffix(".out")
        texts = [
            f"{path.name}:\n{tail(path)}" for path in (printed, *sorted((self.run_dir / "logs").glob("*")))
        ]
        return "\n".join([self.row(), *(f"PROBLEM: {text}" for text in self.problems), *texts])


def run_with_kills(
    model: Path, run_dir: Path, targets: Sequence[str], *, seed: int, deadline_s: float
) -> Outcome:
    """Runs the quickstart in `run_dir` and kills each target once, at moments that `seed` decides.

    A run that takes longer than `deadline_s` is ended; the outcome says so. Its figures are logged.
    """
    outcome = asyncio.run(_Driver(model, run_dir, targets, seed).run(deadline_s))
    _log.info("%s", outcome.row())
    return outcome


class _EndedEarlyError(Exception):
    """The launcher ended by itself before all kills."""


class _Driver:
    def __init__(self, model: Path, run_dir: Path, targets: Sequence[str], seed: int) -> None:
        self._argv = [
            *(sys.executable, "-m", "astraflow.cli.main", "run", _RECIPE, f"policies.actor.model={model}"),
            *(f"seed={seed}", "--run-dir", str(run_dir), "--plain"),
        ]
        self._run_dir, self._targets = run_dir, targets
        self._random = random.Random(f"{seed} {', '.join(targets)}")
        self._outcome = Outcome(run_dir, seed)
        self._seen: dict[int, psutil.Process] = {}
        """Every process that the run was seen to have."""
        self._launcher: subprocess.Popen[bytes]
        self._client: ServiceClient | None = None
        self._committed: list[StepRecord] = []

    async def run(self, deadline_s: float) -> Outcome:
        """The whole run, judged."""
        began_s = time.monotonic()
        self._run_dir.parent.mkdir(parents=True, exist_ok=True)
        with self._run_dir.with_suffix(".out").open("wb") as output:
            try:
                async with asyncio.timeout(deadline_s):
                    await self._start(output)
                    for step, target in self._plan():
                        await self._kill(target, step, output)
                    self._outcome.exit_code = await asyncio.to_thread(self._launcher.wait)
            except TimeoutError:
                self._outcome.problems.append(f"the run did not end within {deadline_s:.0f} s")
            except _EndedEarlyError as early:
                self._outcome.problems.append(str(early))
                self._outcome.exit_code = self._launcher.returncode
            finally:
                await self._close()
        self._outcome.wall_s = time.monotonic() - began_s
        self._judge()
        return self._outcome

    def _plan(self) -> list[tuple[int, str]]:
        """(steps committed, target) by rising steps; the window comes early enough for further tries."""
        last = {WINDOW: _LAST_KILL // 2}
        return sorted(
            (self._random.randint(1, last.get(target, _LAST_KILL)), target) for target in self._targets
        )

    # --- the run ---

    async def _start(self, output: IO[bytes]) -> None:
        record = self._run_dir / "run.json"
        earlier = record.stat().st_mtime_ns if record.exists() else 0
        self._launcher = self._opened(output)
        while not record.exists() or record.stat().st_mtime_ns == earlier:
            if self._launcher.poll() is not None:
                raise _EndedEarlyError("the run ended at once")
            await asyncio.sleep(0.05)
        if self._client is not None:
            await self._client.close()
        self._client = ServiceClient(str(self._read_record()["url"]), patience_s=_PATIENCE_S)

    def _opened(self, output: IO[bytes]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            self._argv, cwd=ROOT, env=environment(), stdout=output, stderr=output, start_new_session=True
        )

    @property
    def _dataflow(self) -> DataflowClient:
        assert self._client is not None
        return DataflowClient(self._client)

    def _read_record(self) -> dict[str, Any]:
        return json.loads((self._run_dir / "run.json").read_text())

    async def _until_committed(self, num_steps: int) -> None:
        """Returns once so many steps are committed. Raises: _EndedEarlyError."""
        while len(self._committed) < num_steps:
            if self._launcher.poll() is not None:
                raise _EndedEarlyError(
                    f"the run ended after {len(self._committed)} steps, before {num_steps}"
                )
            after = self._committed[-1].step if self._committed else -1
            with contextlib.suppress(UnavailableError):
                self._committed += await self._dataflow.steps("actor", after, 2.0)
            self._look()

    def _check_alive(self, until: str) -> None:
        if self._launcher.poll() is not None:
            raise _EndedEarlyError(f"the run ended after {len(self._committed)} steps, before {until}")

    def _look(self) -> None:
        """Remembers the processes that the run has now."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end this moment
            for process in psutil.Process(self._launcher.pid).children(recursive=True):
                self._seen[process.pid] = process

    async def _pid_of(self, service: str) -> int:
        """The process id of a service that runs."""
        while True:
            self._check_alive(f"{service} runs")
            for entry in self._read_record()["services"]:
                if (
                    entry["name"] == service
                    and entry["state"] == "running"
                    and psutil.pid_exists(entry["pid"])
                ):
                    return int(entry["pid"])
            await asyncio.sleep(0.05)

    # --- kills ---

    async def _kill(self, target: str, step: int, output: IO[bytes]) -> None:
        if target == WINDOW:
            await self._kill_after_publishing(step)
            return
        await self._until_committed(step)
        await asyncio.sleep(self._random.uniform(0.0, _LONGEST_DELAY_S))
        self._look()
        pid = await self._pid_of(_PROCESSES[target]) if _PROCESSES[target] else self._launcher.pid
        os.kill(pid, signal.SIGKILL)
        self._outcome.kills.append(Kill(target, await self._num_committed()))
        if target == "launcher":
            self._launcher.wait()
            orphans = tuple(self._seen.values())
            await self._start(output)  # at once, while they end: as an impatient person does it
            await asyncio.to_thread(self._check_gone, orphans, "the launcher was killed")

    async def _num_committed(self) -> int:
        """Steps in metrics.jsonl, which the launcher writes: the dataflow may be the one that was killed."""
        lines = (self._run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        return sum(line.endswith(b"\n") and b'"kind":"step"' in line for line in lines)

    async def _kill_after_publishing(self, step: int) -> None:
        """Kills the trainer between the publication of a checkpointed step and its commit."""
        first = -(-step // _CHECKPOINT_EVERY) * _CHECKPOINT_EVERY
        num_frozen = 0
        for saved in range(first, _LAST_KILL, _CHECKPOINT_EVERY):
            await self._until_committed(saved - 1)
            if len(self._committed) >= saved:
                continue
            version = self._committed[-1].version + 1
            await self._until_listed(version)
            pid = await self._pid_of("trainer-actor")
            os.kill(pid, signal.SIGSTOP)
            num_frozen += 1
            if not await self._is_in_window(saved):
                os.kill(pid, signal.SIGCONT)
                continue
            os.kill(pid, signal.SIGKILL)
            self._outcome.kills.append(Kill(WINDOW, saved - 1, num_frozen))
            await self._until_committed(saved)
            if self._committed[saved - 1].version > version:
                return
            self._outcome.kills.pop()
        self._outcome.problems.append(
            f"the window was not hit, although the trainer was frozen {num_frozen} times"
        )

    async def _until_listed(self, version: int) -> None:
        newest = -1
        while newest < version:
            self._check_alive(f"version {version}")
            with contextlib.suppress(UnavailableError):
                newest = (await self._dataflow.versions("actor", after=version - 1)).newest

    async def _is_in_window(self, saved: int) -> bool:
        """Whether that step is neither committed nor checkpointed."""
        try:
            (policy,) = (await self._dataflow.status()).policies
        except UnavailableError:
            return False
        checkpoint = self._run_dir / "checkpoints" / "actor" / f"step-{saved:08d}"
        return policy.step < saved and not checkpoint.exists()

    # --- the end ---

    def _check_gone(self, processes: Sequence[psutil.Process], when: str) -> None:
        """Notes which of these processes still live."""
        _, alive = psutil.wait_procs(processes, timeout=_GONE_S)
        left = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if left:
            told = "; ".join(f"{p.pid} {' '.join(p.cmdline())[:120]}" for p in left)
            self._outcome.problems.append(f"{len(left)} processes still run after {when}: {told}")

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._launcher.poll() is None:
            self._launcher.kill()
            self._launcher.wait()

    def _judge(self) -> None:
        outcome, problems = self._outcome, self._outcome.problems
        self._check_gone(tuple(self._seen.values()), "the run ended")
        if outcome.exit_code != 0:
            problems.append(f"exit code {outcome.exit_code}")
        if (self._run_dir / "summary.json").is_file():
            outcome.summary = json.loads((self._run_dir / "summary.json").read_text())
            problems += wrong_figures(outcome.summary)
        else:
            problems.append("there is no summary.json")
        audited = astraflow("audit", str(self._run_dir))
        if audited.returncode != 0:
            problems.append(f"astraflow audit: {audited.stdout}{audited.stderr}")
        missed = set(self._targets) - {kill.target for kill in outcome.kills}
        if missed:
            problems.append(f"not killed: {', '.join(sorted(missed))}")
        late = [kill for kill in outcome.kills if not 1 <= kill.num_committed < _NUM_STEPS - 1]
        problems += [f"{kill} is not between the first and the next-to-last commit" for kill in late]


def wrong_figures(summary: dict[str, Any]) -> list[str]:
    problems: list[str] = []
    if not summary["audit_ok"]:
        problems.append(f"the audit does not hold: {summary['audit_problems']}")
    if summary["heldout_after"] is None or summary["heldout_after"] < _LEAST_HELDOUT:
        problems.append(f"held-out accuracy {summary['heldout_after']}, below {_LEAST_HELDOUT}")
    if summary["staleness_max"] > summary["staleness_bound"]:
        problems.append(f"staleness {summary['staleness_max']} over {summary['staleness_bound']}")
    steps = [policy["steps"] for policy in summary["policies"]]
    if steps != [_NUM_STEPS]:
        problems.append(f"{steps} steps instead of {_NUM_STEPS}")
    return problems


def tail(path: Path) -> str:
    return path.read_text(errors="replace")[-2000:] if path.is_file() else "(nothing)"
