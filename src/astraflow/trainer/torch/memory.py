"""Computes a trainer's memory need before its first step, and measures what is free.

The need of a pass is an estimate for a microbatch of `train.token_budget` tokens, by formulas that are
accurate to about a quarter for Llama-like decoders.
"""

from typing import Any

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
    is_split = grid is not None and backend.device != "cpu"
    num_weights = _num_held(list(model.parameters()), model, grid if is_split else None)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_trained = _num_held(trained, model, grid if is_split else None)
    averages = 2 * num_trained * (2 if backend.optimizer_state == "bfloat16" else 4)
    published = sum(p.numel() for p in model.parameters()) * (2 if backend.publish_dtype == "bfloat16" else 4)
    published /= config.ranks if is_split else 1
    num_token_parts = 1 if grid is None or not is_split else grid.context
    sizes = _sizes(model)
    num_bytes = 2 if backend.dtype == "bfloat16" else 4
    tensor = 1 if grid is None or not is_split else grid.tensor
    activations = activation_bytes(sizes, num_tokens=config.token_budget, num_bytes=num_bytes, tensor=tensor)
    whole, recomputed = (size / num_token_parts for size in activations)
    is_kept = backend.activations == "keep"
    lasting = {
        "weights": 4.0 * num_weights,
        "gradients": 4.0 * num_trained,
        "optimizer": 0.0 if backend.offload_optimizer else float(averages),
    }
    passing = {
        "weights in bfloat16": 2.0 * num_weights if backend.dtype == "bfloat16" and not is_split else 0.0,
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
    num = 0.0
    for parameter in parameters:
        is_expert = parameter.ndim == _EXPERTS_NDIM
        is_cut = id(parameter) in in_layers and (grid.cuts_experts or not is_expert)
        num += parameter.numel() / grid.num_shards / (grid.tensor if is_cut else 1)
    return num


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


def _sizes(model: nn.Module) -> Any:
    """The config of the text model, which multimodal models nest in theirs."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config
