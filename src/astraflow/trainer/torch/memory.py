"""Computes a trainer's memory need before its first step, by part, and which settings reduce it.

The parts that last for the whole run (weights, gradients, optimizer) are exact. If they alone do not fit, the
trainer does not start. The need of a pass is an estimate for a microbatch of `train.token_budget` tokens, by
formulas that are accurate to about a quarter for Llama-like decoders. If only the pass does not fit, a
warning is logged.

Legend: L layers, D width of the hidden states, I width of the MLP, V vocabulary.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from astraflow.errors import ConfigError
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.torch.head import num_chunk_tokens
from astraflow.trainer.torch.parallel.grid import RankGrid
from astraflow.trainer.torch.parallel.recompute import layers_of

__all__ = ["MemoryNeed", "check_memory", "free_bytes", "memory_need"]

_log = logging.getLogger(__name__)
_EXPERTS_NDIM = 3
"""Number of dimensions of a weight that holds all experts of a layer."""
_HEAD_COPIES = 3
"""Copies of a chunk's logits at the peak, in float32."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes needed on the trainer's device, by purpose.

    Example: `memory_need(model, config).lasting` -> `{"weights": 6.9e9, "gradients": 6.9e9, ...}`.
    """

    lasting: Mapping[str, float]
    """For the whole run."""
    passing: Mapping[str, float]
    """During a pass, or while a version is exported."""
    savings: Mapping[str, float]
    """Bytes that a change of a setting would save."""

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.lasting.values()) + sum(self.passing.values())

    def text(self) -> str:
        """The parts, largest first, and the two settings that save most."""
        parts = sorted({**self.lasting, **self.passing}.items(), key=lambda part: -part[1])
        named = ", ".join(f"{name} {_gb(size)}" for name, size in parts if size >= 0.01 * self.total)
        best = sorted(self.savings.items(), key=lambda saving: -saving[1])[:2]
        advice = " or ".join(f"{setting} (saves {_gb(size)})" for setting, size in best)
        return f"{named}; to save most, set {advice}"


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
    kept, recomputed = (size / num_token_parts for size in _activations(model, config))
    is_kept = backend.activations == "keep"
    vocab_size = _vocab_size(model)
    chunk = min(config.token_budget, num_chunk_tokens(vocab_size)) * vocab_size
    lasting = {
        "weights": 4.0 * num_weights,
        "gradients": 4.0 * num_trained,
        "optimizer": 0.0 if backend.offload_optimizer else float(averages),
    }
    passing = {
        "weights in bfloat16": 2.0 * num_weights if backend.dtype == "bfloat16" and not is_split else 0.0,
        f"activations of {config.token_budget} tokens": kept if is_kept else recomputed,
        "logits": 4.0 * _HEAD_COPIES * chunk,
        "export": 0.0 if backend.device == "cpu" or backend.lora.rank else float(published),
    }
    savings = {
        "train.backend.activations: recompute": kept - recomputed if is_kept else 0.0,
        f"train.token_budget: {max(1, config.token_budget // 2)}": (kept if is_kept else recomputed) / 2,
        "train.backend.offload_optimizer: true": lasting["optimizer"],
        "train.backend.lora.rank: 16": 0.0 if backend.lora.rank else 12.0 * num_trained,
    }
    return MemoryNeed(lasting, passing, savings)


def check_memory(need: MemoryNeed, free: float) -> None:
    """Compares a need with the bytes that were free before the model was loaded.

    Raises: ConfigError if the run cannot fit. Warns if a microbatch as large as the budget may not.
    """
    lasting = sum(need.lasting.values())
    if lasting > free:
        raise ConfigError(
            f"train: the model does not fit: weights, gradients and optimizer need {_gb(lasting)}, but only "
            f"{_gb(free)} are free: {need.text()}"
        )
    if need.total > free:
        _log.warning(
            "a full microbatch may not fit: about %s are needed, %s are free: %s",
            _gb(need.total), _gb(free), need.text(),
        )  # fmt: skip


def free_bytes(device: str) -> float:
    """Free memory of a device; infinity if unknown."""
    if torch.device(device).type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if torch.device(device).type != "cpu" or not meminfo.is_file():
        return float("inf")
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return float(lines["MemAvailable"].split()[0]) * 1024


def _num_held(parameters: list[nn.Parameter], model: nn.Module, grid: RankGrid | None) -> float:
    """Number of elements of some parameters on one rank: its share of the rows, of its part of cut layers."""
    if grid is None:
        return float(sum(parameter.numel() for parameter in parameters))
    in_layers = {id(parameter) for layer in layers_of(model) for parameter in layer.parameters()}
    found = 0.0
    for parameter in parameters:
        is_expert = parameter.ndim == _EXPERTS_NDIM
        is_cut = id(parameter) in in_layers and (grid.cuts_experts or not is_expert)
        found += parameter.numel() / grid.num_shards / (grid.tensor if is_cut else 1)
    return found


def _activations(model: nn.Module, config: TrainConfig) -> tuple[float, float]:
    """Bytes that a full microbatch keeps: of all layers, and if the layers are recomputed."""
    sizes = _sizes(model)  # a family with other attribute names counts as small
    width = int(getattr(sizes, "hidden_size", 0))
    num_layers = int(getattr(sizes, "num_hidden_layers", 0))
    mlp = int(getattr(sizes, "intermediate_size", 0) or 4 * width)
    heads = int(getattr(sizes, "num_attention_heads", 0))
    dim = _head_dim(sizes) or width // max(1, heads)
    key_heads = int(getattr(sizes, "num_key_value_heads", 0) or heads)
    size = 2 if isinstance(config.backend, TorchBackendConfig) and config.backend.dtype == "bfloat16" else 4
    # Six tensors of the residual stream and its norms in float32; four of the MLP, seven of the attention.
    a_layer = 4 * 6 * width + size * (4 * mlp + (3 * heads + 4 * key_heads) * dim)
    tokens = config.token_budget
    return float(tokens * num_layers * a_layer), float(tokens * (num_layers * 4 * width + a_layer))


def _head_dim(sizes: Any) -> int:
    """0 if the config has none, or one per layer as in Gemma 4, for which transformers raises
    RuntimeError."""
    try:
        return int(getattr(sizes, "head_dim", 0) or 0)
    except RuntimeError:
        return 0


def _vocab_size(model: nn.Module) -> int:
    return int(getattr(_sizes(model), "vocab_size", 0)) or 1


def _sizes(model: nn.Module) -> Any:
    """The config of the text model, which multimodal models nest in theirs."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
