"""A real run in bad weather: kill -9 every few seconds, links that slow down and break, services on the move.

    loop      consumes                      produces                                  woken by
    kill      run.json, joined services     kill -9 of one of them                    every 10 to 15 s
    pool      the weather's random state    `astraflow join` through the bad network, every 8 to 20 s
                                            or SIGINT to one that joined
    weather   see `bad_network`

Whoever was killed may come back to work before it is chosen too often: a machine that takes a minute to start
a process would else only start processes. The run itself is the quickstart with an environment that takes its
time: at most `_MOST_JOINED + 1` rollout services of 128 episodes each make the run as long as its pauses say,
however fast the machine is.

    PYTHONPATH=tests python -m drivers.chaos_driver FOLDER [--pause 5.0] [--seed 0] [--pace 1.0]

A pace of 3 stretches all intervals threefold, for a machine that is busy with other work.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from astraflow.dataflow.core.commands import FateDecided
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import events_of
from drivers.bad_network import BadNetwork
from drivers.kill_driver import tail, wrong_figures
from drivers.system_driver import ROOT, astraflow, environment

__all__ = ["ChaosOutcome", "run_in_chaos"]

_log = logging.getLogger(__name__)

NUM_STEPS, GROUPS_PER_BATCH = 100, 64
_MOST_JOINED = 3
_KILL_EVERY_S = (10.0, 15.0)
_CHANGE_EVERY_S = (8.0, 20.0)
_MOST_KILLS = 3
"""Most kills of one process before it works again; the launcher gives up after 6."""
_GONE_S = 20.0


@dataclass
class ChaosOutcome:
    """How the run ended, what was done to it, and what is wrong."""

    run_dir: Path
    kills: Counter[str] = field(default_factory=Counter[str])
    """By service; those that joined count as `joined`."""
    num_joined: int = 0
    num_removed: int = 0
    num_cuts: int = 0
    num_slowed: int = 0
    num_acknowledged: int = 0
    exit_code: int = -1
    wall_s: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    problems: list[str] = field(default_factory=list[str])

    @property
    def num_kills(self) -> int:
        """All of them."""
        return self.kills.total()

    def row(self) -> str:
        """One line with every figure."""
        names = ("heldout_after", "staleness_max", "staleness_bound", "audit_ok")
        told = ", ".join(f"{name} {self.summary.get(name)}" for name in names)
        redone = sum(policy["redone_steps"] for policy in self.summary.get("policies", ()))
        return (
            f"exit {self.exit_code} after {self.wall_s:.0f} s, {self.num_kills} kills ({dict(self.kills)}), "
            f"{self.num_joined} joined, {self.num_removed} removed, {self.num_cuts} requests cut, "
            f"{self.num_slowed} slowed, {self.num_acknowledged} episodes acknowledged on bad links, "
            f"redone {redone}, {told}"
        )

    def report(self) -> str:
        """All of it, with what the processes printed last."""
        paths = [*self.run_dir.parent.glob("*.out"), *sorted((self.run_dir / "logs").glob("*"))]
        texts = [f"{path.name}:\n{tail(path)}" for path in paths]
        return "\n".join([self.row(), *(f"PROBLEM: {text}" for text in self.problems), *texts])


def run_in_chaos(
    model: Path, folder: Path, *, seed: int, pause_s: float, deadline_s: float, pace: float = 1.0
) -> ChaosOutcome:
    """Trains the quickstart in `folder`, whose every episode pauses `pause_s`; judges the run.

    A run that takes longer than `deadline_s` is ended; the outcome says so. Its figures are logged.
    """
    outcome = asyncio.run(_Chaos(model, folder, seed, pause_s, pace).run(deadline_s))
    _log.info("%s", outcome.row())
    return outcome


class _Chaos:
    def __init__(self, model: Path, folder: Path, seed: int, pause_s: float, pace: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / "drivers" / "unhurried.py", folder)
        self._folder, self._run_dir = folder, folder / "run"
        recipe = folder / "unhurried.yaml"
        recipe.write_text(
            f"extends: {ROOT / 'recipes' / 'quickstart.yaml'}\n"
            f"workflow: {{use: 'unhurried:unhurried', args: {{pause_s: {pause_s}}}}}\n"
            "dataflow: {snapshot_every: 3000}\n"
        )
        self._argv = [
            *(
                sys.executable,
                "-m",
                "astraflow.cli.main",
                "run",
                str(recipe),
                f"policies.actor.model={model}",
            ),
            *("rollout.services=1", "policies.actor.train.checkpoint_every=5", f"seed={seed}"),
            *("--run-dir", str(self._run_dir), "--plain"),
        ]
        self._seed, self._random, self._pace = seed, random.Random(seed), pace
        self._outcome = ChaosOutcome(self._run_dir)
        self._joined: dict[str, subprocess.Popen[bytes]] = {}
        self._leaving: list[subprocess.Popen[bytes]] = []
        self._seen: dict[int, psutil.Process] = {}
        self._idle_kills, self._newest_step = Counter[str](), dict[str, int]()
        self._launcher: subprocess.Popen[bytes]
        self._stack = contextlib.ExitStack()
        self._network: BadNetwork

    async def run(self, deadline_s: float) -> ChaosOutcome:
        """The whole run, judged."""
        began_s = time.monotonic()
        self._launcher = self._opened("launcher", self._argv)
        try:
            async with asyncio.timeout(deadline_s), AsyncExitStack() as stack:
                self._network = BadNetwork(await self._url(), self._seed)
                joined_url = await stack.enter_async_context(self._network.opened())
                loops = [
                    asyncio.create_task(self._every(_KILL_EVERY_S, self._kill), name="kill"),
                    asyncio.create_task(
                        self._every(_CHANGE_EVERY_S, lambda: self._change_pool(joined_url)), name="pool"
                    ),
                ]
                ended = asyncio.create_task(asyncio.to_thread(self._launcher.wait))
                await asyncio.wait({ended, *loops}, return_when=asyncio.FIRST_COMPLETED)
                for loop in loops:
                    if loop.done():
                        loop.result()
                    loop.cancel()
                self._outcome.exit_code = await ended
        except TimeoutError:
            self._outcome.problems.append(f"the run did not end within {deadline_s:.0f} s")
        finally:
            self._outcome.wall_s = time.monotonic() - began_s
            await asyncio.to_thread(self._end_all)
            self._stack.close()
        self._judge()
        return self._outcome

    def _opened(self, name: str, argv: list[str]) -> "subprocess.Popen[bytes]":
        output: IO[bytes] = self._stack.enter_context((self._folder / f"{name}.out").open("wb"))
        return subprocess.Popen(
            argv, cwd=self._folder, env=environment(), stdout=output, stderr=output, start_new_session=True
        )

    async def _url(self) -> str:
        record = self._run_dir / "run.json"
        while not record.exists():
            if self._launcher.poll() is not None:
                raise RuntimeError(f"the run ended at once: {tail(self._folder / 'launcher.out')}")
            await asyncio.sleep(0.1)
        return str(json.loads(record.read_text())["url"])

    async def _every(self, interval_s: tuple[float, float], act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._pace * self._random.uniform(*interval_s))
            self._look()
            await act()

    def _look(self) -> None:
        """Remembers the processes that the run has now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._launcher.pid).children(recursive=True):
                self._seen[process.pid] = process

    # --- what is done to it ---

    async def _kill(self) -> None:
        """Kills one of the services that run now."""
        services = json.loads((self._run_dir / "run.json").read_text())["services"]
        running = {
            entry["name"]: int(entry["pid"])
            for entry in services
            if entry["state"] == "running"
            and int(entry["pid"]) in self._seen
            and self._num_idle_kills(entry["name"]) < _MOST_KILLS
        }
        running |= {name: self._joined[name].pid for name in self._working()}
        if not running:
            return
        name = self._random.choice(sorted(running))
        with contextlib.suppress(ProcessLookupError):  # it ended this moment
            os.kill(running[name], signal.SIGKILL)
            self._outcome.kills["joined" if name in self._joined else name] += 1
            self._idle_kills[name] += name not in self._joined

    def _num_idle_kills(self, name: str) -> int:
        """Kills of a process of the launcher since it last did its work, as the launcher counts: to do a step
        again is none, or a trainer that always fails at the next one would be restarted forever."""
        logs = self._run_dir / "logs"
        log = (logs / f"{name}.log").read_bytes().rpartition(b" starts\n")[2]
        steps = re.findall(rb" step (\d+) is version ", (logs / "trainer-actor.log").read_bytes())
        step = max(map(int, steps), default=0)
        if b"serves version" in log if name == "rollout-0" else step > self._newest_step.get(name, 0):
            self._newest_step[name], self._idle_kills[name] = step, 0
        return self._idle_kills[name]

    def _working(self) -> list[str]:
        """Services that joined, and whose episodes have come."""
        return sorted(
            name for name, p in self._joined.items() if p.poll() is None and name in self._network.workers
        )

    async def _change_pool(self, url: str) -> None:
        """Adds a service, or asks one to leave."""
        for name, process in [*self._joined.items()]:
            if process.poll() is not None:
                del self._joined[name]
        is_full, is_empty = len(self._joined) >= _MOST_JOINED, not self._joined
        if is_empty or (not is_full and self._random.random() < 0.65):
            self._outcome.num_joined += 1
            name = f"far-{self._outcome.num_joined}"
            argv = [
                sys.executable,
                "-m",
                "astraflow.cli.main",
                "join",
                url,
                "--name",
                name,
                "--allow",
                "unhurried",
            ]
            self._joined[name] = self._opened(name, argv)
        else:
            process = self._joined.pop(self._random.choice(sorted(self._joined)))
            process.send_signal(signal.SIGINT)
            self._leaving.append(process)
            self._outcome.num_removed += 1

    # --- the end ---

    def _end_all(self) -> None:
        """Ends what still runs. Joined services end by themselves, since the run is over."""
        if self._launcher.poll() is None:
            self._launcher.kill()
            self._launcher.wait()
        for process in (*self._joined.values(), *self._leaving):
            try:
                process.wait(timeout=_GONE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _judge(self) -> None:
        outcome, problems = self._outcome, self._outcome.problems
        outcome.num_cuts, outcome.num_slowed = self._network.num_cuts, self._network.num_slowed
        outcome.num_acknowledged = len(self._network.accepted)
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=_GONE_S)
        left = [p.pid for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if left:
            problems.append(f"{len(left)} processes still run after the run ended: {left}")
        if outcome.exit_code != 0:
            problems.append(f"exit code {outcome.exit_code}")
        if not (self._run_dir / "summary.json").is_file():
            problems.append("there is no summary.json")
            return
        outcome.summary = json.loads((self._run_dir / "summary.json").read_text())
        problems += wrong_figures(outcome.summary)
        audited = astraflow("audit", str(self._run_dir))
        if audited.returncode != 0:
            problems.append(f"astraflow audit: {audited.stdout}{audited.stderr}")
        problems += self._trained_twice() + self._lost()

    def _fates(self) -> dict[int, tuple[str, int]]:
        """Group -> its fate, and the step that trained it: of closed groups, and of those in the log."""
        with JournalReader(self._run_dir / "journal") as reader:
            fates = {row.group_id: (row.fate, row.step) for row in reader.fates()}
            for record in reader.records():
                for event in events_of(record, FateDecided):
                    fates[event.group_id] = (event.fate, event.step)
        return fates

    def _trained_twice(self) -> list[str]:
        """Every step has as many trained groups of its own as a batch holds."""
        by_step = Counter(step for fate, step in self._fates().values() if fate == "trained")
        return [
            f"step {step} trained {by_step[step]} groups that no other step trained, not {GROUPS_PER_BATCH}"
            for step in range(NUM_STEPS)
            if by_step[step] != GROUPS_PER_BATCH
        ]

    def _lost(self) -> list[str]:
        """What is wrong with episodes that were acknowledged through the bad network: none may be asked for
        again, and each of their groups must have a fate."""
        problems, fates = list[str](), self._fates()
        for (group, episode), leases in self._network.accepted.items():
            if len(leases) > 1:
                problems.append(f"episode {group}.{episode} was accepted as {' and '.join(sorted(leases))}")
            if not group.startswith("e") and int(group) not in fates:
                problems.append(f"episode {group}.{episode} was acknowledged; its group has no fate")
        return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "quickstart")
    parser.add_argument("--pause", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=1.0)
    parser.add_argument("--deadline", type=float, default=3600.0)
    args = parser.parse_args()
    lengths = {"pause_s": args.pause, "pace": args.pace, "deadline_s": args.deadline}
    found = run_in_chaos(args.model.resolve(), args.folder.resolve(), seed=args.seed, **lengths)
    sys.stdout.write(found.report() if found.problems else found.row() + "\n")
    sys.exit(bool(found.problems))
