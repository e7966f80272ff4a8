"""What a model's `config.json` says about its family: what the torch engine and trainer can't do with it, and
why.

This file reads only configs, and transformers' plans for cutting layers, so a run can refuse a model before
any process starts. A family that is not named here is tried: the engine compares its own forward pass with
the model's before it serves.
"""

from collections.abc import Mapping
from typing import Any, cast

__all__ = [
    "cached_values",
    "context_limit",
    "engine_refusal",
    "exact_refusal",
    "family_of",
    "length_refusal",
    "quantization_of",
    "shard_refusal",
]

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in configs."""
_HEADS = ("num_attention_heads", "num_key_value_heads")
_ATTENTION_KINDS = {"full_attention", "attention", "sliding_attention", "chunked_attention"}
"""Values in `layer_types` of layers whose only state is keys and values."""
_RECURRENT = {
    "bailing_hybrid": "lightning attention",
    "bamba": "Mamba2",
    "falcon_h1": "Mamba2",
    "falcon_mamba": "Mamba",
    "glm5_next": "Kimi delta attention",
    "glm5_next_text": "Kimi delta attention",
    "granitemoehybrid": "Mamba2",
    "jamba": "Mamba",
    "kimi_linear": "Kimi delta attention",
    "lfm2": "short convolutions",
    "lfm2_moe": "short convolutions",
    "mamba": "Mamba",
    "mamba2": "Mamba2",
    "minimax": "lightning attention",
    "nemotron_h": "Mamba2",
    "olmo_hybrid": "gated delta nets",
    "qwen3_5": "gated delta nets",
    "qwen3_5_moe": "gated delta nets",
    "qwen3_5_moe_text": "gated delta nets",
    "qwen3_5_text": "gated delta nets",
    "qwen3_next": "gated delta nets",
    "recurrent_gemma": "linear recurrent units",
    "rwkv": "RWKV",
    "xlstm": "xLSTM",
    "zamba": "Mamba",
    "zamba2": "Mamba2",
}
"""Family -> its layers that keep a state of fixed size instead of keys and values."""
_OWN_ATTENTION = {
    "bloom",
    "codegen",
    "diffllama",
    "falcon",
    "gpt_neo",
    "gptj",
    "mpt",
    "nemotron",
    "stablelm",
}
"""Families whose code in transformers computes attention without its `AttentionInterface`, or does not pass
on the arguments that the engine's attention function needs."""
_UNEVEN = {"gemma3n", "gemma3n_text", "gemma4", "gemma4_text"}
"""Families whose layers have heads of different sizes, or share their keys."""
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Rotary kinds that change the angle of every position once a sequence is longer than a limit."""
_INVARIANT = ("llama", "mistral", "qwen2", "qwen3")
"""Families that the add-on for `exact: true` supports."""


def family_of(config: Mapping[str, Any]) -> str:
    """The family of the text model, e.g. `qwen3_moe`; empty if the config does not name one."""
    return str(_text(config).get("model_type", ""))


def quantization_of(config: Mapping[str, Any]) -> str:
    """How the weights are quantized, e.g. `mxfp4`; empty if they are not quantized."""
    keys = ("quantization_config", "compression_config")
    parts = (config, _text(config))
    settings: object = next((part[key] for part in parts for key in keys if part.get(key)), None)
    if not isinstance(settings, dict):
        return "unknown" if settings else ""
    return str(cast("dict[str, Any]", settings).get("quant_method", "unknown"))


def engine_refusal(config: Mapping[str, Any]) -> str:
    """Why the torch engine cannot generate with the model, as a clause; empty if no reason is known."""
    text = _text(config)
    family = family_of(config)
    kinds = cast("list[str]", text.get("layer_types") or text.get("layers_block_type") or [])
    others = sorted(set(kinds) - _ATTENTION_KINDS)
    # A model of a hybrid family may have only attention layers, if its config lists the layers.
    if family in _RECURRENT and (others or not kinds):
        return (
            f"its layers ({_RECURRENT[family]}) keep a recurrent state, but the torch engine's cache holds "
            "only keys and values"
        )
    if others:
        return f"it has layers of kind {others[0]!r}, but the torch engine's cache holds only keys and values"
    if text.get("index_topk"):
        return "its layers attend to chosen keys (index_topk), but the torch engine attends to all keys"
    if family in _OWN_ATTENTION:
        return "its code in transformers computes attention itself, so it can't use the torch engine's cache"
    if family in _UNEVEN:
        return (
            "its layers have different heads or share keys, but the torch engine has one cache for all layers"
        )
    return ""


def context_limit(config: Mapping[str, Any]) -> int:
    """Length of the longest sequence that the model supports, and whose logprobs do not depend on the batch;
    0 if its config does not say."""
    text = _text(config)
    size = int(text.get("max_position_embeddings") or text.get("n_positions") or 0)
    kind, limit = _rope(text)
    return limit if kind in _LENGTH_DEPENDENT_ROPE and limit else size


def cached_values(config: Mapping[str, Any]) -> int:
    """Number of values that the embedded engine's KV cache holds per token; 0 if the config doesn't say."""
    text = _text(config)
    num_layers = int(text.get("num_hidden_layers") or text.get("n_layer") or 0)
    num_heads = int(text.get("num_attention_heads") or text.get("n_head") or 0)
    if not num_layers or not num_heads:
        return 0
    if key_dim := int(text.get("qk_nope_head_dim") or 0):  # latent attention, whose cache is not compressed
        dims = key_dim + int(text.get("qk_rope_head_dim") or 0) + int(text.get("v_head_dim") or key_dim)
        return num_layers * num_heads * dims
    hidden = int(text.get("hidden_size") or text.get("n_embd") or 0)
    dim = int(text.get("head_dim") or hidden // num_heads)
    return num_layers * int(text.get("num_key_value_heads") or num_heads) * 2 * dim


def _rope(text: Mapping[str, Any]) -> tuple[str, int]:
    """Kind of the rotary positions, and the length that the model was originally trained for; 0 if
    unknown."""
    rope = cast("Mapping[str, Any]", text.get("rope_parameters") or text.get("rope_scaling") or {})
    limit = (
        rope.get("original_max_position_embeddings")
        or text.get("original_max_position_embeddings")
        or text.get("max_position_embeddings")
    )
    return str(rope.get("rope_type") or rope.get("type") or "default"), int(limit or 0)


def length_refusal(config: Mapping[str, Any], *, max_context: int) -> str:
    """Why sequences of `max_context` tokens cannot be trained with exact logprobs; empty if they can."""
    kind, limit = _rope(_text(config))
    if kind not in _LENGTH_DEPENDENT_ROPE or not limit or max_context <= limit:
        return ""
    return (
        f"beyond {limit} tokens, its {kind} positions, and so the logprobs, depend on the longest sequence "
        f"in the batch; set rollout.engine.max_context to at most {limit}"
    )


def exact_refusal(config: Mapping[str, Any]) -> str:
    """Why `exact: true` is not guaranteed for the model, as a clause; empty if it is."""
    text = _text(config)
    if family_of(config) not in _INVARIANT:
        return f"only {', '.join(_INVARIANT)} are computed batch-invariantly"
    if (activation := text.get("hidden_act", "silu")) != "silu":
        return f"its activation is {activation!r}, but only silu is computed batch-invariantly"
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        return f"its attention covers a window of {text['sliding_window']} positions, not all"
    rope = cast("Mapping[str, Any]", text.get("rope_parameters") or text.get("rope_scaling") or {})
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind in _LENGTH_DEPENDENT_ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"its rotary embeddings ({kind}) are not the same for every position and length"
    return ""


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model, for which multimodal models have a separate section."""
    return cast("Mapping[str, Any]", config.get("text_config") or config)


