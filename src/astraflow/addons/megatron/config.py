"""The backend `megatron` in a recipe."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from astraflow.protocols import Engine, TrainerBackend
from astraflow.trainer.backend_config import BackendVariant, TorchBackendConfig
from astraflow.trainer.memory_need import MemoryNeed
from astraflow.types.host_tensors import WeightSnapshot

if TYPE_CHECKING:
    from astraflow.trainer.config import TrainConfig
    from astraflow.trainer.ranks import Ranks

__all__ = ["MegatronBackendConfig"]


class MegatronBackendConfig(BackendVariant):
    """NVIDIA's megatron-core, for models of the families Llama, Qwen2, and Qwen3 (dense).

    The remaining ranks, `ranks / (tensor * pipeline * context)`, each get a slice of a batch. All ranks with
    the same weights share the optimizer's state. Not tried on GPUs.
    """

    takes_ranks: ClassVar[bool] = True
    name: Literal["megatron"] = "megatron"
    tensor: int = Field(default=1, ge=1, le=4096)
    """Number of ranks that compute the same samples together, each with a part of the heads and of the MLP of
    every layer, and of the vocabulary. Must divide the model's key heads, its MLP, and its vocabulary."""
    pipeline: int = Field(default=1, ge=1, le=4096)
    """Number of stages, each with its own layers. Must divide the number of layers. A minibatch should have
    several times as many microbatches (`train.token_budget`) as stages, which otherwise wait."""
    context: int = Field(default=1, ge=1, le=4096)
    """Number of ranks that compute the same samples together, each with a part of their tokens; for
    attention, they exchange tokens for heads (Ulysses). `tensor * context` must divide the model's query and
    key heads."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights in the forward and backward passes. With `bfloat16`, the optimizer keeps a
    copy of the weights in float32."""
    device: str = "cuda:0"
    """GPU of the first rank."""
    python: str = ""
    """The Python of an environment with megatron-core and this version of AstraFlow: its path, the folder of
    a virtual environment such as `.venv-megatron`, or a name on the PATH. Empty: the Python of the run."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """Number of CPU threads per rank."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the published weights."""
    activations: Literal["keep", "recompute"] = "keep"
    """`recompute`: each layer keeps only its input and is computed again in the backward pass."""

    @property
    def num_model_ranks(self) -> int:
        """Number of ranks that compute the same samples: `tensor * pipeline * context`."""
        return self.tensor * self.pipeline * self.context

    @property
    def computes_with(self) -> TorchBackendConfig:
        """The settings of the torch backend that take about as much memory."""
        return TorchBackendConfig(
            dtype=self.dtype,
            device=self.device,
            num_threads=self.num_threads,
            publish_dtype=self.publish_dtype,
            activations=self.activations,
        )

    def lasting_bytes(self, train: "TrainConfig", model_dir: Path) -> Mapping[str, float]:
        """What the rank with most weights keeps on its GPU."""
        from astraflow.addons.megatron.memory import lasting_bytes

        return lasting_bytes(train, model_dir)

    def memory_need(self, train: "TrainConfig", model_dir: Path) -> MemoryNeed:
        """What the rank with most weights needs on its GPU."""
        from astraflow.addons.megatron.memory import rank_need

        return rank_need(train, model_dir)

    def make(
        self,
        train: "TrainConfig",
        *,
        model_dir: str | Path,
        seed: int,
        states: Path | None,
        make_engine: Callable[[WeightSnapshot], Engine] | None,
        ranks: "Ranks | None",
    ) -> TrainerBackend:
        """Makes the backend of the policy that this `train` section belongs to, and loads this rank's part of
        the model."""
        del seed, states, make_engine  # nothing here is random
        from astraflow.addons.megatron.backend import MegatronBackend
        from astraflow.trainer.ranks import ALONE

        return MegatronBackend(train, model_dir=Path(model_dir), ranks=ALONE if ranks is None else ranks)
