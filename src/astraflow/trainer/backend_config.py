"""The backend of a recipe, which computes the training steps: PyTorch, or that of an installed package."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from astraflow.config import Config, Variant
from astraflow.protocols import Engine, Learner, TrainerBackend
from astraflow.trainer.memory_need import MemoryNeed
from astraflow.types.host_tensors import WeightSnapshot

if TYPE_CHECKING:
    from astraflow.trainer.config import TrainConfig
    from astraflow.trainer.ranks import Ranks

__all__ = ["BackendVariant", "LoraConfig", "TorchBackendConfig", "torch_settings"]


class LoraConfig(Config):
    """Low-rank adapters: the model is frozen, and small factors are trained for its projections."""

    rank: int = Field(default=0, ge=0)
    """Rank of the factors; 0 trains all parameters instead."""
    alpha: float = Field(default=16.0, gt=0)
    """The contribution of the factors is scaled by `alpha / rank`."""
    rslora: bool = False
    """Scale by `alpha / sqrt(rank)` instead (rsLoRA, arXiv:2312.03732), which suits higher ranks."""
    targets: tuple[str, ...] | Literal["all-linear"] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    """Last name components of the projections that get factors, or `all-linear`: all linear layers except the
    output head. Model families name them differently. The experts of a mixture are not linear layers, so they
    get factors only by name, e.g. `gate_proj`, `up_proj` and `down_proj`."""
    publish: Literal["merged", "adapters"] = "adapters"
    """`adapters`: publish the frozen base once, and then only the factors, a few MB per version. Rollout
    services add them to the base, and exported versions have a PEFT `adapter/`. `merged`: publish plain
    weights, for your own rollout services that do not support adapters."""


class TorchBackendConfig(Config):
    """PyTorch on one device, or on one per rank."""

    name: Literal["torch"] = "torch"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the forward and backward passes; weights and optimizer state stay float32."""
    head_dtype: Literal["model", "float32"] = "model"
    """Data type of the logits: `dtype`, or `float32`, which needs the same `rollout.engine.head_dtype`."""
    device: str = "cpu"
    """Device, e.g. `cpu` or `cuda:0`."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """Number of CPU threads; keep the total over all processes within the machine's cores."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the published weights; adapters stay float32, and their base as it is in its folder."""
    lora: LoraConfig = LoraConfig()
    """Adapters to train instead of all parameters."""
    share_prefixes: bool = True
    """Compute identical samples only once, and a prefix that a group's samples share, if that saves a quarter
    of their tokens: on CPUs, and for models in packed rows. Worthwhile for tiny models with prompts much
    longer than their completions."""
    optimizer_state: Literal["float32", "bfloat16"] = "float32"
    """Data type of AdamW's two moving averages. `bfloat16` halves their memory, and needs `betas` of at most
    0.99, at which steps along a steady gradient are 10% longer than in float32 (0.3% at 0.95)."""
    offload_optimizer: bool = False
    """Keep AdamW's moving averages in host memory; each optimizer step copies them to the device and back."""
    activations: Literal["keep", "recompute"] = "keep"
    """`recompute`: each layer keeps only its input and is computed again in the backward pass. This takes
    about a third longer and needs a fraction of the memory (activation checkpointing)."""
    compile_layers: bool = False
    """Compile the model's layers (`torch.compile`), which fuses small operations into fewer passes over
    memory. The first passes then take a minute longer. Needs a C++ compiler, and Triton on a GPU. Not
    available with `shard.tensor`."""


class BackendVariant(Variant):
    """Base of a trainer backend's config that an installed package adds."""

    decides_on_loss: ClassVar[bool] = False
    """Whether the backend has its own losses, and ignores `train.loss`."""
    takes_ranks: ClassVar[bool] = False
    """Whether several ranks can train together. How they share the work is up to the backend."""

    @property
    def num_model_ranks(self) -> int:
        """Number of ranks, following each other, that compute the same slice of a batch."""
        return 1

    @property
    def computes_with(self) -> TorchBackendConfig | None:
        """The settings below the key `torch`, if PyTorch computes for this backend; None otherwise."""
        return None

    def lasting_bytes(self, train: "TrainConfig", model_dir: Path) -> Mapping[str, float] | None:
        """What a rank keeps on its device for the whole run, by purpose; None: as PyTorch (`computes_with`).

        Imports no torch. Raises: ConfigError or DataError if the backend can't train this model.
        """
        del train, model_dir

    def memory_need(self, train: "TrainConfig", model_dir: Path) -> MemoryNeed | None:
        """The same, and what a pass needs; may import torch."""
        del train, model_dir

    def make(
        self,
        train: "TrainConfig",
        *,
        model_dir: str | Path,
        seed: int,
        states: Path | None,
        make_engine: Callable[[WeightSnapshot], Engine] | None,
        ranks: "Ranks | None",
    ) -> TrainerBackend | Learner:
        """Makes the backend of the policy whose `train` section this is part of, and loads the model.

        `states`: folder for states that it saves in addition to checkpoints. `make_engine`: makes an engine
        to sample with. `ranks`: all ranks of the trainer; None if there is one.
        """
        raise NotImplementedError


def torch_settings(backend: Config) -> TorchBackendConfig | None:
    """The settings with which PyTorch computes for a backend; None if something else computes."""
    if isinstance(backend, BackendVariant):
        return backend.computes_with
    return backend if isinstance(backend, TorchBackendConfig) else None
