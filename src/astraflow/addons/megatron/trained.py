"""The policy with megatron-core's gradient buffers and its distributed optimizer.

Ranks with the same weights share the optimizer's state: each has ranges of the parameters'
elements. A checkpoint has the state by weight of the folder instead, as the torch backend writes it. So it
loads at any shape, and in either backend.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from astraflow.addons.megatron.groups import ModelGroups
from astraflow.addons.megatron.library import megatron
from astraflow.addons.megatron.mapping import WeightPiece
from astraflow.addons.megatron.passes import SplitModel
from astraflow.errors import TrainingError
from astraflow.protocols import AdamStep, Objective
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.torch.optimizer_files import AVERAGES, OptimizerPart, open_optimizer
from astraflow.types.token_columns import Columns

__all__ = ["TrainedPolicy"]

Ints = NDArray[np.int64]


class TrainedPolicy(SplitModel):
    """Example: `policy.forward_backward(columns, parts, objective)`, then `policy.optim_step(step)`."""

    def __init__(self, folder: Path, config: TrainConfig, groups: ModelGroups) -> None:
        super().__init__(folder, config, groups, is_trained=True)
        # megatron-core sets these marks only when it initializes weights. Without them, norms would count the
        # parts of a parameter on one rank only.
        for piece in self.weights.pieces:
            if piece.dim is not None:
                parameter: Any = self.weights.parameters[piece.parameter]
                parameter.tensor_model_parallel = True
                parameter.partition_dim = piece.dim
                parameter.partition_stride = 1
        is_low = self.backend.dtype == "bfloat16"
        library = megatron()
        settings = library.DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        self.module = library.DistributedDataParallel(self.stage_config, settings, self.module)
        self.module.train()  # recomputation needs it; nothing is dropped
        adam = library.OptimizerConfig(
            optimizer="adam", lr=config.lr, bf16=is_low, use_distributed_optimizer=True
        )
        # Without overrides, weight decay covers all weights, as in the torch backend.
        chained = library.get_megatron_optimizer(
            adam, [self.module], config_overrides={}, use_gloo_process_groups=False
        )
        (self._optimizer,) = chained.chained_optimizers
        self._shards = self._own_shards()
        self._has_gradient = False
        self._drop_gradients()

    def _own_shards(self) -> dict[str, tuple[Tensor, int]]:
        """The part of each parameter that this rank's optimizer updates: its values, flat and in float32, and
        the position of the first. Parameters without such a part are missing."""
        optimizer = self._optimizer
        names = {parameter: name for name, parameter in self.weights.parameters.items()}
        pairs = [
            *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
            *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
        ]
        own: dict[str, tuple[Tensor, int]] = {}
        for parameters, shards in pairs:
            for parameter, shard in zip(parameters, shards, strict=True):
                first = optimizer._get_model_param_range_map(parameter)["param"].start
                own[names[parameter]] = (shard, int(first))
        return own

    def forward_backward(self, columns: Columns, parts: Sequence[Ints], objective: Objective) -> int:
        """See `TrainerBackend.forward_backward`."""
        self._has_gradient = True
        results = self._pass(columns, parts, objective)
        if not self.groups.is_last_stage:
            with torch.no_grad():  # the last stage has computed the gradient
                for packed, rows in zip(results.packed, results.rows, strict=True):
                    objective(packed.trained, rows[0], rows[1] if len(rows) > 1 else None)
        return sum(packed.num_computed for packed in results.packed)

    def optim_step(self, step: AdamStep) -> float:
        """See `TrainerBackend.optim_step`."""
        if not self._has_gradient:
            raise TrainingError("the optimizer step has no gradient; call forward_backward first")
        megatron().finalize_model_grads([self.module])
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.clip_grad_norm(step.max_grad_norm))
        if math.isfinite(norm):
            for group in self._optimizer.optimizer.param_groups:
                group.update(lr=step.lr, betas=step.betas, eps=step.eps, weight_decay=step.weight_decay)
            self._optimizer.step_with_ready_grads()
        self._drop_gradients()
        return norm

    def reset_optimizer(self) -> None:
        """See `TrainerBackend.reset_optimizer`."""
        self._drop_gradients()
        self._optimizer.optimizer.state.clear()

    def _drop_gradients(self) -> None:
        self.module.zero_grad_buffer()
        self._optimizer.zero_grad(set_to_none=True)
        self._has_gradient = False

    # --- checkpoints ---

    def main_values(self, name: str) -> Tensor:
        """A parameter's values in float32. All ranks call this in the same order."""
        parameter = self.weights.parameters[name]
        if parameter.dtype == torch.float32:
            return parameter.detach()
        return self._whole(name, self._shards[name][0] if name in self._shards else None)

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites all weights. Raises: WeightsError if the tensors are not exactly the model's weights."""

        def write(name: str, values: Tensor) -> None:
            self._write(name, values)
            if name in self._shards:
                shard, first = self._shards[name]
                shard.data.copy_(values.view(-1)[first : first + shard.numel()])

        self.weights.install(tensors, write)

    @torch.no_grad()
    def optimizer_part(self) -> OptimizerPart:
        """A copy of the state that this rank writes. All ranks call this."""
        tensors: dict[str, Tensor] = {}
        rows: dict[str, int] = {}
        columns: dict[str, int] = {}
        steps: dict[str, float] = {}
        num_steps = max(self.groups.everyone.gather_values(self._num_steps()))
        for name in self.weights.parameters if num_steps else ():
            averages = {average: self._whole(name, self._average(name, average)) for average in AVERAGES}
            for piece in self._written(name):
                row, column = self.weights.offset(piece)
                rows[piece.name] = row
                steps[piece.name] = num_steps
                if column:
                    columns[piece.name] = column
                for average, whole in averages.items():
                    values = piece.read(whole).to("cpu", copy=True).contiguous()
                    tensors[f"{piece.name}.{average}"] = values
        return OptimizerPart(
            tensors, rows, columns, steps, OptimizerPart.name_of("optimizer", self.groups.everyone)
        )

    @torch.no_grad()
    def load_optimizer(self, folder: Path) -> None:
        """Restores the state, saved by any number of ranks. Raises: DataError if it does not fit."""
        with open_optimizer(folder, "optimizer") as saved:
            saved.check_names(self.weights.shapes)
            inner = self._optimizer.optimizer
            inner.state.clear()
            num_steps = max(saved.steps.values(), default=0.0)
            if not num_steps:
                return
            for group in inner.param_groups:
                if "step" in group:
                    group["step"] = int(num_steps)
            for shard, _ in self._shards.values():
                inner.state[shard] = {"step": torch.tensor(num_steps)}
            for average in AVERAGES:
                self._load_average(saved, average)

    def _load_average(self, saved: Any, average: str) -> None:
        def read(piece: WeightPiece, into: Tensor) -> None:
            saved.read(piece.name, average, into, offset=self.weights.offset(piece))

        def write(name: str, values: Tensor) -> None:
            if name in self._shards:
                shard, first = self._shards[name]
                own = values.view(-1)[first : first + shard.numel()]
                self._optimizer.optimizer.state[shard][average] = own.to(shard.device, copy=True)

        self.weights.fill(read, write)

    def _num_steps(self) -> float:
        """Number of steps of the optimizer, as far as this rank has any of its state."""
        inner = self._optimizer.optimizer
        for group in inner.param_groups:
            if "step" in group:  # fused implementations count per group
                return float(group["step"])
        states = cast("Mapping[Tensor, dict[str, Any]]", inner.state).values()
        return max((float(state["step"]) for state in states), default=0.0)

    def _average(self, name: str, average: str) -> Tensor | None:
        if name not in self._shards:
            return None
        return self._optimizer.optimizer.state[self._shards[name][0]][average]

    def _whole(self, name: str, shard: Tensor | None) -> Tensor:
        """Values in a parameter's shape, of which each of the ranks with the same weights has a range."""
        parameter = self.weights.parameters[name]
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if shard is not None:
            first = self._shards[name][1]
            whole[first : first + shard.numel()] = shard.detach().view(-1)
        if self.groups.copies.world > 1:
            dist.all_reduce(whole, group=self.groups.copies_group)
        return whole.view(parameter.shape)

    def _written(self, parameter: str) -> list[WeightPiece]:
        """The pieces of a parameter whose state this rank writes: one of several ranks that have it."""
        if self.groups.copies.rank:
            return []
        is_first = self.groups.tensor_rank == 0
        pieces = [
            piece for piece in self.weights.pieces if piece.parameter == parameter and not piece.is_copy
        ]
        return [piece for piece in pieces if is_first or piece.dim is not None]
