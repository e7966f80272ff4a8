"""Shows images to models of Qwen-VL's shape: what a forward pass needs beside the tokens.

The model's own code finds the places of images by a token's id. A policy may sample that token, and it is
then a token like any other; so the places are given to the model in place of what it finds.

Legend: B sequences, T tokens of the longest, P patches of all images, D numbers of a patch.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astraflow.models.images import ImageRules, positions
from astraflow.types import Media

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Seen", "Sight", "vocab_size_of"]


def vocab_size_of(model: "PreTrainedModel") -> int:
    """Number of logits. Models of several modalities keep it in the config of their text model."""
    return int(cast("Any", model).config.get_text_config().vocab_size)


@dataclass(frozen=True, slots=True)
class Seen:
    """The images of some sequences."""

    positions: Tensor
    """[3, B, T] where tokens stand in time, height and width; behind a sequence's end they count on."""
    shifts: NDArray[np.int64]
    """[B] position of the last token less its index."""
    is_image: Tensor
    """bool [B, T] whether a token stands for a piece of an image."""
    inputs: Mapping[str, Tensor]
    """The images: patches [P, D], and rows and columns of each."""


class Sight:
    """How one model sees. The places of images are replaced in the model for good.

    Example: `seen = sight.seen(media, num_tokens=T)`; then `with sight.showing(seen): model(input_ids=...,
    position_ids=seen.positions, **seen.inputs)`.
    """

    def __init__(self, model: "PreTrainedModel", rules: ImageRules) -> None:
        self.rules = rules
        self._device = model.device
        self._dtype = model.dtype
        self._is_image: Tensor | None = None
        cast("Any", model).base_model.get_placeholder_mask = self._places

    def seen(self, media: Sequence[Media], *, num_tokens: int) -> Seen:
        """The images [B] of sequences of up to `num_tokens` tokens. Raises: ImageError for a broken image."""
        where = np.stack([positions(self.rules, num_tokens, each) for each in media], axis=1)
        is_image = np.zeros((len(media), num_tokens), np.bool_)
        patches: list[NDArray[np.float32]] = []
        grids: list[tuple[int, int, int]] = []
        for row, each in enumerate(media):
            for image in each:
                is_image[row, image.start : image.start + self.rules.num_tokens(image.uri)] = True
                patches.append(self.rules.patches(image.uri))
                grids.append((1, *self.rules.grid(image.uri)))
        pixels = torch.from_numpy(np.concatenate(patches)).to(self._device, self._dtype)
        return Seen(
            positions=torch.from_numpy(where).to(self._device),
            shifts=where[0, :, -1] - (num_tokens - 1),
            is_image=torch.from_numpy(is_image).to(self._device),
            inputs={
                "pixel_values": pixels,
                "image_grid_thw": torch.tensor(grids, device=self._device),
            },
        )

    @contextmanager
    def showing(self, seen: Seen) -> Generator[None]:
        """While this is open, the model's passes are over these sequences."""
        self._is_image = seen.is_image
        try:
            yield
        finally:
            self._is_image = None

    def _places(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """In place of the model's `get_placeholder_mask`: where images are, and where videos are."""
        del args, kwargs
        assert self._is_image is not None, "images outside of `showing`"
        mask = self._is_image[..., None]
        return mask, torch.zeros_like(mask)
