"""The trainer of one policy in a recipe."""

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from astraflow.config import Config, Use, with_installed
from astraflow.losses.config import AuxiliaryConfig, GrpoLossConfig, LossConfig
from astraflow.trainer.backend_config import BackendVariant, TorchBackendConfig, torch_settings

__all__ = [
    "BackendConfig",
    "Denominator",
    "OptimizerConfig",
    "ShardConfig",
    "TrainConfig",
]


_DecayRate = Annotated[float, Field(ge=0, lt=1)]
_MAX_BFLOAT16_BETA = 0.99
"""Largest decay rate with which a moving average in bfloat16 follows the gradients."""


class OptimizerConfig(Config):
    """AdamW with a warm-up and a schedule over the optimizer steps of the run."""

    betas: tuple[_DecayRate, _DecayRate] = (0.9, 0.95)
    """Decay rates of the moving averages of the gradient and of the squared gradient; below 1."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the square root of the average squared gradient."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay, decoupled from the gradient."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient; larger gradients are scaled down to it."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: `constant`, or down to 0 (`linear`) or to a tenth (`cosine`) at the
    end of the run."""
    split_groups: bool = False
    """Draw minibatches from all samples of the batch instead of from its groups. Each minibatch then contains
    samples of many groups, so the gradients vary less, but a group's shared prefix is computed in each
    minibatch."""


class ShardConfig(Config):
    """How the ranks of a trainer share the work. FSDP2 shards over the remaining ranks:
    `ranks = replicate * FSDP2 shards * tensor * context`."""

    tensor: int = Field(default=1, ge=1, le=4096)
    """Number of ranks that compute the same samples together, each with a part of the heads and of the MLP of
    every layer. Must divide the numbers of the model's query and key heads."""
    expert: int = Field(default=1, ge=1, le=4096)
    """1, or the value of `tensor`: each of these ranks then has a subset of the experts instead of all of
    them. Must divide the number of experts."""
    replicate: int = Field(default=1, ge=1, le=4096)
    """Number of copies of the weights and of the optimizer state, each sharded only over its own ranks
    (HSDP). More copies need more memory, and less communication between them."""
    context: int = Field(default=1, ge=1, le=4096)
    """Number of ranks that compute the same samples together, each with a part of their tokens; for
    attention, they exchange tokens for heads (Ulysses). Must divide the numbers of the model's query and key
    heads. Not available with `tensor`."""

    @property
    def num_model_ranks(self) -> int:
        """Number of ranks that compute the same samples: `tensor * context`."""
        return self.tensor * self.context


BackendConfig = TorchBackendConfig | BackendVariant | Use
if not TYPE_CHECKING:  # which backends are installed is known at run time only
    BackendConfig = with_installed(BackendConfig, "astraflow.backends")


Denominator = Literal["tokens", "sequences", "sequence_means", "episodes", "episode_means", "fixed"]


