"""Builds this rank's stage of megatron-core's GPTModel for a model folder.

Layers are megatron-core's own, without Transformer Engine. Three parts are replaced, through the places that
megatron-core has for this:

- Attention computes the packed rows of the torch backend, so that sequences need no padding.
- Rotary embeddings follow each token's position in its own sequence, with transformers' frequencies.
- The last stage returns hidden states. The caller computes logprobs from those that predict trained tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from astraflow.addons.megatron.config import MegatronBackendConfig
from astraflow.addons.megatron.groups import ModelGroups
from astraflow.addons.megatron.library import megatron
from astraflow.addons.megatron.shape import ModelShape
from astraflow.models.file_layout import file_views
from astraflow.models.loading import DTYPES, empty_causal_lm
from astraflow.trainer.torch.packed_rows import LayoutTensors, attend

__all__ = ["PackedPass", "Stage", "build_stage"]


@dataclass(slots=True)
class PackedPass:
    """What megatron-core hands through to every layer as `packed_seq_params`; it reads all but `layout`."""

    layout: LayoutTensors
    qkv_format: str = "sbhd"
    cp_group: Any = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank's part of a model."""

    model: Any
    """The GPTModel."""
    config: Any
    """Its TransformerConfig."""
    shapes: dict[str, tuple[int, ...]]
    """Name and shape of each weight of the folder, in its order."""


def build_stage(
    folder: Path, shape: ModelShape, groups: ModelGroups, backend: MegatronBackendConfig
) -> Stage:
    """Builds this rank's stage with weights that have no values yet.

    Raises: DataError if transformers can't read the folder's config.
    """
    theirs: Any = empty_causal_lm(folder, device="meta")
    shapes = {view.name: view.shape for view in file_views(theirs)}
    rotary = type(theirs.model.rotary_emb)(theirs.config)
    config = _transformer_config(shape, groups, backend)
    spec = megatron().get_gpt_layer_local_spec(qk_layernorm=shape.has_qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = _PackedAttention
    model = megatron().GPTModel(
        config,
        spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=1,  # for learned positions only
        pre_process=groups.stage == 0,
        post_process=groups.is_last_stage,
        share_embeddings_and_output_weights=shape.is_tied,
        position_embedding_type="rope",
    )
    model.rotary_pos_emb = _PackedRotary(cast("Tensor", rotary.inv_freq).to(groups.device))
    if groups.is_last_stage:
        model.output_layer.forward = _keep_hidden
    return Stage(model.to(groups.device), config, shapes)


def _transformer_config(shape: ModelShape, groups: ModelGroups, backend: MegatronBackendConfig) -> Any:
    dtype = DTYPES[backend.dtype]
    recompute: dict[str, Any] = {}
    if backend.activations == "recompute":
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return megatron().TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.width,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_key_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.mlp_width,
        normalization="RMSNorm",
        layernorm_epsilon=shape.eps,
        qk_layernorm=shape.has_qk_norm,
        add_bias_linear=False,
        add_qkv_bias=shape.has_qkv_bias,
        gated_linear_unit=True,
        activation_func=silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=groups.tensor,
        pipeline_model_parallel_size=groups.pipeline,
        context_parallel_size=groups.context,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one with such lengths, also without experts
        calculate_per_token_loss=True,  # gradients are summed over ranks, not averaged
        perform_initialization=False,
        use_cpu_initialization=groups.device.type == "cpu",
        bias_dropout_fusion=False,
        **recompute,
    )


class _PackedAttention(nn.Module):
    """Attention within each sequence of a packed row. Has no weights."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedPass, **__: Any
    ) -> Tensor:
        """[N, 1, H, D] each -> [N, 1, H * D], where N are this rank's tokens."""
        heads = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        attended = attend(packed_seq_params.layout, *heads, scaling=None)
        return (
            attended.to(query.dtype).transpose(0, 1).flatten(2)
        )  # on CPUs, attention is computed in float32


class _PackedRotary(nn.Module):
    """The angles of rotary embeddings at the positions of a packed row."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self._frequencies = (frequencies,)  # hidden from the module: a cast of the model must not round them

    def get_rotary_seq_len(self, *args: Any) -> Tensor:
        """The positions [N]; megatron-core passes them to `forward` as they are."""
        return cast("PackedPass", args[-1]).layout.position_ids

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """[N, 1, 1, D]."""
        angles = positions[:, None].float() * self._frequencies[0].float()
        return torch.cat((angles, angles), dim=-1)[:, None, None]


def _keep_hidden(hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Stands for the output layer, whose weight the caller uses."""
    return hidden, None
