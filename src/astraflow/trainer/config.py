"""The trainer of one policy in a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from astraflow.config import Config, Use
from astraflow.losses.config import AuxiliaryConfig, GrpoLossConfig, LossConfig

__all__ = ["BackendConfig", "OptimizerConfig", "TorchBackendConfig", "TrainConfig"]


class OptimizerConfig(Config):
    """AdamW with a warm-up and a schedule over the run's optimizer steps."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the running averages of gradient and squared gradient."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the squared gradient's average."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled from the gradient."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, down to 0 (`linear`) or to a tenth (`cosine`) at the run's end."""


class TorchBackendConfig(Config):
    """PyTorch on one device."""

    name: Literal["torch"] = "torch"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; weights and optimizer state stay float32."""
    device: str = "cpu"
    """`cpu` or `cuda:0`."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads; keep the sum over all processes within the machine's cores."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the published weights."""


BackendConfig = Annotated[TorchBackendConfig | Use, Field(discriminator="name")]


class TrainConfig(Config):
    """How one policy learns."""

    steps: int = Field(default=100, ge=0)
    """Batches; the policy's run ends after this many."""
    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    loss: LossConfig = GrpoLossConfig()
    """What is minimised."""
    auxiliary: AuxiliaryConfig = AuxiliaryConfig()
    """Corrections, penalties and bonuses beside the loss, a critic, and frozen models."""
    denominator: Literal["tokens", "sequences", "sequence_means", "fixed"] = "tokens"
    """What the summed loss of a minibatch is divided by; `sequence_means` divides each sequence's by its
    tokens, then by the sequences."""
    fixed_denominator: float = Field(default=1.0, gt=0)
    """Used with `denominator: fixed`."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps a batch."""
    token_budget: int = Field(default=16_384, ge=1)
    """Padded tokens of one microbatch."""
    optimizer: OptimizerConfig = OptimizerConfig()
    backend: BackendConfig = TorchBackendConfig()
    """What computes it, and where."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that stay on disk."""
