"""A run folder with a recipe that names trackers, whose rows a test writes as a run does."""

import sys
from pathlib import Path
from typing import Any

from astraflow.addons.trackers.tracking import Trackers
from astraflow.config import parse_config
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.report.metrics_log import MetricsLog
from astraflow.types import EvalRecord, MetricItem, StepRecord

__all__ = ["TESTS", "TrackedFolder", "example", "key_of", "make_eval", "make_step"]

TESTS = str(Path(__file__).parents[1])
"""Where `drivers.tracker_examples` is found."""


def make_step(step: int, policy: str = "actor") -> StepRecord:
    """A step with a loss and a metric of its episodes."""
    return StepRecord(
        policy=policy, step=step, version=step + 1, at_s=1_700_000_000.0 + step, reward_mean=0.5,
        staleness_mean=0.0, staleness_max=0, num_groups=1, num_samples=2, num_trained_tokens=3,
        num_discarded_groups=0,
        metrics=(MetricItem("loss", 1.0 / (step + 1)), MetricItem("episode/turns", 2.0)),
    )  # fmt: skip


def make_eval(step: int, score: float | None = 0.75) -> EvalRecord:
    """An evaluation with a score, or without."""
    return EvalRecord(
        policy="actor", version=step, step=step, eval_set="heldout", num_tasks=1, num_samples=1, num_failed=0,
        score_mean=score, score_stderr=0.0, at_s=1_700_000_000.5 + step, metrics=(MetricItem("pass@1", 0.8),),
    )  # fmt: skip


class TrackedFolder:
    """Writes steps and evaluations to a run folder, with its trackers beside.

    Example: `with tracked.trackers() as trackers: tracked.write(make_step(0))`.
    """

    def __init__(self, path: Path, *trackers: object, python: str = sys.executable) -> None:
        self.folder = RunFolder(path)
        self.folder.create()
        self.notes: list[str] = []
        self._python = python
        self.name(*trackers)

    def name(self, *trackers: object) -> None:
        """Names these trackers in the recipe, as a resume with another recipe does."""
        mapping = {
            "name": "demo",
            "tasks": {"sources": {"train": {"name": "jsonl", "path": "tasks.jsonl"}}},
            "policies": {"actor": {"model": "models/tiny"}},
            "trackers": list(trackers),
        }
        self.recipe = parse_config(mapping, Recipe)
        self.folder.save_recipe(self.recipe)

    def start(self, *, longest_silence_s: float = 60.0) -> None:
        """What a start of the run does."""
        self._log = MetricsLog(self.folder.metrics)
        self._trackers = Trackers(
            self.recipe,
            self.folder,
            self.notes.append,
            module_path=(TESTS,),
            python=self._python,
            longest_silence_s=longest_silence_s,
        )
        self._trackers.start()

    def write(self, *records: StepRecord | EvalRecord) -> None:
        """What a run does with new records."""
        for record in records:
            self._log.write(record)
            self._trackers.wake()

    def wake(self) -> None:
        """Says that there are new rows."""
        self._trackers.wake()

    def close(self, deadline_s: float = 300.0) -> None:
        """What the end of the run does."""
        self._log.close()
        self._trackers.close(deadline_s)

    def run(self, *records: StepRecord | EvalRecord) -> None:
        """A whole start of the run."""
        self.start()
        self.write(*records)
        self.close()

    def kept(self, key: str, name: str) -> list[str]:
        """The lines of a file that a tracker keeps."""
        path = self.folder.trackers / key / name
        return path.read_text().splitlines() if path.exists() else []

    def log_of(self, key: str) -> str:
        """The log of a tracker's process."""
        return (self.folder.logs / f"tracker-{key}.log").read_text()


def example(name: str, **args: Any) -> dict[str, object]:
    """One of the trackers of `tracker_examples`, as a recipe names it."""
    return {"name": "use", "use": f"drivers.tracker_examples:{name}", "args": args}


def key_of(name: str) -> str:
    """The key of such a tracker."""
    return f"drivers.tracker_examples-{name}"