# size: flat, as users of other trainers write these settings
class TrainConfig(Config):
    """How one policy is trained."""

    steps: int = Field(default=100, ge=0, le=10**9)
    """Number of batches to train on; the policy's training then ends."""
    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    loss: LossConfig = GrpoLossConfig()
    """The policy loss to minimize."""
    auxiliary: AuxiliaryConfig = AuxiliaryConfig()
    """Corrections, penalties and bonuses added to the loss, a critic, and frozen models."""
    denominator: Denominator = "tokens"
    """Divisor of the summed loss of a minibatch. `sequence_means` divides each sequence's loss by its tokens,
    then the sum by the number of sequences; `episode_means` does the same for episodes."""
    fixed_denominator: float = Field(default=1.0, gt=0)
    """The divisor with `denominator: fixed`."""
    minibatches: int = Field(default=1, ge=1)
    """Number of optimizer steps per batch."""
    token_budget: int = Field(default=16_384, ge=1, le=2**31 - 1)
    """Largest number of tokens per microbatch, including padding for models computed in padded rows."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW with a warm-up and a schedule over the optimizer steps of the run."""
    backend: BackendConfig = TorchBackendConfig()
    """Code that computes the training steps."""
    ranks: int = Field(default=1, ge=1, le=1024)
    """Number of processes that train the policy together, each with a share of every batch and of the model
    (FSDP2). On GPUs, each uses its own, counted from the configured device. `num_threads` is per rank."""
    nodes: int = Field(default=1, ge=1, le=1024)
    """Number of machines that share the run folder, among which the ranks are divided. If `shard` is left
    out, each of them has a copy of the weights (`shard.replicate`)."""
    shard: ShardConfig = ShardConfig()
    """How the ranks share the work, in addition to FSDP2."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Number of steps between checkpoints."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep on disk. With 2 or more, damage to the newest one costs only the
    steps since the previous one, whose batches are kept that long."""

    @property
    def num_model_ranks(self) -> int:
        """Number of ranks that compute the same slice of a batch."""
        backend = self.backend
        own = backend.num_model_ranks if isinstance(backend, BackendVariant) else 1
        return own * self.shard.num_model_ranks

    @property
    def data_ranks(self) -> int:
        """Number of slices of a batch: `ranks / num_model_ranks`."""
        return self.ranks // self.num_model_ranks

    @property
    def local_ranks(self) -> int:
        """Number of ranks per machine."""
        return self.ranks // self.nodes

    @property
    def other_python(self) -> str:
        """The Python in which the trainer's processes run, as the recipe names it; empty: that of the run."""
        return str(getattr(self.backend, "python", ""))

    def with_nodes(self, nodes: int) -> "TrainConfig":
        """The settings for fewer machines with as many ranks each, and whole copies of the weights."""
        shard = self.shard.model_copy(update={"replicate": self.shard.replicate * nodes // self.nodes})
        return self.model_copy(update={"nodes": nodes, "ranks": self.local_ranks * nodes, "shard": shard})

    @model_validator(mode="after")
    def _averages_can_move(self) -> "TrainConfig":
        torch = torch_settings(self.backend)
        if torch and torch.optimizer_state == "bfloat16" and max(self.optimizer.betas) > _MAX_BFLOAT16_BETA:
            raise ValueError(
                f"optimizer.betas = {list(self.optimizer.betas)} with backend.optimizer_state = bfloat16: an "
                "average in bfloat16 changes by less than it can represent; set betas to at most "
                f"{_MAX_BFLOAT16_BETA:g}, or optimizer_state: float32"
            )
        return self

    @model_validator(mode="after")
    def _ranks_can_be_cut(self) -> "TrainConfig":
        if "shard" not in self.model_fields_set:
            object.__setattr__(self, "shard", ShardConfig(replicate=self.nodes))  # configs are frozen
        shard = self.shard
        if not isinstance(self.backend, TorchBackendConfig):
            self._check_ranks_of(self.backend)
        if shard.context > 1 and shard.tensor > 1:
            raise ValueError(
                f"shard.context = {shard.context} with shard.tensor = {shard.tensor}: ranks that compute the "
                "same samples can share tokens or layers, not both; set one of them to 1"
            )
        cut = shard.num_model_ranks * math.lcm(shard.replicate, self.nodes)
        if self.ranks % cut:
            raise ValueError(
                f"ranks = {self.ranks} cannot be divided into shard.tensor {shard.tensor} x shard.context "
                f"{shard.context} x shard.replicate {shard.replicate} on {self.nodes} nodes; set ranks to a "
                f"multiple of {cut}"
            )
        if shard.expert not in (1, shard.tensor):
            raise ValueError(
                f"shard.expert = {shard.expert}, but shard.tensor = {shard.tensor}: experts are shared by "
                f"the ranks that compute the same samples; set shard.expert to 1 or {shard.tensor}, or "
                f"shard.tensor to {shard.expert}"
            )
        if shard.tensor > 1 and isinstance(self.backend, TorchBackendConfig):
            self._check_cut_layers(self.backend)
        return self

    def _check_ranks_of(self, backend: BackendVariant | Use) -> None:
        if isinstance(backend, Use) or not backend.takes_ranks:
            if self.ranks > 1:
                raise ValueError(
                    f"ranks = {self.ranks} needs train.backend.name: torch or another backend with ranks; "
                    "this one brings its own processes, so leave it 1"
                )
        elif self.shard != ShardConfig(replicate=self.nodes):
            raise ValueError("shard is for backend.name: torch; others have settings of their own")
        elif self.ranks % math.lcm(backend.num_model_ranks, self.nodes):
            raise ValueError(
                f"ranks = {self.ranks} cannot be divided into groups of {backend.num_model_ranks} that share "
                f"a copy of the model, on {self.nodes} nodes; set ranks to a multiple of both"
            )

    def _check_cut_layers(self, backend: TorchBackendConfig) -> None:
        shard = self.shard
        if backend.lora.rank:
            raise ValueError(
                f"shard.tensor = {shard.tensor} with backend.lora.rank = {backend.lora.rank}: adapters "
                "on cut projections are not supported; set shard.tensor: 1, which leaves FSDP2"
            )
        if backend.compile_layers:
            raise ValueError(
                f"shard.tensor = {shard.tensor} with backend.compile_layers = true: compiling cut layers is "
                "not supported; set one of them to its default"
            )
