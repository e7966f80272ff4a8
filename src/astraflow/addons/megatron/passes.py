"""Passes of a model in Megatron's stages, over all microbatches of a minibatch.

megatron-core's schedule runs them: one after the other without a pipeline, else 1F1B. The last stage computes
logprobs, and the gradient of the objective. Afterwards it sends logprobs and entropies to the other stages,
which call the objective with them, too. So every rank has the same statistics, whichever stage it is.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from astraflow.addons.megatron.checks import open_shape
from astraflow.addons.megatron.config import MegatronBackendConfig
from astraflow.addons.megatron.groups import ModelGroups
from astraflow.addons.megatron.library import megatron
from astraflow.addons.megatron.model import PackedPass, build_stage
from astraflow.addons.megatron.vocab_head import vocab_parallel_logprobs
from astraflow.addons.megatron.weights import MegatronWeights
from astraflow.errors import DataError
from astraflow.models.loading import file_tensors, host_view
from astraflow.models.model_folder import check_model_folder
from astraflow.models.weight_files import weight_paths
from astraflow.protocols import EntropyUse, Objective
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.packing import cut_microbatches, make_layout
from astraflow.trainer.torch.packed_rows import LayoutTensors, all_values, layout_tensors, own_part
from astraflow.trainer.torch.varlen import find_varlen
from astraflow.types.token_columns import Columns

__all__ = ["SplitModel"]

_log = logging.getLogger(__name__)
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(slots=True)
class _PassResults:
    """What the passes of a rank have computed; the same on all stages after `share`."""

    entropy: EntropyUse
    packed: list[LayoutTensors] = field(default_factory=list[LayoutTensors])
    rows: list[Tensor] = field(default_factory=list[Tensor])
    """[1 or 2, P] of each microbatch: logprobs, and entropies if there are any."""

    def add(self, logprobs: Tensor, entropies: Tensor | None) -> None:
        """Adds the results of a microbatch, on the last stage."""
        kinds = [logprobs] if entropies is None else [logprobs, entropies]
        self.rows.append(torch.stack([kind.detach() for kind in kinds]))

    def share(self, groups: ModelGroups) -> None:
        """Gives all stages the results of the last one."""
        sizes = [len(packed.trained) for packed in self.packed]
        num_kinds = 1 if self.entropy == "none" else 2
        whole = torch.empty((num_kinds, sum(sizes)), device=groups.device)
        if groups.is_last_stage:
            torch.cat(self.rows, dim=1, out=whole)
        dist.broadcast(whole, group=groups.pipeline_group, group_src=groups.pipeline - 1)
        ends = np.cumsum(sizes).tolist()
        self.rows = [whole[:, end - size : end] for end, size in zip(ends, sizes, strict=True)]


class SplitModel:
    """A model in Megatron's stages that only scores."""

    def __init__(
        self, folder: Path, config: TrainConfig, groups: ModelGroups, *, is_trained: bool = False
    ) -> None:
        """Builds this rank's part, and reads its weights.

        Raises: DataError if the folder has no such model; ConfigError if it can't be split as the recipe
        says.
        """
        assert isinstance(config.backend, MegatronBackendConfig)
        shape = open_shape(config, folder)
        self.groups = groups
        self.backend = config.backend
        self.vocab_size = shape.vocab_size
        stage = build_stage(folder, shape, groups, config.backend)
        self.model = stage.model.requires_grad_(is_trained)
        self.stage_config = stage.config
        self.weights = MegatronWeights(stage.model, shape, stage.shapes, groups)
        self._budget = config.token_budget
        self._varlen = find_varlen(str(groups.device)) if config.backend.dtype != "float32" else None
        self._has_warned = False
        self.weights.install(_folder_tensors(folder, self.weights), self._write)
        self.module: Any = self.model
        """The model as it is called."""
        if config.backend.dtype == "bfloat16":
            self.module = megatron().Float16Module(stage.config, stage.model)

    def _write(self, name: str, values: Tensor) -> None:
        self.weights.parameters[name].data.copy_(values)

    def cut(self, columns: Columns, samples: Ints) -> Sequence[Ints]:
        """See `TrainerBackend.cut`."""
        max_padded = 2 * self._budget if self._varlen is None else None  # padding that attention computes
        parts = cut_microbatches(columns, samples, self._budget, max_padded=max_padded)
        return [part for part in parts if columns.num_trained(part)]

    @torch.no_grad()
    def predictions(self, columns: Columns, parts: Sequence[Ints]) -> Floats:
        """[P]: logprobs of the trained tokens of `parts`; NaN elsewhere."""
        logprobs = np.full_like(columns.behavior_logprobs, np.nan)
        results = self._pass(columns, parts, None)
        for packed, rows in zip(results.packed, results.rows, strict=True):
            logprobs[packed.trained] = rows[0].cpu().numpy()
        return logprobs

    def digest(self) -> str:
        """A hash of all weights: that of the torch backend. All ranks call this."""
        digest = xxhash.xxh3_128()
        for name, weight in self.weights.gather(dtype=torch.float32):
            digest.update(host_view(name, weight.cpu().contiguous()).data.data)
        return digest.hexdigest()

    def _pass(self, columns: Columns, parts: Sequence[Ints], objective: Objective | None) -> _PassResults:
        """Runs all microbatches, with a backward pass if there is an objective."""
        values = _PassResults("none" if objective is None else objective.entropy)
        values.packed = [self._layout(columns, part) for part in parts]
        if not parts:
            return values  # other slices have all samples; this one has nothing to send or to receive
        self._warn_of_bubbles(len(parts))
        megatron().get_forward_backward_func()(
            forward_step_func=partial(self._step, columns, values, objective),
            data_iterator=iter(values.packed),
            model=[self.module],
            num_microbatches=len(parts),
            seq_length=1,  # shapes vary, and are sent along
            micro_batch_size=1,
            forward_only=objective is None,
        )
        if self.groups.pipeline > 1:
            values.share(self.groups)
        return values

    def _step(
        self,
        columns: Columns,
        values: _PassResults,
        objective: Objective | None,
        packs: Iterator[LayoutTensors],
        module: Any,
    ) -> tuple[Tensor, Callable[..., Any]]:
        """The forward pass of a microbatch. Returns its output, and what the last stage makes of it."""
        packed = next(packs)
        own = packed
        # The indices of the trained tokens that this rank predicts; None for all.
        chosen: Tensor | None = None
        groups = self.groups
        if groups.context > 1:
            own, chosen = own_part(
                packed, rank=groups.token_part, world=groups.context, group=groups.context_group
            )
        output = module(
            input_ids=own.token_ids[None],
            position_ids=own.position_ids[None],
            attention_mask=None,
            packed_seq_params=PackedPass(own),
        )

        def finish(output: Tensor) -> tuple[Tensor, Tensor, Any]:
            temperatures = columns.temperatures[columns.sample_of(packed.trained)]
            if chosen is not None:
                temperatures = temperatures[chosen.cpu().numpy()]
            of_part = self._logprobs(own, temperatures, output[0], values.entropy)
            num_trained = len(packed.trained)
            logprobs = all_values(of_part[0], own, chosen, num_trained)
            entropies = None if of_part[1] is None else all_values(of_part[1], own, chosen, num_trained)
            values.add(logprobs, entropies)
            loss = logprobs.sum() if objective is None else objective(packed.trained, logprobs, entropies)
            return loss, torch.tensor(0, dtype=torch.int), {}

        return output, finish

    def _logprobs(
        self, packed: LayoutTensors, temperatures: Floats, output: Tensor, entropy: EntropyUse
    ) -> tuple[Tensor, Tensor | None]:
        """[P] each: logprobs at the sampling temperatures, and entropies. `output` [N, D]: hidden states."""
        hidden = output.index_select(0, packed.predict_idx)
        if (temperatures != 1).any():
            hidden = hidden / torch.from_numpy(temperatures).to(hidden.device, non_blocking=True)[:, None]
        weight = self.model.output_layer.weight
        if weight is None:
            weight = self.model.shared_embedding_or_output_weight()
        return vocab_parallel_logprobs(
            hidden.to(weight.dtype),
            weight,
            packed.target_ids,
            entropy=entropy,
            group=self.groups.tensor_group,
        )

    def _layout(self, columns: Columns, part: Ints) -> LayoutTensors:
        layout = make_layout(columns, part, share=self._varlen is None)
        return layout_tensors(layout, device=str(self.groups.device), varlen=self._varlen)

    def _warn_of_bubbles(self, num_parts: int) -> None:
        if num_parts < self.groups.pipeline and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a pass has %d microbatches for train.backend.pipeline = %d stages, so stages wait for each "
                "other; lower train.token_budget, or use fewer stages", num_parts, self.groups.pipeline,
            )  # fmt: skip


def _folder_tensors(folder: Path, weights: MegatronWeights) -> dict[str, Tensor]:
    """The weights of a model folder, as views of its files."""
    try:
        names = check_model_folder(folder)
    except DataError as err:
        raise DataError(f"model folder {folder}: {err}") from err
    tensors = file_tensors(weight_paths(folder), names or ())
    return {name: tensors[name] for name in weights.shapes if name in tensors}
