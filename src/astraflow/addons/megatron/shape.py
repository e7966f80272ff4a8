"""The numbers of a model that megatron-core builds, read from the `config.json` of its folder. No torch.

Refuses what the mapping doesn't know, before anything is loaded.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.errors import ConfigError, DataError

__all__ = ["ModelShape", "read_shape"]

_FAMILIES = ("llama", "qwen2", "qwen3")
_FULL = "full_attention"
_PLAIN_ROPE = ("default", "linear", "llama3")
"""Kinds of rotary embeddings whose frequencies are constant and whose queries and keys are not scaled."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder with grouped queries, RMS norms, and a gated MLP."""

    num_layers: int
    width: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    eps: float
    is_tied: bool
    """Whether the output head is the embedding table."""
    has_qkv_bias: bool
    has_qk_norm: bool

    def check_cut(self, *, tensor: int, pipeline: int, context: int = 1) -> None:
        """Raises: ConfigError that names the size that the ranks don't divide."""
        heads = {"num_key_value_heads": self.num_key_heads, "num_attention_heads": self.num_heads}
        widths = {"intermediate_size": self.mlp_width, "vocab_size": self.vocab_size}
        cuts = {
            f"tensor = {tensor}": (tensor, heads | widths),
            f"tensor x context = {tensor} x {context}": (tensor * context, heads),
            f"pipeline = {pipeline}": (pipeline, {"num_hidden_layers": self.num_layers}),
        }
        for key, (number, sizes) in cuts.items():
            for name, size in sizes.items():
                if size % number:
                    raise ConfigError(
                        f"train.backend.{key} does not divide the model's {name} = {size}; choose a divisor"
                    )

    def num_weights(self, *, stage: int = 0, tensor: int = 1, pipeline: int = 1) -> int:
        """Number of weights of a rank in a stage."""
        num_heads = self.num_heads + 2 * self.num_key_heads
        attention = self.head_dim * self.width * (num_heads + self.num_heads)
        attention += self.head_dim * num_heads * self.has_qkv_bias
        norms = 2 * self.width + 2 * self.head_dim * self.has_qk_norm
        layer = (attention + 3 * self.mlp_width * self.width) // tensor + norms
        is_last = stage == pipeline - 1
        # The last of several stages has a copy of a tied table.
        num_tables = (stage == 0) + (is_last and not (self.is_tied and stage == 0))
        tables = num_tables * self.vocab_size * self.width // tensor
        return self.num_layers // pipeline * layer + tables + self.width * is_last


def read_shape(folder: Path) -> ModelShape:
    """Reads the shape of a model folder.

    Raises: DataError if the folder has no readable `config.json`; ConfigError if the model has a part that is
    not mapped.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        _check_known(config)
        num_heads = int(config["num_attention_heads"])
        return ModelShape(
            num_layers=int(config["num_hidden_layers"]),
            width=int(config["hidden_size"]),
            num_heads=num_heads,
            num_key_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
            mlp_width=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            has_qkv_bias=config["model_type"] == "qwen2",
            has_qk_norm=config["model_type"] == "qwen3",
        )
    except (OSError, ValueError, KeyError, TypeError) as err:
        if isinstance(err, ConfigError):
            raise
        raise DataError(f"model folder {folder}: its config.json does not describe a model: {err!r}") from err


def _check_known(config: dict[str, Any]) -> None:
    """Raises: ConfigError that names a part of the model that is not mapped to megatron-core."""
    family = config.get("model_type")
    if family not in _FAMILIES:
        has_experts = any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        why = "; experts need layers of Transformer Engine, which this backend does without"
        _refuse("model_type", family, f"mapped are {', '.join(_FAMILIES)}{why if has_experts else ''}")
    if config.get("hidden_act", "silu") != "silu":
        _refuse("hidden_act", config["hidden_act"], "mapped is silu")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            _refuse(key, True, "mapped are layers without these biases")
    unknown = set(config.get("layer_types") or ()) - {_FULL}
    if unknown or config.get("use_sliding_window"):
        kind = ", ".join(sorted(unknown)) or "sliding_attention"
        _refuse("layer_types", kind, f"mapped is {_FULL}")
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in _PLAIN_ROPE or float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        _refuse("rope_parameters", rope, f"mapped are rope_type {', '.join(_PLAIN_ROPE)} of whole heads")


def _refuse(key: str, value: Any, known: str) -> None:
    raise ConfigError(
        f"train.backend.name: megatron: the model has {key} = {value!r}, but {known}; use "
        "train.backend.name: torch"
    )
