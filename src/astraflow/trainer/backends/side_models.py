"""The models beside the policy that a loss needs: reference and teacher, which only score, and a critic.

They live in the trainer of their policy, in float32 (4 bytes per parameter, as the policy's own weights), and
are never published. Reference and teacher are loaded from their folders at every start and are never trained;
a checkpoint holds the digest of their weights, so that a resume with other weights is refused.

A critic has one number per token instead of logits, and an optimizer of its own; it is saved beside the
policy. Its head starts at 0, so that the first advantages come from the rewards alone. Its loss is the mean
over the minibatch's trained tokens, whatever the microbatches.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from astraflow.errors import ConfigError, DataError, TrainingError
from astraflow.losses.auxiliary import value_loss
from astraflow.losses.config import ValueModelConfig
from astraflow.models.loading import export_tensors, load_causal_lm
from astraflow.trainer.backends.forward import Forward, LayoutTensors
from astraflow.trainer.columns import Columns
from astraflow.trainer.config import TorchBackendConfig, TrainConfig
from astraflow.trainer.packing import cut_microbatches, make_layout

__all__ = ["Critic", "FrozenModel", "load_critic", "load_frozen", "vocab_size_of"]

_log = logging.getLogger(__name__)
_MODEL_FILE = "critic.safetensors"
_STATE_FILE = "critic.pt"
Floats = NDArray[np.float32]


class FrozenModel:
    """Scores batches. Example: `FrozenModel(folder, backend=config).logprobs(columns, token_budget=4096)`."""

    def __init__(self, folder: str | Path, *, backend: TorchBackendConfig) -> None:
        """Loads the model. Raises: DataError if the folder does not hold one."""
        self.folder = Path(folder).expanduser()
        self._backend = backend
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
    auxiliary = config.auxiliary
    folders: dict[str, str | Path] = {}
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


class Critic:
    """Predicts returns. Example: `values = critic.values(columns)`, then `critic.learn(...)` per
    minibatch."""

    def __init__(self, config: TrainConfig, critic: ValueModelConfig, folder: str | Path) -> None:
        """Loads the model. Raises: DataError if the folder does not hold one."""
        assert isinstance(config.backend, TorchBackendConfig)
        self.config = critic
        self._train = config
        self._backend = config.backend
        model = load_causal_lm(folder, dtype="float32", device=self._backend.device)
        self.vocab_size = vocab_size_of(model)
        # Before the head is replaced: the logits show which layout is exact for the model.
        self._forward = Forward(model, vocab_size=self.vocab_size, device=self._backend.device)
        width = int(cast("Any", model).get_output_embeddings().weight.shape[1])
        head = nn.Linear(width, 1, bias=False, device=self._backend.device)
        nn.init.zeros_(head.weight)
        cast("Any", model).set_output_embeddings(head)
        self._model = model
        optimizer = config.optimizer
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=critic.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )

    @torch.no_grad()
    def values(self, columns: Columns) -> Floats:
        """[P]: before each trained token, the sum of rewards that is expected from there on."""
        found = np.full_like(columns.behavior_logprobs, np.nan)
        everything = np.argsort(columns.group_ids, kind="stable")
        for part in cut_microbatches(columns, everything, self._train.token_budget):
            for packed in self._packed(columns, part):
                found[packed.trained] = self._values(packed).cpu().numpy()
        return found

    def learn(
        self, columns: Columns, samples: NDArray[np.int64], *, stale: Floats, returns: Floats, lr_frac: float
    ) -> tuple[float, float]:
        """One optimizer step on a minibatch. Returns: its loss, and the gradient's norm before clipping.

        `lr_frac`: share of the learning rate by the schedule. Raises: TrainingError if it is not finite.
        """
        parts = cut_microbatches(columns, samples, self._train.token_budget)
        packed = [layout for part in parts for layout in self._packed(columns, part)]
        num_tokens = sum(len(layout.trained) for layout in packed)
        total = 0.0
        for layout in packed:
            near, goal = (
                torch.from_numpy(x[layout.trained]).to(self._backend.device) for x in (stale, returns)
            )
            loss = value_loss(self._values(layout), near, goal, clip=self.config.clip).sum() / num_tokens
            torch.autograd.backward(loss)
            total += float(loss.detach())
        norm = float(
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._train.optimizer.max_grad_norm)
        )
        if not np.isfinite(norm):
            raise TrainingError(
                f"the critic's gradient is {norm} (loss {total}); is train.auxiliary.critic.lr = "
                f"{self.config.lr} too high?"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.lr * lr_frac
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total, norm

    def save(self, folder: Path) -> None:
        """Writes weights and optimizer into an existing folder."""
        from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] (PathLike without its argument)

        weights = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self._model.state_dict().items()
        }
        save_file(weights, folder / _MODEL_FILE, metadata={"format": "pt"})
        torch.save(self._optimizer.state_dict(), folder / _STATE_FILE)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote. Raises: DataError if the files are missing or do not fit."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] (PathLike without its argument)

        try:
            self._model.load_state_dict(load_file(folder / _MODEL_FILE))
            state: Any = torch.load(
                folder / _STATE_FILE, map_location=self._backend.device, weights_only=True
            )
            self._optimizer.load_state_dict(state)
        except (OSError, RuntimeError, KeyError, ValueError, SafetensorError) as err:
            raise DataError(f"checkpoint {folder}: its critic does not load: {err}") from err

    def _packed(self, columns: Columns, part: NDArray[np.int64]) -> Sequence[LayoutTensors]:
        layout = make_layout(columns, part, share=self._forward.is_packed)
        return (self._forward.tensors(layout),) if layout.trained.size else ()

    def _values(self, packed: LayoutTensors) -> Tensor:
        return self._forward.outputs(packed, dtype=self._backend.dtype)[:, 0]


def load_critic(config: TrainConfig, *, model_dir: str | Path, vocab_size: int) -> Critic | None:
    """The critic of a recipe, or None. Raises: DataError if its folder holds no model; ConfigError if its
    vocabulary is another."""
    chosen = config.auxiliary.critic
    if not isinstance(chosen, ValueModelConfig):
        return None
    folder = Path(chosen.model or model_dir).expanduser()
    critic = Critic(config, chosen, folder)
    if critic.vocab_size != vocab_size:
        raise ConfigError(
            f"train.auxiliary.critic.model = {str(folder)!r} has {critic.vocab_size} tokens, the policy "
            f"{vocab_size}; take one with the same tokenizer"
        )
    _log.info("critic from %s", folder)
    return critic
