"""Models that only score: the reference of a KL penalty and the teacher of a distillation.

They live in the trainer of the policy that needs them, in float32 (4 bytes a parameter, as the policy's own
weights), are loaded from their folders at every start, and are never trained, saved or published. A
checkpoint holds the digest of their weights, so that a resume with other weights is refused.
"""

import logging
from pathlib import Path
from typing import cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from astraflow.errors import ConfigError
from astraflow.models.loading import export_tensors, load_causal_lm
from astraflow.trainer.backends.forward import Forward
from astraflow.trainer.columns import Columns
from astraflow.trainer.config import TorchBackendConfig, TrainConfig
from astraflow.trainer.packing import cut_microbatches, make_layout

__all__ = ["FrozenModel", "load_frozen", "vocab_size_of"]

_log = logging.getLogger(__name__)


class FrozenModel:
    """Scores batches. Example: `FrozenModel(folder, backend=config).logprobs(columns, token_budget=4096)`."""

    def __init__(self, folder: str | Path, *, backend: TorchBackendConfig) -> None:
        """Loads the model. Raises: DataError if the folder does not hold one."""
        self.folder, self._backend = Path(folder).expanduser(), backend
        model = load_causal_lm(self.folder, dtype="float32", device=backend.device).requires_grad_(False)
        self.vocab_size = vocab_size_of(model)
        self.num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self._forward = Forward(model, vocab_size=self.vocab_size, device=backend.device)
        digest = xxhash.xxh3_128()
        for tensor in export_tensors(model):
            digest.update(tensor.data.data)
        self.digest = digest.hexdigest()

    @torch.no_grad()
    def logprobs(self, columns: Columns, *, token_budget: int) -> NDArray[np.float32]:
        """[P] of the trained tokens, at their sampling temperature."""
        found = np.full_like(columns.behavior_logprobs, np.nan)
        everything = np.argsort(columns.group_ids, kind="stable")
        for part in cut_microbatches(columns, everything, token_budget):
            layout = make_layout(columns, part, share=self._forward.is_packed)
            if layout.trained.size:
                packed = self._forward.tensors(layout)
                logprobs, _ = self._forward.logprobs(columns, packed, dtype=self._backend.dtype)
                found[packed.trained] = logprobs.cpu().numpy()
        return found


def load_frozen(config: TrainConfig, *, model_dir: str | Path, vocab_size: int) -> dict[str, FrozenModel]:
    """The frozen models that a recipe needs, by role: `reference`, `teacher`.

    Raises: DataError if a folder holds no model; ConfigError if its vocabulary is another.
    """
    auxiliary, folders = config.auxiliary, dict[str, str | Path]()
    if auxiliary.kl.coef > 0:
        folders["reference"] = auxiliary.reference or model_dir
    if auxiliary.teacher:
        folders["teacher"] = auxiliary.teacher
    assert isinstance(config.backend, TorchBackendConfig)
    models = {role: FrozenModel(folder, backend=config.backend) for role, folder in folders.items()}
    for role, model in models.items():
        if model.vocab_size != vocab_size or _tokenizer(model.folder) != _tokenizer(Path(model_dir)):
            raise ConfigError(
                f"train.auxiliary.{role} = {str(model.folder)!r} has another tokenizer or vocabulary than "
                f"the policy ({model.vocab_size} and {vocab_size} entries); take one with the same tokenizer"
            )
        _log.info("%s %s: %.1f MB more in memory", role, model.folder, model.num_bytes / 1e6)
    return models


def vocab_size_of(model: torch.nn.Module) -> int:
    """Entries of a model's embedding table."""
    from transformers import PreTrainedModel

    embeddings = cast("PreTrainedModel", model).get_input_embeddings()
    return int(cast("torch.Tensor", embeddings.weight).shape[0])


def _tokenizer(folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    return path.read_bytes() if path.is_file() else b""
