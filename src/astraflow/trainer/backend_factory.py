"""Builds the learner of a recipe: its loss with the backend that it names, or a user's own learner."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from astraflow import added
from astraflow.config import Use, load_component
from astraflow.protocols import Engine, Learner, TrainerBackend
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.config import TrainConfig
from astraflow.types.host_tensors import WeightSnapshot

if TYPE_CHECKING:
    from astraflow.trainer.ranks import Ranks

__all__ = ["make_learner"]


def make_learner(
    config: TrainConfig,
    *,
    model_dir: str | Path,
    seed: int = 0,
    states: Path | None = None,
    make_engine: Callable[[WeightSnapshot], Engine] | None = None,
    ranks: "Ranks | None" = None,
    exact: bool = False,
) -> Learner:
    """Makes a learner, and loads its model.

    A user's own backend gets `config`, `model_dir`, `seed` and its args. It is a `TrainerBackend`, or a
    `Learner`, which makes whole steps itself.

    `states`, `make_engine`: see `BackendVariant.make`. `ranks`: the processes that share the batches and the
    model, if there are several. `exact`: logprobs are those of an exact engine, to the last bit; only the
    torch backend supports this. With `auxiliary.offline`, offline groups are mixed into the batches.
    Raises: ConfigError or DataError if the learner cannot be built.
    """
    backend = config.backend
    if isinstance(backend, TorchBackendConfig):
        from astraflow.trainer.ranks import ALONE
        from astraflow.trainer.torch.torch_backend import TorchBackend

        made = TorchBackend(
            config, model_dir=model_dir, seed=seed, ranks=ALONE if ranks is None else ranks, exact=exact
        )
    elif isinstance(backend, Use):
        target = load_component(backend, where="train.backend")
        made = cast(
            "TrainerBackend | Learner", target(config, model_dir=model_dir, seed=seed, **backend.args)
        )
    else:
        made = backend.make(
            config, model_dir=model_dir, seed=seed, states=states, make_engine=make_engine, ranks=ranks
        )
    if isinstance(made, TrainerBackend):  # it has verbs, of which a loss makes steps
        from astraflow.trainer.learner import LossLearner  # it imports torch, which a launcher can do without
        from astraflow.trainer.ranks import ALONE, SlicesBatches

        data_ranks = made.data_ranks if isinstance(made, SlicesBatches) else ALONE
        made = LossLearner(config, made, seed=seed, ranks=data_ranks)
    offline = config.auxiliary.offline
    return made if offline is None else added.MixedLearner(made, offline, seed=seed)
