"""The trainer backend that computes with PyTorch, on one device or on one per rank.

Owns the policy with its optimizer, and the models that are never exported: the frozen ones that the loss
needs (reference, teacher), and the critic. All models stay in eval mode, without dropout, as in the engine
that produces the behavior logprobs. Not thread-safe: one caller at a time.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from astraflow import added
from astraflow.config import Config
from astraflow.errors import ConfigError, TrainingError
from astraflow.models.export import begin_export
from astraflow.models.images import image_rules
from astraflow.models.loading import DTYPES
from astraflow.protocols import AdamStep, ModelRole, Objective, TrainedRole, Write
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.memory_need import MemoryNeed, check_memory
from astraflow.trainer.ranks import ALONE, Ranks
from astraflow.trainer.torch.forward import TrainerForward
from astraflow.trainer.torch.layers import recompute_layers
from astraflow.trainer.torch.memory import free_bytes, memory_need
from astraflow.trainer.torch.parallel.grid import make_grid
from astraflow.trainer.torch.parallel.sharding import ModelWeights, rank_device
from astraflow.trainer.torch.side_models import (
    load_critic,
    load_frozen,
    num_positions,
    uncut_logits,
    vocab_size_of,
)
from astraflow.trainer.torch.torch_files import (
    TrainerState,
    check_frozen,
    copy_model,
    load_model,
    load_state,
    open_model,
    save_state,
)
from astraflow.trainer.torch.trained_model import ScoringModel, TrainedModel
from astraflow.types import ImageTokens, SampleRules
from astraflow.types.host_tensors import HostTensor
from astraflow.types.token_columns import EXPERTS_STREAM, Columns
from astraflow.weights.manifest import table_of
from astraflow.weights.ranges import elements_of_rank

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ModelVerbs", "TorchBackend"]

_log = logging.getLogger(__name__)
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class ModelVerbs:
    """The verbs of a `TrainerBackend` that pass on to one of its models, whoever made these."""

    _device: str
    _need: MemoryNeed
    """The estimate that is told if the device runs out of memory."""

    def scoring_model(self, role: ModelRole) -> Any:
        """A model with `cut` and `predictions`. Raises: ConfigError if there is none of this role."""
        raise NotImplementedError

    def trained_model(self, role: TrainedRole) -> Any:
        """One that also has an optimizer. Raises: ConfigError if there is none of this role."""
        raise NotImplementedError

    def cut(self, columns: Columns, samples: Ints, *, model: ModelRole = "policy") -> Sequence[Ints]:
        """Microbatches of at most `train.token_budget` tokens."""
        return self.scoring_model(model).cut(columns, samples)

    def forward_backward(
        self,
        columns: Columns,
        parts: Sequence[Ints],
        objective: Objective,
        *,
        model: TrainedRole = "policy",
    ) -> int:
        """Adds the gradient of an objective. Returns the number of computed tokens, including padding.

        Raises: TrainingError if the device runs out of memory.
        """
        try:
            return self.trained_model(model).forward_backward(columns, parts, objective)
        except torch.OutOfMemoryError as err:
            longest = max(int(columns.lengths[part].sum()) for part in parts)
            raise TrainingError(
                f"{self._device} is out of memory with microbatches of up to {longest} tokens; the estimate "
                f"before the first step was: {self._need.text()}"
            ) from err

    def optim_step(self, step: AdamStep, *, model: TrainedRole = "policy") -> float:
        """Makes one step of AdamW. Returns the gradient's norm before clipping.

        Raises: TrainingError if there is no gradient.
        """
        return self.trained_model(model).optim_step(step)

    def reset_optimizer(self) -> None:
        """Resets the state of the policy's optimizer, and drops the gradient if there is one."""
        self.trained_model("policy").reset_optimizer()

    def logprobs(self, columns: Columns, parts: Sequence[Ints], *, model: ModelRole = "policy") -> Floats:
        """[P]: logprobs at the sampling temperature; NaN for tokens outside `parts`."""
        return self.scoring_model(model).predictions(columns, parts)

    def values(self, columns: Columns, parts: Sequence[Ints]) -> Floats:
        """[P]: the critic's values; NaN for tokens outside `parts`."""
        return self.trained_model("critic").predictions(columns, parts)


