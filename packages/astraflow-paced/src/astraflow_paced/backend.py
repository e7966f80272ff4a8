"""The `paced` trainer backend: each step takes the time that GPUs would need, and trains nothing.

It serves benchmarks of the system on machines without GPUs. Batches, versions, commits and checkpoints are
real. The published weights are one tensor of the configured size, and each step changes the configured share
of it, so transfers and deltas are as large as configured. Only `paced` engines can serve such weights.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import ConfigError, DataError, TrainingError
from astraflow.protocols import StepResult
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.types import Batch, MetricItem
from astraflow.types.host_tensors import HostTensor
from astraflow_paced.config import PacedBackendConfig

__all__ = ["PacedBackend"]

_log = logging.getLogger(__name__)

_STATE_FILE = "paced.npz"
_TENSOR = "emulated.weight"
_ANY_TOKEN = 2**31 - 1
"""Size of the vocabulary, to which token ids are compared: without a model, any id will do."""
_ONES = 0x3F80
"""1.0 in bfloat16; its lowest 7 bits are the fraction."""


class PacedBackend:
    """Implements `Learner`. Example: `PacedBackend(TrainConfig(backend=PacedBackendConfig()))`."""

    def __init__(self, config: TrainConfig, *, seed: int = 0) -> None:
        """Raises: ConfigError if the recipe asks for something that needs a model."""
        if not isinstance(config.backend, PacedBackendConfig):
            raise ConfigError(f"train.backend.name = {config.backend!r} is not the paced backend")
        if config.auxiliary.kl.coef or config.auxiliary.teacher:
            raise ConfigError("train.auxiliary needs models that score, and train.backend `paced` has none")
        self._backend = config.backend
        self._seed = seed
        self._weights: NDArray[np.uint16] = np.full(self._backend.weights_bytes // 2, _ONES, np.uint16)
        self.num_steps_done = 0
        _log.warning(
            "EMULATED: no model is trained; a step takes %g s and %g s per million tokens, "
            "time runs %g times faster",
            self._backend.step_s,
            self._backend.million_tokens_s,
            self._backend.time_scale,
        )

    def train_step(self, batch: Batch) -> StepResult:
        """Changes the weights, and returns once the emulated time has passed.

        Raises: WireError if the samples are malformed; TrainingError if the batch is not of the step that is
        due.
        """
        began_s = time.perf_counter()
        if batch.step != self.num_steps_done:
            raise TrainingError(
                f"batch of step {batch.step + 1} given, step {self.num_steps_done + 1} is due"
            )
        columns = columns_from_samples(batch.samples, vocab_size=_ANY_TOKEN)
        num_tokens = len(columns.token_ids)
        emulated_s = self._backend.step_s + num_tokens / 1e6 * self._backend.million_tokens_s
        # Flip the lowest bit of some elements, chosen by seed and step.
        rng = np.random.default_rng((self._seed, self.num_steps_done))
        num_changed = round(self._backend.changed_frac * len(self._weights))
        self._weights[rng.choice(len(self._weights), size=num_changed, replace=False)] ^= 1
        self.num_steps_done += 1
        spent_s = time.perf_counter() - began_s
        time.sleep(max(0.0, emulated_s / self._backend.time_scale - spent_s))
        staleness = batch.trainer_version - columns.versions
        return StepResult(
            metrics=(
                MetricItem("num_tokens", float(num_tokens), "sum"),
                MetricItem("token_staleness", float(staleness.mean())),
                MetricItem("emulated_s", emulated_s),
            )
        )

    def export(self) -> Sequence[HostTensor]:
        """A copy of the weights."""
        data = self._weights.astype("<u2").view(np.uint8)
        return (HostTensor(name=_TENSOR, shape=(len(self._weights),), dtype="bfloat16", data=data),)

    def save(self, folder: Path) -> None:
        """Writes weights and step into an existing folder."""
        np.savez(folder / _STATE_FILE, weights=self._weights, num_steps_done=np.int64(self.num_steps_done))

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote. Raises: DataError if the folder does not hold it."""
        try:
            with np.load(folder / _STATE_FILE, allow_pickle=False) as state:
                weights: NDArray[np.generic] = state["weights"]
                num_steps_done = int(state["num_steps_done"])
        except (OSError, ValueError, KeyError) as err:
            raise DataError(f"checkpoint {folder} does not load: {err}") from err
        if weights.shape != self._weights.shape or weights.dtype != self._weights.dtype:
            raise DataError(
                f"checkpoint {folder} holds {weights.nbytes} bytes of weights; expected "
                f"train.backend.weights_bytes = {self._weights.nbytes}"
            )
        self._weights = weights.astype(np.uint16)
        self.num_steps_done = num_steps_done
