"""One forward pass of any Hugging Face causal language model over a packed or padded layout.

Packed: the model gets a single row with all packed tokens. Embedding, norms, projections and MLPs process
each token once, and our own attention function, which reads the layout, keeps the sequences apart. Padded:
one right-padded row per sample, with the model's own attention, for models whose attention cannot be replaced
or which mix tokens in another way. A trial pass at load finds out whether the packed layout is exact.

Legend: H heads, D dimension of a head; others as in `trainer.packing`.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from astraflow import added, wire
from astraflow.errors import ConfigError, ImageError, WireError
from astraflow.models.images import ImageRules, check_media
from astraflow.models.loading import DTYPES
from astraflow.models.vision import ImageFeed
from astraflow.protocols import EntropyUse
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.columns import columns_from_samples, sample_name
from astraflow.trainer.packing import Layout, cut_microbatches, make_layout
from astraflow.trainer.step import entropies, token_logprobs
from astraflow.trainer.torch.head import chunked_logprobs, is_head_large
from astraflow.trainer.torch.layers import compile_layers, exclude_from_compile
from astraflow.trainer.torch.norms import replace_norms
from astraflow.trainer.torch.packed_rows import (
    LayoutTensors,
    all_values,
    attend,
    layout_tensors,
    own_part,
)
from astraflow.trainer.torch.parallel.grid import RankGrid
from astraflow.trainer.torch.varlen import find_varlen
from astraflow.types import AdvantageSpan, Sample, Trajectory, VersionSpan
from astraflow.types.token_columns import EXPERTS_STREAM, Columns

__all__ = ["ForwardEntryPoint", "TrainerForward"]

_log = logging.getLogger(__name__)
_ATTENTION_NAME = "astraflow_packed"
_LOGIT_TOLERANCE = 1e-3
"""As a share of the largest logit. Packed and padded logits agree to about 1e-6 in float32; a leak between
sequences changes far more. In bfloat16, the tolerance is 0.05."""

_HARMLESS = frozenset(
    {
        *("dropout", "is_causal", "position_ids", "use_cache", "output_attentions"),
        "output_router_logits",  # mixtures of experts pass it through their attention
    }
)
"""Arguments that models pass to their attention and that have no effect here, in eval mode."""


class ForwardEntryPoint(nn.Module):
    """The module through which a model is called. Weights that are split over ranks are complete only during
    such a call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Returns the result of `compute`."""
        return compute()


class TrainerForward:
    """Computes logits at the positions that predict trained tokens. Gradients flow if they are enabled.

    Owns only the choice of layout, and whether layers are compiled or norms are computed in one pass. The
    caller owns the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        vocab_size: int,
        config: TorchBackendConfig,
        images: ImageRules | None = None,
    ) -> None:
        """`images`: how the model reads images; None for a text-only model."""
        self._model = cast("Any", model)
        self.entry = ForwardEntryPoint(model)
        self._device = config.device
        self._dtype = config.dtype
        self.replay: added.RouterReplay | None = None
        """Sends tokens to the experts that the engine chose, if set."""
        self.exact: added.InvariantLogprobs | None = None
        """If set, makes the logprobs of the trained tokens bit-identical to the engine's."""
        self._grid: RankGrid | None = None
        """Set if tokens are cut over ranks."""
        self._is_idle = False
        """Whether the result of the next pass is discarded."""
        if config.compile_layers:
            compile_layers(model, device=config.device)  # includes the norms
        else:
            replace_norms(model)
        self.is_packed = False
        self._has_plain_head = False
        self._varlen = find_varlen(config.device) if config.dtype != "float32" else None
        self._shares = config.share_prefixes
        # Vision models use their own attention over whole images, which ours must not replace.
        self._image_feed = None if images is None else ImageFeed(cast("Any", model), images)
        self._compiles = config.compile_layers
        self._vocab_size = vocab_size
        self._has_wide_head = config.dtype == "bfloat16" and config.head_dtype == "float32"
        self._is_tried = False
        if not any(parameter.is_meta for parameter in model.parameters()):
            self.try_layouts()

    def try_layouts(self) -> None:
        """Chooses the layout by trial passes, once the weights have values. All ranks must call it."""
        if self._is_tried:
            return
        self._is_tried = True
        if self._image_feed is None and _can_replace_attention(self._model):
            _offer_attention(is_compiled=self._compiles)
            self.is_packed = self._packed_is_exact()
        self._has_plain_head = self._try(self._is_head_plain)
        if self._has_wide_head and not self._has_plain_head:
            raise ConfigError(
                f"train.backend.head_dtype = 'float32': {type(self._model).__name__} scales or caps its "
                "logits, or its head has a bias or adapters; leave it out, and in rollout.engine too"
            )
        _log.info(
            "%s: %s layout, %s output head",
            type(self._model).__name__,
            "packed" if self.is_packed else "padded",
            "chunked" if self._has_plain_head else "whole",
        )

    def layout(self, columns: Columns, samples: NDArray[np.int64]) -> LayoutTensors:
        """Lays out some samples for one pass."""
        # The variable-length kernel cannot attend from several tails to one prefix. With recorded experts,
        # samples of a group may have used different experts at the end of their common prompt.
        share = self.is_packed and self._shares and self._varlen is None
        share = share and not (self.replay is not None and EXPERTS_STREAM in columns.streams)
        share = share and self.exact is None  # it computes complete sequences
        packed = self.tensors(make_layout(columns, samples, share=share))
        media = [columns.media[sample] for sample in map(int, samples)] if columns.media else []
        if not any(media):
            return packed
        for sample in map(int, samples):
            self._check_media(columns, sample)
        assert self._image_feed is not None
        return replace(packed, images=self._image_feed.inputs(media, num_tokens=packed.causal_shape[1]))

    def _check_media(self, columns: Columns, sample: int) -> None:
        start = int(columns.starts[sample])
        tokens = columns.token_ids[start : start + int(columns.lengths[sample])].tolist()
        try:
            check_media(
                None if self._image_feed is None else self._image_feed.rules, tokens, columns.media[sample]
            )
        except ImageError as err:
            raise WireError(f"{sample_name(columns, sample)}: {err}") from err

    def cut(self, columns: Columns, samples: NDArray[np.int64], token_budget: int) -> list[NDArray[np.int64]]:
        """Microbatches of at most `token_budget` tokens each.

        Padding counts if the model computes it. If only attention computes it, padding may double the tokens.
        """
        if not self.is_packed:
            return cut_microbatches(columns, samples, token_budget, max_padded=token_budget)
        max_padded = 2 * token_budget if self._varlen is None else None
        return cut_microbatches(columns, samples, token_budget, max_padded=max_padded)

    def tensors(self, layout: Layout) -> LayoutTensors:
        """The layout on the model's device."""
        return layout_tensors(layout, device=self._device, varlen=self._varlen, is_packed=self.is_packed)

    def logits(self, packed: LayoutTensors) -> Tensor:
        """[P, V]: the logits that predict each trained token. Unless `is_packed`, the layout must not share
        prefixes."""
        return self._packed_logits(packed) if self.is_packed else self._padded_logits(packed)

    def outputs(self, packed: LayoutTensors) -> Tensor:
        """`logits` computed in the dtype of the recipe and converted to float32."""
        own, chosen = self._own_part(packed)
        return all_values(self.entry(partial(self._outputs, own)), own, chosen, len(packed.target_ids))

    def cut_tokens(self, grid: RankGrid) -> None:
        """Makes every further pass cut its tokens over the ranks of `train.shard.context`.

        Raises: ConfigError if the model cannot be computed this way.
        """
        where = f"train.shard.context = {grid.context}: {type(self._model).__name__}"
        if not self.is_packed:
            raise ConfigError(
                f"{where} is computed in padded rows, whose tokens cannot be cut; set train.shard.context: 1"
            )
        if self.replay is not None or self.exact is not None:
            what = "routers" if self.replay is not None else "exact logprobs"
            raise ConfigError(
                f"{where}: {what} are not supported for a part of the tokens; set train.shard.context: 1"
            )
        self._grid = grid

    def idle(self) -> tuple[Columns, LayoutTensors]:
        """A sample of a few tokens and its layout, for a pass whose result is discarded."""
        columns = columns_from_samples(_probe_samples(self._vocab_size)[-1:], vocab_size=self._vocab_size)
        self._is_idle = True
        return columns, self.layout(columns, np.arange(1))

    @torch.no_grad()
    def probe(self) -> Tensor:
        """The model's logits for synthetic samples, in float32."""
        columns = columns_from_samples(_probe_samples(self._vocab_size), vocab_size=self._vocab_size)
        layout = make_layout(columns, np.arange(len(columns.lengths)), share=self.is_packed)
        packed = self.tensors(layout)
        own, chosen = self._own_part(packed)
        logits = self._try(partial(self.logits, own))
        return all_values(logits, own, chosen, len(packed.target_ids))

    def _try(self, compute: Callable[[], Any]) -> Any:
        """A trial pass. It computes in float32, unless ranks gather layers in bfloat16."""
        is_low = self._dtype != "float32" and isinstance(next(self.entry.parameters()), DTensor)
        self._tolerance = 0.05 if is_low else _LOGIT_TOLERANCE
        with self._precision() if is_low else nullcontext():
            return self.entry(compute)

    def check_probe(self, before: Tensor) -> None:
        """Raises: ConfigError if the model's logits differ from those of an earlier `probe`."""
        difference = float((self.probe() - before).abs().max())
        if difference > self._tolerance * float(before.abs().max()):
            raise ConfigError(
                f"train.shard: when cut over ranks, {type(self._model).__name__} predicts other logits (by "
                f"{difference:.3g}), since it does not follow its family's plan or the packed layout; set "
                "train.shard.tensor and context to 1"
            )

    def logprobs(
        self, columns: Columns, packed: LayoutTensors, *, entropy: EntropyUse = "none", alternatives: str = ""
    ) -> tuple[Tensor, Tensor | None]:
        """[P] each: the logprobs of the trained tokens at their sampling temperature, and the entropies of
        the distributions that predict them, or None.

        `alternatives`: the stream [P, K] with the ids of K other tokens in place of each. The logprobs are
        then [P, 1 + K], with those of the other tokens after the trained one's.
        """
        if alternatives:
            others = torch.from_numpy(columns.streams[alternatives][packed.trained]).to(self._device).long()
            ids = torch.cat((packed.target_ids[:, None], others.view(len(others), -1)), 1)
            packed = replace(packed, target_ids=ids)
        temperatures = columns.temperatures[columns.sample_of(packed.trained)]
        if self.replay is not None:
            positions = packed.predict_idx if self.is_packed else _padded_rows(packed)
            counts = torch.is_grad_enabled() and not self._is_idle
            self.replay.begin(columns, packed.trained, positions, counts=counts)
            self._is_idle = False
        if self.exact is None:
            own, chosen = self._own_part(packed)
            if chosen is not None:
                temperatures = temperatures[chosen.cpu().numpy()]
            value, entropies = self.entry(partial(self._logprobs, own, temperatures, entropy))
            num_trained = len(packed.target_ids)
            entropies = None if entropies is None else all_values(entropies, own, chosen, num_trained)
            return all_values(value, own, chosen, num_trained), entropies
        value = self.exact.compute(packed, temperatures)
        if entropy == "none" and not torch.is_grad_enabled():
            return value, None
        usual, entropies = self.entry(partial(self._logprobs, packed, temperatures, entropy))
        return self.exact.with_gradient(value, usual), entropies

    def _own_part(self, packed: LayoutTensors) -> tuple[LayoutTensors, Tensor | None]:
        """The tokens that this rank computes, and the indices of the trained tokens that they predict; None
        for all."""
        grid = self._grid
        if grid is None:
            return packed, None
        return own_part(packed, rank=grid.model_rank, world=grid.context, group=grid.model_group)

    def _outputs(self, packed: LayoutTensors) -> Tensor:
        with self._precision():
            return self.logits(packed).float()

    def _logprobs(
        self, packed: LayoutTensors, temperatures: NDArray[np.float32], entropy: EntropyUse
    ) -> tuple[Tensor, Tensor | None]:
        hot = None
        if (temperatures != 1).any():
            hot = torch.from_numpy(temperatures).to(self._device, non_blocking=True)[:, None]
        is_wide = self._has_wide_head
        if is_wide or (self._has_plain_head and is_head_large(len(packed.target_ids), self._vocab_size)):
            with self._precision():
                hidden = self._hidden(packed)
            low = DTYPES[self._dtype]
            hidden = hidden.to(low) if hot is None else hidden.to(low) / hot
            hidden = hidden if is_wide else hidden.to(low)
            head = cast("Tensor", self._model.get_output_embeddings().weight)
            return chunked_logprobs(hidden, head, packed.target_ids, entropy=entropy, is_wide=is_wide)
        logits = self._outputs(packed)
        if hot is not None:
            logits = logits / hot
        logprobs = token_logprobs(logits, packed.target_ids)
        if entropy == "none":
            return logprobs, None
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "gradient"):
            return logprobs, entropies(logits)

    def _precision(self) -> torch.autocast:
        is_low = self._dtype == "bfloat16"
        return torch.autocast(torch.device(self._device).type, dtype=torch.bfloat16, enabled=is_low)

    def _hidden(self, packed: LayoutTensors) -> Tensor:
        """[P, D]: the input of the output head for each trained token."""
        body = self._model.base_model
        if self.is_packed:
            output = body(**_packed_inputs(packed))
            return output.last_hidden_state.squeeze(0).index_select(0, packed.predict_idx)
        with self._with_images(packed):
            hidden = body(**self._padded_inputs(packed)).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, _padded_rows(packed))

    def _packed_logits(self, packed: LayoutTensors) -> Tensor:
        output = self._model(**_packed_inputs(packed), logits_to_keep=packed.predict_idx)
        return output.logits.squeeze(0)

    def _padded_logits(self, packed: LayoutTensors) -> Tensor:
        with self._with_images(packed):
            logits = self._model(**self._padded_inputs(packed)).logits
        return logits.flatten(0, 1).index_select(0, _padded_rows(packed))

    def _padded_inputs(self, packed: LayoutTensors) -> dict[str, Any]:
        ids = packed.token_ids.index_select(0, packed.causal_idx).view(packed.causal_shape)
        is_token = torch.zeros(ids.numel(), dtype=torch.long, device=self._device)
        is_token[packed.row_idx] = 1
        inputs = {"input_ids": ids, "attention_mask": is_token.view_as(ids), "use_cache": False}
        if packed.images is not None:
            inputs |= {"position_ids": packed.images.positions, **packed.images.inputs}
        return inputs

    def _with_images(self, packed: LayoutTensors) -> AbstractContextManager[None]:
        if packed.images is None or self._image_feed is None:
            return nullcontext()
        return self._image_feed.showing(packed.images)

    @torch.no_grad()
    def _packed_is_exact(self) -> bool:
        """Compares both layouts on synthetic samples, and leaves the model with the attention that it
        needs."""
        columns = columns_from_samples(_probe_samples(self._vocab_size), vocab_size=self._vocab_size)
        everything = np.arange(len(columns.lengths))
        before = str(self._model.config._attn_implementation)
        alone = self.tensors(make_layout(columns, everything, share=False))
        padded = self._try(partial(self._padded_logits, alone))
        self._model.set_attn_implementation(_ATTENTION_NAME)
        try:
            shared = self.tensors(make_layout(columns, everything))
            packed = self._try(partial(self._packed_logits, shared))
        except _UnknownAttentionError as err:
            _log.info("no packed layout: %s", err)
            packed = torch.full_like(padded, torch.inf)
        if (packed - padded).abs().max() <= self._tolerance * padded.abs().max():
            return True
        self._model.set_attn_implementation(before)
        return False

    @torch.no_grad()
    def _is_head_plain(self) -> bool:
        """Whether the logits are just the product of the head's weight and the hidden states.

        If not, because the model scales or caps them or the head has a bias or adapters, the model itself
        computes the logits, all at once.
        """
        head = self._model.get_output_embeddings()
        parameters = dict(cast("nn.Module", head).named_parameters()) if head is not None else {}
        if set(parameters) != {"weight"} or self._model.base_model is self._model:
            return False
        columns = columns_from_samples(_probe_samples(self._vocab_size), vocab_size=self._vocab_size)
        layout = make_layout(columns, np.arange(len(columns.lengths)), share=self.is_packed)
        packed = self.tensors(layout)
        logits = self.logits(packed)
        product = self._hidden(packed) @ parameters["weight"].t()
        return product.shape == logits.shape and bool(
            (product - logits).abs().max() <= self._tolerance * logits.abs().max()
        )


