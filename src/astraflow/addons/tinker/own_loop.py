"""A learner whose steps are run by the user's own loop, which calls the verbs of `client`.

    trainer's thread                                 loop's thread (the user's function)
    train_step(batch) --queue--> batches()           verbs, in the client's own thread
                      <-future-- save_weights_for_sampler()

The trainer around it does the same as for every backend: session, publication, commit, and checkpoints. The
loop starts with the first batch and runs through all steps. After a restart, it starts again from its first
line, with the batch of the checkpoint's step. If the loop fails or returns before the run's last step, the
trainer fails.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from astraflow.addons.tinker.client import TrainingClient
from astraflow.config import Use, check_args, load_attr
from astraflow.errors import ConfigError, TrainingError
from astraflow.losses.config import AuxiliaryConfig
from astraflow.protocols import Engine, StepResult, Write
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.step_run import metric_items
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import Batch
from astraflow.types.host_tensors import HostTensor, WeightSnapshot

__all__ = ["OwnLoopLearner"]

logger = logging.getLogger(__name__)
_WHERE = "train.backend.loop"
"""Path of the loop in the recipe, for messages."""


class OwnLoopLearner:
    """Implements `Learner` for the trainer, and `RunSteps` for the loop's client.

    Example: `OwnLoopLearner(config, loop, torch, model_dir=folder)`, where `loop.use` names a function.
    """

    def __init__(
        self,
        config: TrainConfig,
        loop: Use,
        torch: TorchBackendConfig,
        *,
        model_dir: str | Path,
        seed: int = 0,
        states: Path | None = None,
        make_engine: Callable[[WeightSnapshot], Engine] | None = None,
    ) -> None:
        """Raises: ConfigError if the loop isn't found, or if the recipe sets auxiliary losses.

        With this backend, the loop itself names all of its losses.
        """
        if config.auxiliary.model_copy(update={"offline": None}) != AuxiliaryConfig():
            raise ConfigError(
                "train.auxiliary adds to the recipe's loss; with own_loop the loop names its losses"
            )
        self._num_steps = config.steps
        self._loop: Callable[..., object] = load_attr(loop.use, where=f"{_WHERE}.use")
        self._args: dict[str, Any] = loop.args
        check_args(self._loop, self._args, where=f"{_WHERE}.args")
        inner = config.model_copy(update={"backend": torch})
        self.num_steps_done = 0
        self._inner = TorchBackend(inner, model_dir=model_dir, seed=seed)
        self._client = TrainingClient(
            self._inner, model_dir=model_dir, states=states, make_engine=make_engine, run=self
        )
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._finished: Future[StepResult] = Future()
        """Done when the loop has ended the current step."""
        self._end: Future[None] | None = None
        """Done when the loop has returned or failed; None before it starts."""
        self._exported: Sequence[HostTensor] | None = None
        """The weights at the end of the last step; None before the first step ends."""

    # --- the trainer's side ---

    def train_step(self, batch: Batch) -> StepResult:
        """Hands the batch to the loop and waits until the loop has ended the step.

        In the last step, it also waits until the loop returns.

        Raises: TrainingError if the loop returns too early or the batch belongs to another step; any error of
        the loop.
        """
        if batch.step != self.num_steps_done:
            raise TrainingError(
                f"batch of step {batch.step + 1} given, step {self.num_steps_done + 1} is due"
            )
        self._finished = Future()
        self._batches.put(batch)
        if self._end is None:
            self._end = Future()
            threading.Thread(target=self._run_loop, args=(self._end,), name="own-loop", daemon=True).start()
        either: set[Future[Any]] = {self._finished, self._end}
        wait(either, return_when=FIRST_COMPLETED)
        if not self._finished.done():
            self._end.result()  # raises the error of the loop
            raise TrainingError(
                f"{_WHERE} returned in step {batch.step + 1} of {self._num_steps}: go through "
                "client.batches()"
            )
        self.num_steps_done += 1
        if self.num_steps_done == self._num_steps:
            self._batches.put(None)  # ends `client.batches()`
            self._end.result()
        return self._finished.result()

    def export(self) -> Sequence[HostTensor]:
        """Returns the weights at the end of the last step or, before the first one, the current weights."""
        if self._exported is None:
            return tuple(self._client.call(self._inner.export).result())
        return self._exported

    def save(self, folder: Path) -> Write:
        """Copies model, optimizer, random state, and step. The state of the loop itself isn't saved."""
        num = self.num_steps_done
        return self._client.call(lambda: self._inner.save(folder, num_steps_done=num)).result()

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote.

        Raises: DataError if the folder doesn't fit the model.
        """
        self.num_steps_done = self._client.call(lambda: self._inner.load(folder)).result()

    # --- the loop's side ---

    def take(self) -> Batch | None:
        """Waits for the next step's batch and returns it; None after the last step."""
        return self._batches.get()

    def finish(self, tensors: Sequence[HostTensor], metrics: Mapping[str, float]) -> None:
        """Ends the step with these weights, and lets the trainer's thread continue."""
        self._exported = tensors
        self._finished.set_result(StepResult(metric_items(metrics)))

    def _run_loop(self, end: "Future[None]") -> None:
        try:
            self._loop(self._client, **self._args)
        except Exception as err:  # the trainer waits for the loop, so it must learn of any error
            logger.exception("%s failed", _WHERE)
            end.set_exception(err)
        else:
            end.set_result(None)
