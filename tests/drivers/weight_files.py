"""A file of weights without any, and small model folders that are written without a model library."""

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.models.file_layout import weights_by_name
from astraflow.models.loading import build_model
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.snapshot import write_safetensors

__all__ = ["NO_TENSORS", "SIZES", "make_weights", "write_config", "write_model_folder", "write_tokenizer"]

NO_TENSORS = b"\x02" + bytes(7) + b"{}"
"""A safetensors file whose header names no tensor."""
_VOCAB = 4
SIZES: dict[str, Any] = {
    "vocab_size": _VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
"""The keys of a config that make a model tiny, in most families."""
_CONFIG: dict[str, Any] = {**SIZES, "model_type": "qwen3", "head_dim": 4, "tie_word_embeddings": True}
_SHAPES = {
    "model.embed_tokens.weight": (_VOCAB, 8),
    "model.norm.weight": (8,),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.mlp.down_proj.weight": (8, 8),
    "model.layers.0.mlp.gate_proj.weight": (8, 8),
    "model.layers.0.mlp.up_proj.weight": (8, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.self_attn.k_norm.weight": (4,),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_norm.weight": (4,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
}
_TOKENIZER: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "1": 1, "+": 2}, "unk_token": "<unk>"},
}  # fmt: skip


def make_weights(seed: int = 0) -> dict[str, HostTensor]:
    """Random weights of the model in `write_model_folder`, by name."""
    random = np.random.default_rng(seed)
    return {
        name: HostTensor(
            name, shape, "float32", random.normal(size=prod(shape)).astype(np.float32).view(np.uint8)
        )
        for name, shape in _SHAPES.items()
    }


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """Gives a folder a config, and weights of this model that are 0 and take no room on the disk."""
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, weight in weights_by_name(build_model(folder, dtype="float32", device="meta")):
        start = end
        end += 4 * weight.numel()
        header[name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    return folder


def write_model_folder(folder: Path, config: str = "{}") -> Path:
    """Makes a folder with a model of a thousand weights and a tokenizer of three words. `config`: keys that
    differ from a tiny Qwen3's, as JSON."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **json.loads(config)}))
    write_safetensors(folder / "model.safetensors", tuple(make_weights().values()))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Gives a folder a tokenizer of three words, with a chat template."""
    (folder / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "chat_template": "{{ messages }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
