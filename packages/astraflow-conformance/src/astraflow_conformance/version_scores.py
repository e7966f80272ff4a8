"""Computes logprobs by full forward passes, one sequence at a time: the simplest way, as a reference."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from astraflow.models.loading import empty_causal_lm, install_tensors
from astraflow.types.host_tensors import HostTensor

__all__ = ["VersionScores"]


class VersionScores:
    """Scores tokens under any version of one architecture, in float32 on the CPU.

    Example: `scores.add(3, tensors); logprobs = scores.logprobs(3, ids)`.
    """

    def __init__(self, model_dir: Path) -> None:
        """Raises: DataError if the folder doesn't hold a supported model."""
        self._model = empty_causal_lm(model_dir)
        self._versions: dict[int, tuple[HostTensor, ...]] = {}
        self._installed = -1

    def add(self, version: int, tensors: Sequence[HostTensor]) -> None:
        """Stores a version's tensors."""
        self._versions[version] = tuple(tensors)

    @torch.no_grad()
    def logprobs(self, version: int, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Returns logprobs [T] at temperature 1; entry 0 is 0. Raises: KeyError for an unknown version."""
        if self._installed != version:
            install_tensors(self._model, self._versions[version])
            self._installed = version
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        logits = cast("Any", self._model)(input_ids=ids).logits[0, :-1].float()
        found = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
        return np.concatenate([np.zeros(1, np.float32), found.numpy()])
