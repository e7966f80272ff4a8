"""The backend `own_loop` in a recipe."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from astraflow.config import Use
from astraflow.protocols import Engine, Learner
from astraflow.trainer.backend_config import BackendVariant, TorchBackendConfig
from astraflow.types.host_tensors import WeightSnapshot

if TYPE_CHECKING:
    from astraflow.trainer.config import TrainConfig

__all__ = ["OwnLoopBackendConfig"]


class OwnLoopBackendConfig(BackendVariant):
    """A training loop of your own, written in the verbs of the Tinker API. It decides on `train.loss`, `lr`,
    `denominator`, `minibatches` and `optimizer` itself; these keys are not read."""

    decides_on_loss: ClassVar[bool] = True
    name: Literal["own_loop"] = "own_loop"
    loop: Use
    """A function that is called with a training client and with its own arguments."""
    torch: TorchBackendConfig = TorchBackendConfig()
    """Device and precision that the verbs are computed with."""

    @property
    def computes_with(self) -> TorchBackendConfig:
        """What computes the verbs."""
        return self.torch

    def make(
        self,
        train: "TrainConfig",
        *,
        model_dir: str | Path,
        seed: int,
        states: Path | None,
        make_engine: Callable[[WeightSnapshot], Engine] | None,
    ) -> Learner:
        """The learner of the policy whose `train` section this is part of, with the model loaded."""
        from astraflow.addons.tinker.own_loop import OwnLoopLearner

        return OwnLoopLearner(
            train, self, model_dir=model_dir, seed=seed, states=states, make_engine=make_engine
        )
