"""A model with its optimizer: the policy, or its critic."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from astraflow.errors import TrainingError
from astraflow.models.loading import DTYPES
from astraflow.protocols import AdamStep, EntropyUse, Objective
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.torch.forward import TrainerForward
from astraflow.trainer.torch.lean_adam import LeanAdamW
from astraflow.trainer.torch.optimizer_files import OptimizerPart, read_optimizer
from astraflow.trainer.torch.packed_rows import LayoutTensors
from astraflow.trainer.torch.parallel.sharding import ModelWeights, TrainedPart, local_part
from astraflow.types.token_columns import Columns

__all__ = ["ScoringModel", "TrainedModel"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class ScoringModel:
    """Computes a model's predictions over all microbatches of a pass.

    All ranks compute a split model together. So each makes as many passes as the rank with the most
    microbatches, and discards the results of the extra ones.
    """

    def __init__(
        self,
        forward: TrainerForward,
        *,
        weights: ModelWeights,
        config: TrainConfig,
        predicts_values: bool = False,
        uncut: Tensor | None = None,
    ) -> None:
        """Splits the model over the ranks. `predicts_values`: it outputs one number per token instead of
        logits. `uncut`: what `TrainerForward.probe` returns before layers are cut; compared with it after.

        Raises: ConfigError if it cannot be split as `train.shard` requires.
        """
        assert isinstance(config.backend, TorchBackendConfig)
        self.forward = forward
        self.weights = weights
        self.grid = weights.grid
        self._token_budget = config.token_budget
        self._predicts_values = predicts_values
        weights.split(forward.entry)
        forward.try_layouts()
        if self.grid.context > 1:
            uncut = forward.probe()
            forward.cut_tokens(self.grid)
        if uncut is not None:
            forward.check_probe(uncut)

    def cut(self, columns: Columns, samples: Ints) -> Sequence[Ints]:
        """See `TrainerBackend.cut`."""
        parts = self.forward.cut(columns, samples, self._token_budget)
        return [part for part in parts if columns.num_trained(part)]

    @torch.no_grad()
    def predictions(self, columns: Columns, parts: Sequence[Ints]) -> Floats:
        """[P]: logprobs or values of the trained tokens of `parts`; NaN elsewhere."""
        logprobs = np.full_like(columns.behavior_logprobs, np.nan)
        num_idle = self._num_idle(parts)
        for part in parts:
            packed = self.forward.layout(columns, part)
            logprobs[packed.trained] = self._predict(columns, packed, "none")[0].cpu().numpy()
        for _ in range(num_idle):
            self._predict(*self.forward.idle(), "none")
        return logprobs

    def _num_idle(self, parts: Sequence[Ints]) -> int:
        """Number of extra passes for the rank with the most. Call it before the passes, on all ranks."""
        return max(self.grid.data.gather_values(len(parts))) - len(parts)

    def _predict(
        self, columns: Columns, packed: LayoutTensors, entropy: EntropyUse, alternatives: str = ""
    ) -> tuple[Tensor, Tensor | None]:
        if self._predicts_values:
            return self.forward.outputs(packed)[:, 0], None
        return self.forward.logprobs(columns, packed, entropy=entropy, alternatives=alternatives)


def _make_optimizer(parameters: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; each step brings its settings."""
    backend = config.backend
    assert isinstance(backend, TorchBackendConfig)
    if backend.optimizer_state == "float32" and not backend.offload_optimizer:
        return torch.optim.AdamW(parameters, fused=True)
    return LeanAdamW(parameters, dtype=DTYPES[backend.optimizer_state], offload=backend.offload_optimizer)


