"""Computes a trainer's memory need before its first step, and measures what is free.

The need of a pass is an estimate for a microbatch of `train.token_budget` tokens, by formulas that are
accurate to about a quarter for Llama-like decoders.
"""

from typing import Any, cast

import torch
from torch import nn

from astraflow.service.memory import available_bytes
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.memory_need import MemoryNeed
from astraflow.trainer.torch.head import num_chunk_tokens
from astraflow.trainer.torch.layers import layers_of
from astraflow.trainer.torch.parallel.grid import RankGrid

__all__ = ["activation_bytes", "free_bytes", "logit_bytes", "memory_need"]

_EXPERTS_NDIM = 3
"""Number of dimensions of a weight that holds all experts of a layer."""
_HEAD_COPIES = 3
"""Copies of a chunk's logits at the peak, in float32."""


def memory_need(model: nn.Module, config: TrainConfig, *, grid: RankGrid | None = None) -> MemoryNeed:
    """The memory need of training a model with these settings, without frozen models and a critic.

    On GPUs, each rank has its own device and a share of the weights; on a CPU, all ranks share its memory.
    """
    backend = config.backend
    assert isinstance(backend, TorchBackendConfig)
    split = None if backend.device == "cpu" else grid
    num_weights = _num_held(list(model.parameters()), model, split)
    num_trained = _num_held([p for p in model.parameters() if p.requires_grad], model, split)
    averages = 2 * num_trained * (2 if backend.optimizer_state == "bfloat16" else 4)
    published = sum(p.numel() for p in model.parameters()) * (2 if backend.publish_dtype == "bfloat16" else 4)
    published /= config.ranks if split else 1
    sizes = cast("Any", model).config.get_text_config()
    num_bytes = 2 if backend.dtype == "bfloat16" else 4
    tensor, context = (split.tensor, split.context) if split else (1, 1)
    activations = activation_bytes(sizes, num_tokens=config.token_budget, num_bytes=num_bytes, tensor=tensor)
    whole, recomputed = (size / context for size in activations)
    is_kept = backend.activations == "keep"
    lasting = {
        "weights": 4.0 * num_weights,
        "gradients": 4.0 * num_trained,
        "optimizer": 0.0 if backend.offload_optimizer else float(averages),
    }
    passing = {
        "copies of weights": _copied_bytes(model, split, num_bytes, is_kept=is_kept),
        f"activations of {config.token_budget} tokens": whole if is_kept else recomputed,
        "logits": logit_bytes(sizes, num_tokens=config.token_budget),
        "export": 0.0 if backend.device == "cpu" or backend.lora.rank else float(published),
    }
    savings = {
        "train.backend.activations: recompute": whole - recomputed if is_kept else 0.0,
        f"train.token_budget: {max(1, config.token_budget // 2)}": (whole if is_kept else recomputed) / 2,
        "train.backend.offload_optimizer: true": lasting["optimizer"],
        "train.backend.lora.rank: 16": (
            0.0 if backend.lora.rank else lasting["gradients"] + lasting["optimizer"]
        ),
    }
    return MemoryNeed(lasting, passing, savings)


def free_bytes(device: str) -> float:
    """Free memory of a device; infinity if unknown."""
    if torch.device(device).type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(available_bytes()) if torch.device(device).type == "cpu" else float("inf")


def _num_held(parameters: list[nn.Parameter], model: nn.Module, grid: RankGrid | None) -> float:
    """Number of elements that one rank holds: its shard of the rows, further divided by `grid.tensor` for
    layers split by tensor parallelism."""
    if grid is None:
        return float(sum(parameter.numel() for parameter in parameters))
    in_layers = {id(parameter) for layer in layers_of(model) for parameter in layer.parameters()}
    cut = [p for p in parameters if id(p) in in_layers and (grid.cuts_experts or p.ndim != _EXPERTS_NDIM)]
    num_cut = sum(p.numel() for p in cut)
    return (sum(p.numel() for p in parameters) - num_cut + num_cut / grid.tensor) / grid.num_shards


def _copied_bytes(model: nn.Module, grid: RankGrid | None, num_bytes: int, *, is_kept: bool) -> float:
    """What a pass copies of the weights. `is_kept`: whether bfloat16 weights stay as all activations do."""
    layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    others = sum(p.numel() for p in model.parameters()) - sum(layers)
    largest = max(layers, default=0)
    if grid is None or grid.num_shards == 1:
        return 2.0 * (others + (sum(layers) if is_kept else 2 * largest)) if num_bytes == 2 else 0.0
    # FSDP2 gathers the weights outside of layers in float32, and their gradients; two layers; and the
    # gradients of one of them, which are summed in float32.
    return 8.0 * others + (3 * num_bytes + 4) * largest / grid.tensor


def activation_bytes(sizes: Any, *, num_tokens: int, num_bytes: int, tensor: int = 1) -> tuple[float, float]:
    """Returns the bytes that a microbatch keeps: (with all activations kept, with layers recomputed).

    `sizes`: a transformers config. `num_bytes`: bytes per element in the layers. `tensor`: number of ranks
    that share a layer's heads and MLP.
    """
    # A family with other attribute names counts as small.
    width = int(getattr(sizes, "hidden_size", 0))
    num_layers = int(getattr(sizes, "num_hidden_layers", 0))
    mlp = int(getattr(sizes, "intermediate_size", 0) or 4 * width)
    heads = int(getattr(sizes, "num_attention_heads", 0))
    dim = _head_dim(sizes) or width // max(1, heads)
    key_heads = int(getattr(sizes, "num_key_value_heads", 0) or heads)
    # Six tensors of the residual stream and its norms in float32; four of the MLP, seven of the attention.
    a_layer = 4 * 6 * width + num_bytes * (4 * mlp + (3 * heads + 4 * key_heads) * dim) / tensor
    return float(num_tokens * num_layers * a_layer), float(num_tokens * (num_layers * 4 * width + a_layer))


def logit_bytes(sizes: Any, *, num_tokens: int) -> float:
    """Bytes of the logits that are computed at once."""
    vocab_size = int(getattr(sizes, "vocab_size", 0)) or 1
    return 4.0 * _HEAD_COPIES * min(num_tokens, num_chunk_tokens(vocab_size)) * vocab_size


def _head_dim(sizes: Any) -> int:
    """0 if the config has none, or one per layer as in Gemma 4, for which transformers raises
    RuntimeError."""
    try:
        return int(getattr(sizes, "head_dim", 0) or 0)
    except RuntimeError:
        return 0