class TorchBackend(ModelVerbs):
    """Implements `TrainerBackend`.

    Example: `LossLearner(config, TorchBackend(config, model_dir="models/tiny")).train_step(batch)`.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        model_dir: str | Path,
        seed: int = 0,
        ranks: Ranks = ALONE,
        model: "PreTrainedModel | None" = None,
        exact: bool = False,
    ) -> None:
        """Loads the models. Raises: DataError if a folder has none, ConfigError for an unusable device.

        `ranks`: all ranks of the trainer, which share every batch and every weight and make the same calls.
        `model`: the policy's model in float32, if it is already on the device. `exact`: the policy's logprobs
        are bit-identical to those of an exact engine.
        """
        backend = _torch_config(config.backend)
        torch.set_num_threads(backend.num_threads)
        self._config = config
        backend = backend.model_copy(update={"device": rank_device(backend.device, is_alone=ranks is ALONE)})
        config = config.model_copy(update={"backend": backend})
        self._backend = backend
        self._device = _check_device(backend.device)
        grid = self._grid = make_grid(ranks, config.shard, device=backend.device)
        free = free_bytes(self._device) if model is None else float("inf")
        self._model, source = (model, None) if model else open_model(model_dir, grid)
        self._vocab_size = vocab_size_of(self._model)
        self._lora: added.Lora | None = None
        if backend.lora.rank:
            self._lora = added.Lora.add_to(self._model, backend.lora, base=Path(model_dir), seed=seed)
        self._need = memory_need(self._model, config, grid=grid)
        check_memory(self._need, free)
        self._weights = ModelWeights(self._model, grid, dtype=DTYPES[backend.dtype], source=source)
        images = self._images = image_rules(Path(model_dir))
        if images is not None and ranks.world > 1:
            raise ConfigError(
                f"{type(self._model).__name__} reads images and can be trained by one rank only: ranks that "
                "share its weights would each need an image in every pass; set train.ranks: 1"
            )
        forward = TrainerForward(self._model, vocab_size=self._vocab_size, config=backend, images=images)
        if backend.activations == "recompute":
            recompute_layers(self._model)
        if exact:
            forward.exact = added.InvariantLogprobs(self._model)
        self._replay = forward.replay = added.router_replay(self._model)
        uncut = uncut_logits(Path(model_dir), grid, backend)
        self._policy = TrainedModel(forward, config, weights=self._weights, uncut=uncut)
        self._frozen = load_frozen(config, model_dir=model_dir, vocab_size=self._vocab_size, grid=grid)
        self._critic = load_critic(config, model_dir=model_dir, vocab_size=self._vocab_size, grid=grid)

    @property
    def data_ranks(self) -> Ranks:
        """The ranks with the other slices of every batch, from which a `LossLearner` gathers."""
        return self._grid.data

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding table."""
        return self._vocab_size

    @property
    def sample_rules(self) -> SampleRules:
        """The rules for trajectories that the policy's model accepts."""
        rules = self._images
        images = rules and ImageTokens(
            token_id=rules.token_id,
            patch=rules.patch,
            merge=rules.merge,
            min_pixels=rules.min_pixels,
            max_pixels=rules.max_pixels,
        )
        return SampleRules(
            vocab_size=self._vocab_size,
            max_tokens=num_positions(self._model),
            images=images,
            streams=() if self._replay is None else (self._replay.stream_rule,),
            refused_streams=(EXPERTS_STREAM,) if self._replay is None else (),
        )

    @property
    def is_packed(self) -> bool:
        """Whether all sequences are computed in one row, instead of one padded row each."""
        return self._policy.forward.is_packed

    @property
    def held_bytes(self) -> int:
        """Bytes of the policy's weights and optimizer state that this rank holds between steps."""
        return self._policy.held_bytes

    def step_metrics(self) -> Mapping[str, float]:
        """Metrics of a mixture's routers since the last call; empty for other models."""
        return {} if self._replay is None else self._replay.metrics(self._grid.data)

    def export(self) -> Iterable[HostTensor]:
        """The current weights, in the dtype in which they are published. Iterate once, in any thread.

        Each of several ranks gets all tensors, but only the elements in its range of the version.
        """
        dtype = self._backend.publish_dtype
        elements = self._exported_elements
        if self._lora is not None:
            publish = self._backend.lora.publish
            return self._lora.export(self._weights, publish=publish, dtype=dtype, elements=elements)
        return begin_export(self._weights.gather(dtype=DTYPES[dtype]), dtype, elements=elements)

    @cached_property
    def _exported_elements(self) -> Mapping[str, tuple[int, int]]:
        """Name of each published tensor -> the `[first, last)` of its elements that this rank exports."""
        dtype = self._backend.publish_dtype
        everyone = self._grid.everyone
        if self._lora is None:
            table = [(name, shape, dtype) for name, shape in self._weights.shapes]
        else:
            publish = self._backend.lora.publish
            table = self._lora.published_table(self._weights, publish=publish, dtype=dtype)
        return elements_of_rank(table_of(table), everyone.rank, everyone.world)

    def save(self, folder: Path, *, num_steps_done: int) -> Write:
        """Copies models, optimizers and random state to host memory. Returns the function that writes the
        copies.

        Each rank writes its own part of the optimizers; rank 0 writes everything else.
        """
        state = TrainerState(
            num_steps_done=num_steps_done,
            rng_state=torch.get_rng_state(),
            config_json=self._config.model_dump_json(),
            frozen={role: digest for role, (digest, _) in self._frozen_digests().items()},
        )
        copies = [copy_model(folder, model, name, lora) for name, model, lora in self._models_by_file()]

        def write() -> None:
            for write_model in copies:
                write_model()
            if self._grid.everyone.rank == 0:
                save_state(folder, state)

        return write

    def load(self, folder: Path) -> int:
        """Restores what `save` wrote with any number of ranks. Raises: DataError if the folder does not fit
        the model."""
        state = load_state(folder)
        for name, model, lora in self._models_by_file():
            load_model(folder, model, name, lora)
        check_frozen(folder, state.frozen, self._frozen_digests())
        torch.set_rng_state(state.rng_state)
        return state.num_steps_done

    def _models_by_file(self) -> "list[tuple[str, TrainedModel, added.Lora | None]]":
        """The models in a checkpoint, with the name of each one's file."""
        models: list[tuple[str, TrainedModel, added.Lora | None]] = [("model", self._policy, self._lora)]
        return models if self._critic is None else [*models, ("critic", self._critic, None)]

    def _frozen_digests(self) -> dict[str, tuple[str, Path]]:
        """Role of each frozen model -> digest of its weights, and their folder."""
        digests = {role: (model.digest, model.folder) for role, model in self._frozen.items()}
        if self._lora is None:
            return {**digests}
        return {**digests, "base model": (self._lora.base_digest(self._weights), self._lora.base)}

    def trained_model(self, role: TrainedRole) -> TrainedModel:
        """The policy or the critic."""
        model = self._policy if role == "policy" else self._critic
        if model is None:
            raise ConfigError("the recipe has no critic; set train.auxiliary.critic")
        return model

    def scoring_model(self, role: ModelRole) -> ScoringModel:
        """Any of the models."""
        if role in ("policy", "critic"):
            return self.trained_model(role)
        if role not in self._frozen:
            raise ConfigError(f"the recipe has no {role}; set it in train.auxiliary")
        return self._frozen[role]


def _torch_config(config: Config) -> TorchBackendConfig:
    if not isinstance(config, TorchBackendConfig):
        raise ConfigError(f"train.backend.name = {config!r} is not the torch backend")
    return config


def _check_device(device: str) -> str:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as err:
        raise ConfigError(
            f'train.backend.device = "{device}" is not usable here: {str(err).splitlines()[0]}; use "cpu"'
        ) from err
    return device
