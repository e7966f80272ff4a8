"""Makes policies wait for each other, for comparison: their trainers meet at a barrier.

Every trainer does what its backend does; only the beginning or the end of a step is different. Files in a
shared folder record which steps each trainer has done.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from astraflow.config import parse_config
from astraflow.protocols import StepResult, Write
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.config import TrainConfig
from astraflow.types import Batch
from astraflow.types.host_tensors import HostTensor

__all__ = ["TurnsBackend", "with_turns"]


class TurnsBackend:
    """A trainer that doesn't begin a step before all policies have done the same number of steps.

    With `ends_together`, it also doesn't end a step before all have done it. They then publish at the same
    time, and a table of one batch draws the next groups for all of them.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        model_dir: str | Path,
        seed: int,
        backend: Mapping[str, Any],
        policies: Sequence[str],
        folder: str,
        name: str,
        ends_together: bool,
    ) -> None:
        inner = parse_config({**config.model_dump(mode="json"), "backend": dict(backend)}, TrainConfig)
        self._inner = make_learner(inner, model_dir=model_dir, seed=seed)
        self._others = [policy for policy in policies if policy != name]
        self._folder = Path(folder)
        self._name = name
        self._ends_together = ends_together

    def train_step(self, batch: Batch) -> StepResult:
        """Waits for its turn, trains, and waits for the others if necessary."""
        self._wait_for(batch.step)
        result = self._inner.train_step(batch)
        (self._folder / f"{self._name}.{batch.step + 1}").touch()
        if self._ends_together:
            self._wait_for(batch.step + 1)
        return result

    def export(self) -> Iterable[HostTensor]:
        """Exports from the inner backend."""
        return self._inner.export()

    def save(self, folder: Path) -> Write | None:
        """Saves the inner backend."""
        return self._inner.save(folder)

    def load(self, folder: Path) -> None:
        """Loads the inner backend."""
        self._inner.load(folder)

    def _wait_for(self, num_steps: int) -> None:
        """Waits until all others have done the same number of steps."""
        while any(self._steps_of(name) < num_steps for name in self._others):
            time.sleep(0.005)

    def _steps_of(self, policy: str) -> int:
        return max((int(path.suffix[1:]) for path in self._folder.glob(f"{policy}.*")), default=0)


def with_turns(
    backend: Mapping[str, Any], name: str, policies: Sequence[str], folder: Path, *, ends_together: bool
) -> dict[str, Any]:
    """Makes a policy's `train.backend` that waits for the other policies."""
    args = {
        "backend": dict(backend),
        "policies": list(policies),
        "folder": str(folder),
        "name": name,
        "ends_together": ends_together,
    }
    return {"use": "turns:TurnsBackend", "args": args}
