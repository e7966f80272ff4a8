"""Trainers that wait for each other, for comparison: a barrier between policies, or one after the other.

Every trainer does what its backend does; only when it begins a step is different. What each has done is a
file in a folder that all see.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from astraflow.config import parse_config
from astraflow.host_tensors import HostTensor
from astraflow.protocols import StepResult
from astraflow.trainer.backends.factory import make_backend
from astraflow.trainer.config import TrainConfig
from astraflow.types import Batch

__all__ = ["TurnsBackend", "with_turns"]


class TurnsBackend:
    """A trainer that begins no step before all policies have done as many; those of `after` one more."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        model_dir: str | Path,
        seed: int,
        backend: Mapping[str, Any],
        policies: Sequence[str],
        after: Sequence[str],
        folder: str,
        name: str,
    ) -> None:
        inner = parse_config({**config.model_dump(mode="json"), "backend": dict(backend)}, TrainConfig)
        self._inner = make_backend(inner, model_dir=model_dir, seed=seed)
        self._lead = {policy: int(policy in after) for policy in policies if policy != name}
        self._folder = Path(folder)
        self._name = name

    def train_step(self, batch: Batch) -> StepResult:
        """Waits for its turn, then trains."""
        while any(self._steps_of(name) < batch.step + lead for name, lead in self._lead.items()):
            time.sleep(0.005)
        result = self._inner.train_step(batch)
        (self._folder / f"{self._name}.{batch.step + 1}").touch()
        return result

    def export(self) -> Sequence[HostTensor]:
        """The inner one's."""
        return self._inner.export()

    def save(self, folder: Path) -> None:
        """The inner one's."""
        self._inner.save(folder)

    def load(self, folder: Path) -> None:
        """The inner one's."""
        self._inner.load(folder)

    def _steps_of(self, policy: str) -> int:
        return max((int(path.suffix[1:]) for path in self._folder.glob(f"{policy}.*")), default=0)


def with_turns(
    backend: Mapping[str, Any], name: str, policies: Sequence[str], folder: Path, *, in_order: bool = False
) -> dict[str, Any]:
    """A policy's `train.backend` that waits for the other policies; `in_order`: for those before it to have
    trained the same step, too."""
    args = {
        "backend": dict(backend),
        "policies": list(policies),
        "after": list(policies[: list(policies).index(name)]) if in_order else [],
        "folder": str(folder),
        "name": name,
    }
    return {"use": "turns:TurnsBackend", "args": args}
