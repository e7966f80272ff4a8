"""The trainer backend that computes with megatron-core: the policy, and the frozen models that score.

Which samples make a step, and what it minimizes, is decided by `LossLearner`, as for the torch backend. What
both share: packed layouts, checkpoints, and the names and bytes of a version. Not thread-safe.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from astraflow.addons.megatron.config import MegatronBackendConfig
from astraflow.addons.megatron.groups import make_groups
from astraflow.addons.megatron.passes import SplitModel
from astraflow.addons.megatron.trained import TrainedPolicy
from astraflow.errors import ConfigError, DataError, TrainingError, WeightsError
from astraflow.models.export import begin_export
from astraflow.models.loading import DTYPES
from astraflow.protocols import AdamStep, ModelRole, Objective, TrainedRole, Write
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.ranks import Ranks
from astraflow.trainer.torch.side_models import check_same_tokens, frozen_folders
from astraflow.trainer.torch.torch_files import TrainerState, file_tensors, load_state, save_state
from astraflow.types import SampleRules
from astraflow.types.host_tensors import HostTensor
from astraflow.types.token_columns import EXPERTS_STREAM, Columns
from astraflow.weights.manifest import table_of
from astraflow.weights.ranges import elements_of_rank

__all__ = ["MegatronBackend"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
_FILE = "model.safetensors"


class MegatronBackend:
    """Implements `TrainerBackend`."""

    def __init__(self, config: TrainConfig, *, model_dir: Path, ranks: Ranks) -> None:
        """Loads this rank's part of the models.

        Raises: ConfigError if there is no GPU, or a model can't be split; DataError if a folder has none.
        """
        assert isinstance(config.backend, MegatronBackendConfig)
        self._config = config
        self._backend = config.backend
        torch.set_num_threads(config.backend.num_threads)
        self._groups = make_groups(ranks, config.backend)
        self._policy = TrainedPolicy(model_dir, config, self._groups)
        self._frozen: dict[ModelRole, tuple[SplitModel, str, Path]] = {}
        for role, folder in frozen_folders(config, model_dir).items():
            model = SplitModel(folder, config, self._groups)
            check_same_tokens(role, (folder, model.vocab_size), (model_dir, self.vocab_size))
            self._frozen[role] = (model, model.digest(), folder)

    @property
    def data_ranks(self) -> Ranks:
        """The ranks with the other slices of every batch."""
        return self._groups.data

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding table."""
        return self._policy.vocab_size

    @property
    def sample_rules(self) -> SampleRules:
        """The rules for trajectories that the policy's model accepts."""
        return SampleRules(vocab_size=self.vocab_size, refused_streams=(EXPERTS_STREAM,))

    def cut(self, columns: Columns, samples: Ints, *, model: ModelRole = "policy") -> Sequence[Ints]:
        """Microbatches of at most `train.token_budget` tokens."""
        return self._model(model).cut(columns, samples)

    def forward_backward(
        self,
        columns: Columns,
        parts: Sequence[Ints],
        objective: Objective,
        *,
        model: TrainedRole = "policy",
    ) -> int:
        """Adds the gradient of an objective. Returns the number of computed tokens.

        Raises: TrainingError if the device runs out of memory.
        """
        self._model(model)
        try:
            return self._policy.forward_backward(columns, parts, objective)
        except torch.OutOfMemoryError as err:
            raise TrainingError(
                f"{self._groups.device} is out of memory; lower train.token_budget, set "
                "train.backend.activations: recompute, or use more ranks"
            ) from err

    def optim_step(self, step: AdamStep, *, model: TrainedRole = "policy") -> float:
        """Makes one step of AdamW. Returns the gradient's norm before clipping."""
        self._model(model)
        return self._policy.optim_step(step)

    def reset_optimizer(self) -> None:
        """Resets the optimizer's state, and drops the gradient if there is one."""
        self._policy.reset_optimizer()

    def logprobs(self, columns: Columns, parts: Sequence[Ints], *, model: ModelRole = "policy") -> Floats:
        """[P]: logprobs at the sampling temperature; NaN for tokens outside `parts`."""
        return self._model(model).predictions(columns, parts)

    def values(self, columns: Columns, parts: Sequence[Ints]) -> Floats:
        """Raises: ConfigError, since there is no critic."""
        del columns, parts
        raise ConfigError("train.backend.name: megatron trains no critic")

    def export(self) -> Iterable[HostTensor]:
        """The current weights, in the dtype in which they are published. Iterate once, in any thread.

        Each of several ranks gets all tensors, but only the elements in its range of the version.
        """
        dtype = self._backend.publish_dtype
        weights = self._policy.weights.gather(dtype=DTYPES[dtype])
        return begin_export(weights, dtype, elements=self._exported_elements)

    @cached_property
    def _exported_elements(self) -> Mapping[str, tuple[int, int]]:
        table = [
            (name, shape, self._backend.publish_dtype) for name, shape in self._policy.weights.shapes.items()
        ]
        everyone = self._groups.everyone
        return elements_of_rank(table_of(table), everyone.rank, everyone.world)

    def save(self, folder: Path, *, num_steps_done: int) -> Write:
        """Copies weights and optimizer to host memory. Returns the function that writes the copies: each rank
        its part of the optimizer, and rank 0 everything else."""
        from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] (PathLike without its argument)

        is_first = self._groups.everyone.rank == 0
        weights: dict[str, torch.Tensor] = {}
        for name, weight in self._policy.weights.gather(dtype=torch.float32, values=self._policy.main_values):
            if is_first:
                weights[name] = weight.detach().to("cpu", copy=True).contiguous()
        part = self._policy.optimizer_part()
        state = TrainerState(
            num_steps_done=num_steps_done,
            rng_state=torch.get_rng_state(),
            config_json=self._config.model_dump_json(),
            frozen={role: digest for role, (_, digest, _) in self._frozen.items()},
        )

        def write() -> None:
            if is_first:
                save_file(weights, folder / _FILE, metadata={"format": "pt"})
                save_state(folder, state)
            part.write(folder)

        return write

    def load(self, folder: Path) -> int:
        """Restores what `save` wrote at any shape, or the torch backend. Raises: DataError if the folder does
        not fit the model."""
        state = load_state(folder)
        try:
            self._policy.install(file_tensors([folder / _FILE]))
        except (OSError, DataError, WeightsError) as err:
            raise DataError(f"checkpoint {folder} does not load: {err}") from err
        self._policy.load_optimizer(folder)
        for role, (_, digest, model_dir) in self._frozen.items():
            if state.frozen.get(role) != digest:
                raise DataError(
                    f"checkpoint {folder}: the weights of its {role} differ from those in {model_dir}; "
                    "restore that folder, or begin a new run"
                )
        torch.set_rng_state(state.rng_state)
        return state.num_steps_done

    def _model(self, role: ModelRole) -> SplitModel:
        if role == "policy":
            return self._policy
        if role not in self._frozen:
            raise ConfigError(f"train.backend.name: megatron has no {role} in this recipe")
        return self._frozen[role][0]
