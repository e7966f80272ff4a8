"""The trainer backend that computes with megatron-core: the policy, and the frozen models that score.

Which samples make a step, and what it minimizes, is decided by `LossLearner`, as for the torch backend. What
both share: packed layouts, checkpoints, and the names and bytes of a version. Not thread-safe.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import torch

from astraflow.addons.megatron.config import MegatronBackendConfig
from astraflow.addons.megatron.groups import make_groups
from astraflow.addons.megatron.memory import rank_need
from astraflow.addons.megatron.passes import SplitModel
from astraflow.addons.megatron.trained import TrainedPolicy
from astraflow.errors import ConfigError, DataError, WeightsError
from astraflow.models.export import begin_export
from astraflow.models.loading import DTYPES, file_tensors
from astraflow.protocols import ModelRole, TrainedRole, Write
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.memory_need import check_memory
from astraflow.trainer.ranks import Ranks
from astraflow.trainer.torch.memory import free_bytes
from astraflow.trainer.torch.side_models import check_same_tokens, frozen_folders
from astraflow.trainer.torch.torch_backend import ModelVerbs
from astraflow.trainer.torch.torch_files import TrainerState, check_frozen, load_state, save_state
from astraflow.types import SampleRules
from astraflow.types.host_tensors import HostTensor
from astraflow.types.token_columns import EXPERTS_STREAM
from astraflow.weights.manifest import table_of
from astraflow.weights.ranges import elements_of_rank

__all__ = ["MegatronBackend"]

_FILE = "model.safetensors"


class MegatronBackend(ModelVerbs):
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
        self._device = str(self._groups.device)
        check_memory(rank_need(config, model_dir), free_bytes(self._device))
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

    def scoring_model(self, role: ModelRole) -> SplitModel:
        """Any of the models. Raises: ConfigError if there is no such model."""
        if role == "policy":
            return self._policy
        if role not in self._frozen:
            raise ConfigError(f"the recipe has no {role} that train.backend.name: megatron computes")
        return self._frozen[role][0]

    def trained_model(self, role: TrainedRole) -> TrainedPolicy:
        """The policy. Raises: ConfigError for the critic."""
        if role != "policy":
            raise ConfigError("train.backend.name: megatron trains no critic")
        return self._policy

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
        digests = {role: (digest, model_dir) for role, (_, digest, model_dir) in self._frozen.items()}
        check_frozen(folder, state.frozen, digests)
        torch.set_rng_state(state.rng_state)
        return state.num_steps_done
