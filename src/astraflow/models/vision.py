"""Feeds images to Qwen-VL-like models: the inputs of a forward pass in addition to the tokens.

The model's own code locates images by a token id. But a policy may sample that token, and then it does not
represent an image. So the positions of images are passed to the model explicitly.

Legend: B sequences, T tokens of the longest sequence, P patches of all images, D numbers per patch.
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

__all__ = ["ImageFeed", "ImageInputs", "vocab_size_of"]


def vocab_size_of(model: "PreTrainedModel") -> int:
    """Number of logits. Multimodal models have it in the config of their text model."""
    return int(cast("Any", model).config.get_text_config().vocab_size)


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """The images of some sequences."""

    positions: Tensor
    """[3, B, T]; positions of the tokens in time, height and width. Padding continues the count."""
    shifts: NDArray[np.int64]
    """[B]; position of the last token minus its index."""
    is_image: Tensor
    """bool [B, T]; whether a token represents a piece of an image."""
    inputs: Mapping[str, Tensor]
    """Patches [P, D] of the images, and the rows and columns of each image."""


class ImageFeed:
    """Feeds images to one model. Permanently replaces the model's method that locates images.

    Example: `images = feed.inputs(media, num_tokens=T)`; then `with feed.showing(images):
    model(input_ids=..., position_ids=images.positions, **images.inputs)`.
    """

    def __init__(self, model: "PreTrainedModel", rules: ImageRules) -> None:
        self.rules = rules
        self._model = model  # its device may change until it is called
        self._is_image: Tensor | None = None
        cast("Any", model).base_model.get_placeholder_mask = self._image_masks

    def inputs(self, media: Sequence[Media], *, num_tokens: int) -> ImageInputs:
        """Prepares the images of B sequences of up to `num_tokens` tokens. Raises: ImageError."""
        positions_3BT = np.stack([positions(self.rules, num_tokens, each) for each in media], axis=1)
        is_image = np.zeros((len(media), num_tokens), np.bool_)
        patches: list[NDArray[np.float32]] = []
        grids: list[tuple[int, int, int]] = []
        for row, each in enumerate(media):
            for image in each:
                is_image[row, image.start : image.start + self.rules.num_tokens(image.uri)] = True
                patches.append(self.rules.patches(image.uri))
                grids.append((1, *self.rules.grid(image.uri)))
        pixels = torch.from_numpy(np.concatenate(patches)).to(self._model.device, self._model.dtype)
        return ImageInputs(
            positions=torch.from_numpy(positions_3BT).to(self._model.device),
            shifts=positions_3BT[0, :, -1] - (num_tokens - 1),
            is_image=torch.from_numpy(is_image).to(self._model.device),
            inputs={
                "pixel_values": pixels,
                "image_grid_thw": torch.tensor(grids, device=self._model.device),
            },
        )

    @contextmanager
    def showing(self, images: ImageInputs) -> Generator[None]:
        """Within this context, the model's forward passes use these images."""
        self._is_image = images.is_image
        try:
            yield
        finally:
            self._is_image = None

    def _image_masks(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Replaces the model's `get_placeholder_mask`. Returns the masks of images and of videos."""
        del args, kwargs
        assert self._is_image is not None, "images outside of `showing`"
        mask = self._is_image[..., None]
        return mask, torch.zeros_like(mask)
