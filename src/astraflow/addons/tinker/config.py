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
    from astraflow.trainer.ranks import Ranks

__all__ = ["OwnLoopBackendConfig"]


class OwnLoopBackendConfig(BackendVariant):
    """Your own training loop, written with the verbs of the Tinker API.

    The loop itself decides on the loss, learning rate, denominator, minibatches, and optimizer, so the keys
    `loss`, `lr`, `denominator`, `minibatches`, and `optimizer` of `train` are not read.
    """

    decides_on_loss: ClassVar[bool] = True
    name: Literal["own_loop"] = "own_loop"
    loop: Use
    """Function that is called with a training client and the arguments given here."""
    torch: TorchBackendConfig = TorchBackendConfig()
    """Device and precision with which the verbs compute."""

    @property
    def computes_with(self) -> TorchBackendConfig:
        """The backend that computes the verbs."""
        return self.torch

    def make(
        self,
        train: "TrainConfig",
        *,
        model_dir: str | Path,
        seed: int,
        states: Path | None,
        make_engine: Callable[[WeightSnapshot], Engine] | None,
        ranks: "Ranks | None",
    ) -> Learner:
        """Returns the learner of the policy that this `train` section belongs to, with the model loaded."""
        del ranks  # it has one
        from astraflow.addons.tinker.own_loop import OwnLoopLearner

        return OwnLoopLearner(
            train,
            self.loop,
            self.torch,
            model_dir=model_dir,
            seed=seed,
            states=states,
            make_engine=make_engine,
        )