def shard_refusal(config: Mapping[str, Any], *, tensor: int, expert: int, context: int) -> str:
    """Why the model's layers cannot be cut over this many ranks; empty if no reason is known.

    The text starts with the setting's name.
    """
    text = _text(config)
    family = family_of(config)
    num_experts = next((text[key] for key in _NUM_EXPERTS if isinstance(text.get(key), int)), 0)
    if context > 1 and num_experts:
        return f"context = {context}: a mixture of experts can't be cut along the context; set context: 1"
    if context > 1:
        return _uneven("context", context, text, _HEADS)
    if tensor == 1:
        return ""
    if not _has_plan(family):
        return (
            f"tensor = {tensor}: transformers has no plan for cutting layers of the family {family!r} "
            "(base_model_tp_plan); set tensor: 1, which leaves FSDP2"
        )
    if expert > 1 and not num_experts:
        return f"expert = {expert}: the model is not a mixture of experts; set expert: 1"
    if reason := _uneven("tensor", tensor, text, _HEADS if num_experts else (*_HEADS, "intermediate_size")):
        return reason
    if num_experts % expert:
        return f"expert = {expert} does not divide the model's {num_experts} experts; choose a divisor"
    return ""


def _uneven(setting: str, number: int, text: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """Which of the model's sizes can't be cut into `number` parts; empty if all can."""
    for key in keys:
        size = text.get(key)
        if isinstance(size, int) and size % number:
            return f"{setting} = {number} does not divide the model's {key} = {size}; choose a divisor"
    return ""


def _has_plan(family: str) -> bool:
    """Whether transformers has a plan for a family: which projections are cut by rows, which by columns."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = cast("Mapping[str, Any]", CONFIG_MAPPING)
    return family in known and bool(known[family].base_model_tp_plan)
