"""The trainer of one policy in a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from astraflow.config import Config, Use
from astraflow.losses.config import AuxiliaryConfig, GrpoLossConfig, LossConfig

__all__ = [
    "BackendConfig",
    "Denominator",
    "LoraConfig",
    "OptimizerConfig",
    "OwnLoopBackendConfig",
    "PacedBackendConfig",
    "TorchBackendConfig",
    "TrainConfig",
]


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
    split_groups: bool = False
    """Draw minibatches among all samples of the batch instead of among its groups: each holds some of every
    group, so their gradients differ less, but a prefix that a group shares is computed in each."""


class LoraConfig(Config):
    """Low-rank adapters: the model is frozen, and small factors beside its projections are trained."""

    rank: int = Field(default=0, ge=0)
    """Of the factors; 0 trains all parameters instead."""
    alpha: float = Field(default=16.0, gt=0)
    """What the factors add is scaled by `alpha / rank`."""
    targets: tuple[str, ...] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    """Last names of the projections that get factors."""
    publish: Literal["merged", "adapters"] = "merged"
    """`merged`: plain weights. `adapters`: the frozen weights, and the factors beside them, for who serves to
    add up: with `weights.delta` only the factors then travel."""


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
    """Of the published weights; adapters, and what they were merged into, stay float32."""
    lora: LoraConfig = LoraConfig()
    """Trains adapters instead of all parameters."""


class PacedBackendConfig(Config):
    """No model: emulates the time of a training step for benchmarks of the system; nothing is learnt."""

    name: Literal["paced"] = "paced"
    step_s: float = Field(default=10.0, ge=0)
    """Emulated seconds of a step, whatever its batch holds."""
    million_tokens_s: float = Field(default=0.0, ge=0)
    """Further emulated seconds for each million tokens of the batch, prompts included."""
    weights_bytes: int = Field(default=65_536, ge=2)
    """Size of a published version."""
    changed_frac: float = Field(default=0.01, ge=0, le=1)
    """Share of its elements (2 bytes each) that a step changes."""
    time_scale: float = Field(default=1.0, gt=0)
    """Emulated seconds in a second of the wall clock; the same everywhere in a recipe."""


class OwnLoopBackendConfig(Config):
    """A training loop of your own in the verbs of the Tinker API; `train.loss`, `lr`, `denominator`,
    `minibatches` and `optimizer` are its own affair, and not read."""

    name: Literal["own_loop"] = "own_loop"
    loop: Use
    """A function that is called with a training client, and with its arguments."""
    torch: TorchBackendConfig = TorchBackendConfig()
    """What computes the verbs, and where."""


BackendConfig = Annotated[
    TorchBackendConfig | PacedBackendConfig | OwnLoopBackendConfig | Use, Field(discriminator="name")
]


Denominator = Literal["tokens", "sequences", "sequence_means", "episodes", "episode_means", "fixed"]


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
    denominator: Denominator = "tokens"
    """What the summed loss of a minibatch is divided by; `sequence_means` divides each sequence's by its
    tokens, then by the sequences; `episode_means` each episode's by its tokens, then by the episodes."""
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
    """Newest checkpoints that stay on disk. With 2 or more, damage to the newest costs only the steps since
    the one before it, whose batches are kept that long."""
