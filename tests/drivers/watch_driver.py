"""A healthy run in which a fault is planted: what the watchdog says, and how soon."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from drivers.system_driver import ROOT, SUMS, Runs, Started, Terminals, astraflow

__all__ = ["NAMED_WITHIN_S", "Scene", "healthy_tasks"]

NAMED_WITHIN_S = 15.0
_HEALTHY_STEPS = 4
_SIGN = "warning ("
_BUSY = "warning (starved_process)"
"""What is said of a healthy service too, on a machine that starves it: that is no fault of the watchdog."""


def healthy_tasks(**reward: object) -> dict[str, object]:
    """Tasks whose rewards differ, whatever the model can do."""
    args = {"args": reward} if reward else {}
    return {
        "sources": {"sums": SUMS},
        "reward": {"use": "planted_faults:reward", **args},
        "extract": "whole",
        "score_timeout_s": 120.0,
    }


@dataclass
class Scene:
    """Where a fault is planted. `flag` is the file that makes a planted part fail."""

    runs: Runs
    terminals: Terminals
    flag: Path

    def start(self, *overrides: str, **sections: object) -> Started:
        """Starts a healthy run of many steps."""
        shutil.copy(ROOT / "tests" / "drivers" / "planted_faults.py", self.runs.folder)
        path = self.runs.recipe()
        usual = {"tasks": healthy_tasks(), "policies": self.policies()}
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | usual | sections))
        return self.runs.start(path, *overrides)

    def policies(
        self, *, table: dict[str, object] | None = None, train: dict[str, object] | None = None
    ) -> dict[str, object]:
        """One policy, which is hardly trained but ends its answers, with changes."""
        return {
            "actor": {
                "model": str(self.runs.models / "actor"),
                "sampling": {"max_tokens": 24, "stop": [*"0123456789+=., "]},
                "table": {"group_size": 4, "groups_per_batch": 4, "max_staleness": 2, **(table or {})},
                "train": {"steps": 100_000, "lr": 1e-4, "checkpoint_every": 100, **(train or {})},
            }
        }

    def until_healthy(self, run: Started) -> None:
        """Reads until some steps are done. Fails if the watchdog said anything."""
        for _ in range(_HEALTHY_STEPS):
            run.read_until("actor step ")
        early = [line for line in run.lines if _SIGN in line and _BUSY not in line]
        assert not early, run.report()

    def check_named(self, run: Started, rule: str, since_s: float) -> str:
        """The line that names the fault: the first thing that the watchdog says, in time, and everywhere."""
        line = self._first_warning(run, since_s + NAMED_WITHIN_S)
        assert f"{_SIGN}{rule})" in line, run.report()
        status = astraflow("status", str(run.run_dir), "--json")
        assert f'"rule": "{rule}"' in status.stdout, status.stdout + status.stderr
        assert f"{rule}: " in (run.run_dir / "logs" / "launcher.log").read_text()
        return line

    def _first_warning(self, run: Started, deadline_s: float) -> str:
        for line in run.output:
            run.lines.append(line)
            late_s = time.monotonic() - deadline_s
            if _SIGN in line and _BUSY not in line:
                assert late_s <= 0, f"{late_s:.1f} s late: {line}"
                return line
            assert late_s <= 1.0, f"nothing was said in time\n{run.report()}"
        pytest.fail(f"the run ended\n{run.report()}")