class TrainedModel(ScoringModel):
    """A model with its optimizer. Example: `model.forward_backward(columns, parts, objective)`, then
    `model.optim_step(...)`."""

    def __init__(
        self,
        forward: TrainerForward,
        config: TrainConfig,
        *,
        weights: ModelWeights,
        predicts_values: bool = False,
        uncut: Tensor | None = None,
    ) -> None:
        super().__init__(
            forward, weights=weights, config=config, predicts_values=predicts_values, uncut=uncut
        )
        self._parts = weights.trained_parts()
        self._own = [part.own for part in self._parts.values() if part.own.numel()]
        """This rank's parts of the parameters; the parameters themselves if they are not split."""
        self._optimizer = _make_optimizer(self._own, config)

    def forward_backward(self, columns: Columns, parts: Sequence[Ints], objective: Objective) -> int:
        """See `TrainerBackend.forward_backward`."""
        num_computed = 0
        num_idle = self._num_idle(parts)
        for part in parts:
            packed = self.forward.layout(columns, part)
            predicted, entropies = self._predict(columns, packed, objective.entropy, objective.alternatives)
            torch.autograd.backward(objective(packed.trained, predicted, entropies))
            num_computed += packed.num_computed
        for _ in range(num_idle):
            predicted, _ = self._predict(*self.forward.idle(), "none")
            torch.autograd.backward(0.0 * predicted.sum())
        return num_computed

    def optim_step(self, step: AdamStep) -> float:
        """See `TrainerBackend.optim_step`."""
        if all(part.parameter.grad is None for part in self._parts.values()):
            raise TrainingError("the optimizer step has no gradient; call forward_backward first")
        norm = self._clip(step.max_grad_norm)
        if np.isfinite(norm):
            for group in self._optimizer.param_groups:
                group.update(lr=step.lr, betas=step.betas, eps=step.eps, weight_decay=step.weight_decay)
            self._optimizer.step()
        self._drop_gradients()
        return norm

    def reset_optimizer(self) -> None:
        """See `TrainerBackend.reset_optimizer`."""
        self._drop_gradients()
        self._optimizer.state.clear()

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and optimizer state that this rank holds between steps."""
        return sum(tensor.nbytes for tensor in self.averages) + self.weights.held_bytes

    @property
    def averages(self) -> list[Tensor]:
        """The optimizer's state."""
        states = cast("dict[nn.Parameter, dict[str, Tensor]]", self._optimizer.state).values()
        return [tensor for state in states for tensor in state.values()]

    def optimizer_part(self, prefix: str) -> OptimizerPart:
        """A copy of this rank's part of the optimizer's state. `prefix`: start of its file's name."""
        return OptimizerPart.of(self._optimizer, self._parts, self.grid.everyone, prefix=prefix)

    def load_optimizer(self, folder: Path, prefix: str) -> None:
        """Restores the optimizer's state, saved by any number of ranks. Raises: DataError if it does not
        fit."""
        optimizer = self._optimizer
        zeros = optimizer.make_average if isinstance(optimizer, LeanAdamW) else torch.zeros_like
        read_optimizer(folder, optimizer, self._parts, prefix=prefix, zeros=zeros)

    def _clip(self, max_norm: float) -> float:
        """Scales the gradient of all ranks down to a norm. Returns the norm before."""
        if self.grid.everyone.world == 1:
            grads = [parameter.grad for parameter in self._own if parameter.grad is not None]
            return self._scale(_norm(grads), max_norm)
        counted: list[Tensor] = []
        for part in self._parts.values():
            grad = part.parameter.grad
            part.own.grad = None if grad is None else local_part(grad)
            if part.own.grad is None or not part.own.numel():
                continue
            if part.is_shared:
                self._share(part)
            if part.is_first:
                counted.append(part.own.grad)
        mine = _norm(counted)
        norms = self.grid.everyone.gather_values(mine)
        return self._scale(math.sqrt(sum(norm * norm for norm in norms)), max_norm)

    def _scale(self, norm: float, max_norm: float) -> float:
        if not norm <= max_norm:
            torch.nn.utils.clip_grads_with_norm_(self._own, max_norm, torch.tensor(norm))
        return norm

    def _share(self, part: TrainedPart) -> None:
        """Makes the gradient of a part that several ranks have identical on all of them, to the last bit.

        If each rank computed the whole gradient, their kernels may have rounded it differently.
        """
        grad = part.own.grad
        assert grad is not None
        dist.all_reduce(grad, group=self.grid.model_group)
        if not part.is_partial:
            grad /= self.grid.tensor

    def _drop_gradients(self) -> None:
        for part in self._parts.values():
            part.parameter.grad = None
            part.own.grad = None


def _norm(grads: Sequence[Tensor]) -> float:
    """The norm of all gradients together, also where the sum of their squares overflows float32."""
    norm = float(torch.nn.utils.get_total_norm(grads))
    if math.isfinite(norm):
        return norm
    norms = [cast("Tensor", torch.linalg.vector_norm(grad, dtype=torch.float64)) for grad in grads]
    return math.hypot(*map(float, norms))
