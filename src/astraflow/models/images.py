"""Images for Qwen-VL-like models: checks them, cuts them into patches, and places them among the tokens.

An image is sent as a `data:` URI of a PNG or JPEG file, in a `MediaRef` of kind `image`; nothing is ever
fetched. This file decides what such a URI may contain, how many tokens represent the image, which patches a
model gets, and the position of each token in space. Renderer, engine and trainer all use it, so they agree.

Needs Pillow (extra `vision`), and no torch.
Source: Qwen2-VL (Wang et al. 2024, arXiv:2409.12191), sections 2.1 and 2.2, for resizing, patches and
positions.

Legend: P patches of an image, D numbers per patch, T tokens of a sequence.
"""

import base64
import binascii
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import DataError, ImageError
from astraflow.types import MediaRef
from astraflow.user_input.user_files import json_object

__all__ = [
    "IMAGE",
    "MAX_IMAGE_BYTES",
    "MAX_IMAGE_PIXELS",
    "ImageRules",
    "check_image",
    "check_media",
    "image_rules",
    "image_uri",
    "place_images",
    "positions",
    "reads_images",
]

IMAGE = "image"
"""The kind of a `MediaRef` that is an image."""
MAX_IMAGE_BYTES = 2 * 2**20
"""Largest size of an image file. As base64 it fits a reference's URI, and several images fit a request."""
MAX_IMAGE_PIXELS = 2**22
"""Largest number of pixels of an image, 2048 x 2048: 12 MiB decoded, however small the file is."""
_MAX_ASPECT = 200
"""Largest ratio of the longer side to the shorter; Qwen-VL's resizing is not defined beyond it."""
_CACHED_IMAGES = 16
"""Number of decoded images that are cached, because a group's episodes share images; at most 12 MiB each."""
_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG"}

_FAMILIES = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
"""Values of `model_type` whose images this file supports."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


def image_uri(data: bytes, media_type: str) -> str:
    """The `data:` URI of a file's bytes. Example: `image_uri(png, "image/png")`."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def check_image(uri: str) -> None:
    """Checks that a URI holds an image that a model can read. Decodes the whole image to be sure.

    Raises: ImageError if it is a remote address, not a PNG or JPEG file, too large, animated, or broken.
    """
    _pixels(uri)


@lru_cache(_CACHED_IMAGES)
def _pixels(uri: str) -> NDArray[np.uint8]:
    """The decoded image, [height, width, 3] in RGB, without transparency."""
    media_type, data = _file(uri)
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as err:
        raise ImageError("images need Pillow: pip install 'astraflow[vision]'") from err
    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        # `open` reads only the header. The pixels are decoded once their number is known to be small.
        with Image.open(io.BytesIO(data), formats=[_FORMATS[media_type]]) as image:
            _check_size(image.width, image.height, num_frames=getattr(image, "n_frames", 1))
            return np.asarray(image.convert("RGB"))
    except bombs as err:
        raise ImageError(f"an image has more than {MAX_IMAGE_PIXELS} pixels: {err}") from err
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, EOFError) as err:
        raise ImageError(f"an image is not a complete {_FORMATS[media_type]} file: {err}") from err


