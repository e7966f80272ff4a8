"""The further models that a loss needs: reference and teacher, which only score, and a critic.

They live in the trainer of their policy, in float32 (4 bytes per parameter, like the policy's own weights),
and are never published. Reference and teacher are loaded from their folders at every start and never trained.
A checkpoint has the digest of their weights, so that a resume with other weights is refused.

A critic outputs one number per token instead of logits, has its own optimizer, and is saved with the policy.
Its head starts at 0, so that the first advantages come only from the rewards.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import nn

from astraflow.errors import ConfigError
from astraflow.losses.config import ValueModelConfig
from astraflow.models.file_layout import file_views
from astraflow.models.hub import model_path
from astraflow.models.images import image_rules
from astraflow.models.loading import DTYPES, host_view
from astraflow.protocols import ModelRole
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.config import ShardConfig, TrainConfig
from astraflow.trainer.ranks import ALONE
from astraflow.trainer.torch.forward import TrainerForward
from astraflow.trainer.torch.layers import recompute_layers
from astraflow.trainer.torch.parallel.grid import RankGrid, make_grid
from astraflow.trainer.torch.parallel.sharding import ModelWeights
from astraflow.trainer.torch.torch_files import open_model
from astraflow.trainer.torch.trained_model import ScoringModel, TrainedModel

__all__ = [
    "Critic",
    "FrozenModel",
    "check_same_tokens",
    "frozen_folders",
    "load_critic",
    "load_frozen",
    "num_positions",
    "uncut_logits",
    "vocab_size_of",
]

_log = logging.getLogger(__name__)
_PADDING_POSITIONS = 2
"""Number of rows that some families (OPT) add to their position table."""


class FrozenModel(ScoringModel):
    """Scores batches. Example: `FrozenModel(folder, config).predictions(columns, parts)`."""

    def __init__(self, folder: str | Path, config: TrainConfig, grid: RankGrid | None = None) -> None:
        """Loads the model. Raises: DataError if the folder has none."""
        assert isinstance(config.backend, TorchBackendConfig)
        self.folder = model_path(str(folder))
        grid = RankGrid(ALONE, ALONE, device=config.backend.device) if grid is None else grid
        model, source = open_model(self.folder, grid)
        model.requires_grad_(False)
        self.vocab_size = vocab_size_of(model)
        self.num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        weights = ModelWeights(model, grid, dtype=DTYPES[config.backend.dtype], source=source, has_rest=False)
        forward = TrainerForward(
            model, vocab_size=self.vocab_size, config=config.backend, images=image_rules(self.folder)
        )
        uncut = uncut_logits(self.folder, grid, config.backend)
        super().__init__(forward, weights=weights, config=config, uncut=uncut)
        digest = xxhash.xxh3_128()
        for name, weight in weights.gather():
            digest.update(host_view(name, weight.cpu().contiguous()).data.data)
        self.digest = digest.hexdigest()


def load_frozen(
    config: TrainConfig, *, model_dir: str | Path, vocab_size: int, grid: RankGrid
) -> dict[ModelRole, FrozenModel]:
    """The frozen models that a recipe needs, by role.

    Raises: DataError if a folder has no model; ConfigError if its vocabulary differs from the policy's.
    """
    folders = frozen_folders(config, model_dir)
    models: dict[ModelRole, FrozenModel] = {
        role: FrozenModel(folder, config, grid) for role, folder in folders.items()
    }
    for role, model in models.items():
        check_same_tokens(role, (model.folder, model.vocab_size), (Path(model_dir), vocab_size))
        _log.info("%s %s: %.1f MB more in memory", role, model.folder, model.num_bytes / 1e6)
    return models


def uncut_logits(folder: Path, grid: RankGrid, backend: TorchBackendConfig) -> torch.Tensor | None:
    """What `TrainerForward.probe` returns for a model whose layers aren't cut; None if `grid` cuts none.

    The model is sharded over all ranks for it, so that none holds it whole.
    """
    if grid.tensor == 1:
        return None
    grid = make_grid(grid.everyone, ShardConfig(), device=grid.device)
    model, source = open_model(folder, grid)
    exact = backend.model_copy(update={"dtype": "float32"})
    forward = TrainerForward(model, vocab_size=vocab_size_of(model), config=exact)
    ModelWeights(model, grid, source=source).split(forward.entry)
    forward.try_layouts()
    return forward.probe()


def frozen_folders(config: TrainConfig, model_dir: str | Path) -> dict[ModelRole, Path]:
    """The folders of the frozen models that a recipe needs, by role."""
    auxiliary = config.auxiliary
    reference = (auxiliary.reference or model_dir) if auxiliary.has_reference else ""
    folders: dict[ModelRole, str | Path] = {"reference": reference, "teacher": auxiliary.teacher}
    return {role: model_path(str(folder)) for role, folder in folders.items() if folder}


def check_same_tokens(role: ModelRole, frozen: tuple[Path, int], policy: tuple[Path, int]) -> None:
    """Raises: ConfigError unless two models, given by folder and vocabulary size, have the same tokens."""
    if frozen[1] != policy[1] or _tokenizer(frozen[0]) != _tokenizer(policy[0]):
        raise ConfigError(
            f"train.auxiliary.{role} = {str(frozen[0])!r} has another tokenizer or vocabulary than "
            f"the policy ({frozen[1]} and {policy[1]} entries); use one with the same tokenizer"
        )


def vocab_size_of(model: torch.nn.Module) -> int:
    """Entries of a model's embedding table."""
    from transformers import PreTrainedModel

    embeddings = cast("PreTrainedModel", model).get_input_embeddings()
    return int(cast("torch.Tensor", embeddings.weight).shape[0])