def _packed_inputs(packed: LayoutTensors) -> dict[str, Any]:
    return {
        "input_ids": packed.token_ids[None],
        "position_ids": packed.position_ids[None],
        "use_cache": False,
        "packed_layout": packed,
    }


def _padded_rows(packed: LayoutTensors) -> Tensor:
    return packed.row_idx.index_select(0, packed.predict_idx)


class _UnknownAttentionError(Exception):
    """The model needs a kind of attention that the packed attention would compute wrongly."""


def _can_replace_attention(model: Any) -> bool:
    """Whether the model looks up its attention in transformers' registry, and every layer attends to all
    earlier tokens."""
    # Optional attributes of third-party classes: if one is absent, so is the feature.
    config = model.config.get_text_config()
    layer_types = cast("list[str]", getattr(config, "layer_types", None) or [])
    is_sparse = getattr(config, "index_topk", None) is not None
    is_full = not is_sparse and not set(layer_types) - {"full_attention"}
    return getattr(model, "_supports_attention_backend", False) and is_full


def _offer_attention(*, is_compiled: bool) -> None:
    """Adds our attention to transformers' registry."""
    from transformers import AttentionInterface

    AttentionInterface.register(
        _ATTENTION_NAME, exclude_from_compile(_packed_attention) if is_compiled else _packed_attention
    )


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: LayoutTensors | None = None,
    scaling: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention within causal rows, and of tails to their prefix and themselves; [1, H, N, D] in,
    [1, N, H, D] out. The signature is transformers'."""
    if packed_layout is None:
        raise _UnknownAttentionError("the model does not pass the layout to its attention")
    unknown = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
    if unknown:
        raise _UnknownAttentionError(f"the model's attention needs {', '.join(unknown)}")
    return attend(packed_layout, query, key, value, scaling=scaling), None


def _probe_samples(vocab_size: int) -> list[Sample]:
    """A group of three samples that share a prefix, and a single sample."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, vocab_size, 6)
    sizes = ((0, 6, 1), (0, 6, 3), (0, 6, 5), (1, 2, 6))
    samples: list[Sample] = []
    for group, num_prompt, num_sampled in sizes:
        ids = np.concatenate([shared[:num_prompt], rng.integers(0, vocab_size, num_sampled)])
        mask = np.arange(len(ids)) >= num_prompt
        trajectory = Trajectory(
            policy="probe",
            role="probe",
            token_ids=wire.column(ids, "int32"),
            mask=wire.column(mask, "uint8"),
            behavior_logprobs=wire.column(np.zeros(len(ids)), "float32"),
            versions=(VersionSpan(num_prompt, num_sampled, 0),),
            temperature=1.0,
            finish_reason="stop",
            turns=(),
            reward=0.0,
        )
        samples.append(
            Sample(
                group_id=group,
                episode_idx=len(samples),
                task_id="probe",
                trajectory=trajectory,
                advantages=(AdvantageSpan(num_prompt, len(ids), 1.0),),
            )
        )
    return samples
