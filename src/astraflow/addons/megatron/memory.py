"""The memory that a rank needs with megatron-core's buffers and its distributed optimizer.

weights      in `dtype`, in one buffer
gradients    float32, in one buffer for the whole run, on every rank that has the weights
optimizer    two averages in float32, and a float32 copy of the weights with `bfloat16`; shared by the
             ranks that have the same weights
"""

from pathlib import Path
from types import SimpleNamespace

from astraflow.addons.megatron.checks import open_shape
from astraflow.addons.megatron.config import MegatronBackendConfig
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.memory_need import MemoryNeed

__all__ = ["lasting_bytes", "rank_need"]


def lasting_bytes(train: TrainConfig, folder: Path) -> dict[str, float]:
    """What the rank with most weights keeps for the whole run, without frozen models.

    Raises: ConfigError if Megatron can't train this model; DataError if the folder has none.
    """
    backend = train.backend
    assert isinstance(backend, MegatronBackendConfig)
    shape = open_shape(train, folder)
    tensor = backend.tensor
    pipeline = backend.pipeline
    num_held = max(
        shape.num_weights(stage=stage, tensor=tensor, pipeline=pipeline) for stage in range(pipeline)
    )
    is_low = backend.dtype == "bfloat16"
    return {
        "weights": (2.0 if is_low else 4.0) * num_held,
        "gradients": 4.0 * num_held,
        "optimizer": (12.0 if is_low else 8.0) * num_held * tensor * pipeline / train.ranks,
    }


def rank_need(train: TrainConfig, folder: Path) -> MemoryNeed:
    """The same, and what a pass needs, by the formulas of the torch backend."""
    from astraflow.trainer.torch.memory import activation_bytes, logit_bytes

    backend = train.backend
    assert isinstance(backend, MegatronBackendConfig)
    lasting = lasting_bytes(train, folder)
    shape = open_shape(train, folder)
    tensor = backend.tensor
    num_tokens = train.token_budget
    sizes = SimpleNamespace(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.width,
        intermediate_size=shape.mlp_width,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size // tensor,
    )
    # A pipeline's first stage keeps as many microbatches as there are stages, so it doesn't keep less.
    num_bytes = 2 if backend.dtype == "bfloat16" else 4
    activations = activation_bytes(sizes, num_tokens=num_tokens, num_bytes=num_bytes, tensor=tensor)
    whole, recomputed = (size / backend.context for size in activations)
    now = whole if backend.activations == "keep" else recomputed
    largest = shape.vocab_size * shape.width if tensor * backend.pipeline > 1 else 0  # joined from parts
    published_bytes = 2 if backend.publish_dtype == "bfloat16" else 4
    passing = {
        f"activations of {num_tokens} tokens": now,
        "logits": logit_bytes(sizes, num_tokens=num_tokens),
        "export": published_bytes * (shape.num_weights() / train.ranks + 2.0 * largest),
    }
    savings = {
        "train.backend.activations: recompute": now - recomputed,
        f"train.token_budget: {max(1, num_tokens // 2)}": now / 2,
    }
    if shape.num_key_heads % (2 * tensor) == 0:
        savings[f"train.backend.tensor: {2 * tensor}"] = (lasting["weights"] + lasting["gradients"]) / 2
    return MemoryNeed(lasting, passing, savings)
