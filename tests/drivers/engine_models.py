"""Tiny random models, and engines over them, for tests of generation."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from astraflow.models.loading import export_tensors
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types.host_tensors import HostTensor, WeightSnapshot

__all__ = [
    "CHARACTERS",
    "EOS",
    "configs",
    "make_engine_on",
    "make_model_folder",
    "make_random_model",
    "snapshot_of",
]

CHARACTERS = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789 .+=?"]
EOS = 1
_SHAPE: dict[str, Any] = {
    "vocab_size": len(CHARACTERS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


def configs() -> dict[str, Any]:
    """One small config of each kind of model; those above the line run lean, those below generic."""
    return {
        "qwen3": Qwen3Config(head_dim=16, tie_word_embeddings=True, **_SHAPE),
        "qwen2": Qwen2Config(tie_word_embeddings=False, **_SHAPE),
        "llama": LlamaConfig(tie_word_embeddings=False, attention_bias=True, mlp_bias=True, **_SHAPE),
        "llama3_rope": LlamaConfig(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            **_SHAPE,
        ),
        "mistral": MistralConfig(sliding_window=None, **_SHAPE),
        # --- generic
        "mistral_window": MistralConfig(sliding_window=8, **_SHAPE),
        "gptneox": GPTNeoXConfig(**{k: v for k, v in _SHAPE.items() if k != "num_key_value_heads"}),
    }


def make_random_model(kind: str = "qwen3", *, seed: int = 0) -> Any:
    """A model with random weights, large enough that attention matters and every norm and bias counts."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(configs()[kind]).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = 0.3 * torch.randn_like(parameter)
                parameter.copy_(noise if name.endswith("bias") else 1 + noise)
    return model


def make_model_folder(folder: Path, kind: str = "qwen3") -> Path:
    """config.json, generation_config.json and a character tokenizer; no weights."""
    model = make_random_model(kind)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder
    )
    return folder


def snapshot_of(model: Any, folder: Path, version: int = 0) -> WeightSnapshot:
    """A version of policy `actor`."""
    tensors: tuple[HostTensor, ...] = export_tensors(model)
    return WeightSnapshot("actor", version, tensors, folder)


def make_engine_on(snapshot: WeightSnapshot, **settings: Any) -> TorchEngine:
    """An engine with small settings."""
    return TorchEngine(TorchEngineConfig(**{"num_slots": 8, "max_context": 96, **settings}), snapshot)