def _file(uri: str) -> tuple[str, bytes]:
    """The media type and the bytes of a `data:` URI."""
    head, comma, text = uri.partition(",")
    if not uri.startswith("data:") or not comma:
        raise ImageError(
            f"an image is given as {uri[:60]!r}, but images are never fetched; send the file itself as "
            "data:image/png;base64,... or data:image/jpeg;base64,..."
        )
    media_type, _, encoding = head.removeprefix("data:").partition(";")
    if media_type not in _FORMATS or encoding != "base64":
        raise ImageError(f"an image is {head[:60]!r}; expected {' or '.join(_FORMATS)}, as base64")
    if len(text) > 4 * (MAX_IMAGE_BYTES // 3 + 1):  # refuses it before decoding
        raise ImageError(f"an image has more than {MAX_IMAGE_BYTES} bytes; send a smaller one")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as err:
        raise ImageError(f"an image is not valid base64: {err}") from err
    if len(data) > MAX_IMAGE_BYTES:
        raise ImageError(
            f"an image has {len(data)} bytes; the limit is {MAX_IMAGE_BYTES}: send a smaller one"
        )
    return media_type, data


def _check_size(width: int, height: int, *, num_frames: int) -> None:
    if width * height > MAX_IMAGE_PIXELS:
        raise ImageError(
            f"an image has {width} x {height} pixels; the limit is {MAX_IMAGE_PIXELS}: send a smaller one"
        )
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise ImageError(
            f"an image of {width} x {height} pixels is too narrow; its longer side may be at most "
            f"{_MAX_ASPECT} times the shorter"
        )
    if num_frames > 1:
        raise ImageError(f"an image has {num_frames} frames; expected one")


@dataclass(frozen=True)
class ImageRules:
    """How one model reads images. Example: `image_rules(folder).num_tokens(uri)`."""

    token_id: int
    """The token that represents a piece of an image; it occurs once per piece."""
    patch: int
    """Pixels along the side of a patch."""
    merge: int
    """Patches along the side of the square of patches that becomes one token."""
    frames: int
    """Frames of a patch; a single image is repeated that many times."""
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def grid(self, uri: str) -> tuple[int, int]:
        """Rows and columns of patches. Raises: ImageError as `check_image`."""
        height, width = _pixels(uri).shape[:2]
        rows, columns = self._target_size(height, width)
        return rows // self.patch, columns // self.patch

    def num_tokens(self, uri: str) -> int:
        """Number of tokens that represent an image. Raises: ImageError as `check_image`."""
        rows, columns = self.grid(uri)
        return rows * columns // self.merge**2

    def patches(self, uri: str) -> Floats:
        """The patches [P, D] of an image; those that become one token are adjacent. Raises: ImageError."""
        pixels = self.resize(uri).astype(np.float32) / np.float32(255)
        pixels = (pixels - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        rows = pixels.shape[0] // (self.patch * self.merge)
        columns = pixels.shape[1] // (self.patch * self.merge)
        split = pixels.reshape(rows, self.merge, self.patch, columns, self.merge, self.patch, 3)
        # From (token row, patch row, pixel row, token column, patch column, pixel column, channel) to
        # (token row, token column, patch row, patch column, channel, pixel row, pixel column).
        split = split.transpose(0, 3, 1, 4, 6, 2, 5)
        split = np.repeat(split[:, :, :, :, :, None], self.frames, axis=5)
        return np.ascontiguousarray(split.reshape(rows * columns * self.merge**2, -1))

    def _target_size(self, height: int, width: int) -> tuple[int, int]:
        """The nearest size whose sides are whole numbers of tokens and whose number of pixels is in
        bounds."""
        side = self.patch * self.merge
        rows = round(height / side) * side
        columns = round(width / side) * side
        if rows * columns > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(side, math.floor(height / shrink / side) * side)
            columns = max(side, math.floor(width / shrink / side) * side)
        elif rows * columns < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * grow / side) * side
            columns = math.ceil(width * grow / side) * side
        return rows, columns

    def resize(self, uri: str) -> NDArray[np.uint8]:
        """The image [height, width, 3] in the size that the model reads."""
        from PIL import Image

        pixels = _pixels(uri)
        rows, columns = self._target_size(*pixels.shape[:2])
        return np.asarray(Image.fromarray(pixels).resize((columns, rows), Image.Resampling.BICUBIC))


def reads_images(config: Mapping[str, Any]) -> bool:
    """Whether a model with this `config.json` belongs to a family whose images this file supports."""
    return config.get("model_type") in _FAMILIES


def image_rules(model_dir: Path) -> ImageRules | None:
    """How the model in a folder reads images; None for a text-only model or an unsupported family.

    Raises: DataError if the model reads images, but the folder does not say how.
    """
    config = json_object(model_dir / "config.json")
    if not reads_images(config):
        return None
    path = model_dir / "preprocessor_config.json"
    whole = json_object(model_dir / "processor_config.json")  # transformers 5 writes one file for all parts
    settings = json_object(path) or whole.get("image_processor", {})
    size = cast("Mapping[str, int]", settings.get("size") or {})
    try:
        return ImageRules(
            token_id=int(config["image_token_id"]),
            patch=int(settings["patch_size"]),
            merge=int(settings["merge_size"]),
            frames=int(settings["temporal_patch_size"]),
            min_pixels=int(settings.get("min_pixels") or size["shortest_edge"]),
            max_pixels=int(settings.get("max_pixels") or size["longest_edge"]),
            mean=_three(settings["image_mean"]),
            std=_three(settings["image_std"]),
        )
    except (KeyError, TypeError, ValueError) as err:
        raise DataError(
            f"{path}: {type(err).__name__}: {err}; it must have patch_size, merge_size, temporal_patch_size, "
            "the bounds on pixels, image_mean and image_std, as in the published folders of Qwen-VL"
        ) from err


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue


def place_images(rules: ImageRules, token_ids: Sequence[int], uris: Sequence[str]) -> tuple[MediaRef, ...]:
    """References to the images of a token sequence, in order. Each starts at the image's first token.

    Raises: ImageError if the image tokens do not represent exactly these images.
    """
    is_piece = np.asarray(token_ids, np.int64) == rules.token_id
    pieces = np.flatnonzero(is_piece).tolist()
    counts = [rules.num_tokens(uri) for uri in uris]
    if len(pieces) != sum(counts):
        raise ImageError(
            f"the prompt has {len(pieces)} image tokens, but its {len(uris)} images need {sum(counts)}; does "
            "the chat template render all images, or does a text contain the template's image marker?"
        )
    refs: list[MediaRef] = []
    used = 0
    for uri, count in zip(uris, counts, strict=True):
        start = pieces[used]
        if pieces[used + count - 1] != start + count - 1:
            raise ImageError(f"the {count} tokens of an image are not adjacent in the prompt")
        refs.append(MediaRef(kind=IMAGE, uri=uri, start=start))
        used += count
    return tuple(refs)


def check_media(rules: ImageRules | None, token_ids: Sequence[int], media: Sequence[MediaRef]) -> None:
    """Checks that tokens represent images where `media` says so, and that text follows the last image.

    Raises: ImageError if not, or if the model reads only text (`rules` is None).
    """
    if not media:
        return
    if rules is None:
        raise ImageError("the model reads only text, but the prompt has an image")
    end = 0
    for each in media:
        start = end
        end = each.start + rules.num_tokens(each.uri)
        pieces = token_ids[each.start : end]
        if each.kind != IMAGE or each.start < start or end >= len(token_ids):
            raise ImageError(
                f"media of kind {each.kind!r} at token {each.start} of {len(token_ids)} is out of place"
            )
        if any(piece != rules.token_id for piece in pieces):
            raise ImageError(
                f"the image at token {each.start} needs {end - each.start} tokens, but some of them are not "
                "image tokens"
            )


def positions(rules: ImageRules, num_tokens: int, media: Sequence[MediaRef]) -> Ints:
    """The position of each token in time, height and width, [3, T].

    A text token has the same position on all three axes. The tokens of an image share one time, and have the
    height of their row and the width of their column. The text after an image continues with the position
    after the largest so far.
    """
    positions_3T = np.zeros((3, num_tokens), np.int64)
    done = 0
    free = 0  # the smallest position that no token has yet
    for each in media:
        positions_3T[:, done : each.start] = free + np.arange(each.start - done)
        free += each.start - done
        rows, columns = (side // rules.merge for side in rules.grid(each.uri))
        done = each.start + rows * columns
        positions_3T[0, each.start : done] = free
        positions_3T[1, each.start : done] = free + np.repeat(np.arange(rows), columns)
        positions_3T[2, each.start : done] = free + np.tile(np.arange(columns), rows)
        free += max(rows, columns)
    positions_3T[:, done:] = free + np.arange(num_tokens - done)
    return positions_3T