def num_positions(model: torch.nn.Module) -> int:
    """Length of the longest sequence that a model with learned positions accepts; 0 for other models."""
    longest = int(getattr(cast("Any", model).config.get_text_config(), "max_position_embeddings", 0) or 0)
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    is_learned = any(
        isinstance(module, nn.Embedding) and longest <= module.num_embeddings <= longest + _PADDING_POSITIONS
        for name, module in modules
        if "pos" in name or name.endswith("wpe")
    )
    return longest if is_learned else 0


def _tokenizer(folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    return path.read_bytes() if path.is_file() else b""


class Critic(TrainedModel):
    """Predicts returns: the expected sum of rewards from each trained token onward."""

    def __init__(self, config: TrainConfig, folder: str | Path, grid: RankGrid) -> None:
        """Loads the model. Raises: DataError if the folder does not hold one."""
        assert isinstance(config.backend, TorchBackendConfig)
        model, source = open_model(folder, grid)
        self.vocab_size = vocab_size_of(model)
        # Created before the head is replaced, because the logits show which layout is exact for the model.
        forward = TrainerForward(
            model, vocab_size=self.vocab_size, config=config.backend, images=image_rules(Path(folder))
        )
        if config.backend.activations == "recompute":
            recompute_layers(model)
        _replace_head(model, device=grid.device)
        if source is not None:
            shapes = {view.name: view.shape for view in file_views(model)}
            source = {name: own for name, own in source.items() if shapes.get(name) == tuple(own.shape)}
        weights = ModelWeights(model, grid, dtype=DTYPES[config.backend.dtype], source=source, has_rest=False)
        super().__init__(forward, config, weights=weights, predicts_values=True)


def _replace_head(model: nn.Module, *, device: str) -> None:
    """Gives a model a head of its own that outputs one number, at first 0."""
    foreign = cast("Any", model)
    width = int(foreign.get_output_embeddings().weight.shape[1])
    head = nn.Linear(width, 1, bias=False, device=device)
    nn.init.zeros_(head.weight)
    foreign.set_output_embeddings(head)
    foreign.config.tie_word_embeddings = False


def load_critic(
    config: TrainConfig, *, model_dir: str | Path, vocab_size: int, grid: RankGrid
) -> Critic | None:
    """The critic of a recipe, or None. Raises: DataError if its folder has no model; ConfigError if its
    vocabulary differs from the policy's."""
    chosen = config.auxiliary.critic
    if not isinstance(chosen, ValueModelConfig):
        return None
    folder = model_path(str(chosen.model or model_dir))
    critic = Critic(config, folder, grid)
    if critic.vocab_size != vocab_size:
        raise ConfigError(
            f"train.auxiliary.critic.model = {str(folder)!r} has {critic.vocab_size} tokens, but the policy "
            f"has {vocab_size}; use one with the same tokenizer"
        )
    _log.info("critic from %s", folder)
    return critic
