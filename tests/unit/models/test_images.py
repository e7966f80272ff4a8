"""Images: what is refused, and that patches, positions and places are those of the models' own code."""

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from astraflow.errors import DataError, ImageError
from astraflow.models.images import (
    MAX_IMAGE_BYTES,
    ImageRules,
    check_image,
    check_media,
    image_rules,
    image_uri,
    place_images,
    positions,
)
from astraflow.models.loading import load_causal_lm
from astraflow.models.vision import ImageFeed
from astraflow.types import MediaRef
from drivers.vision_models import picture, save_seeing_model

RULES = ImageRules(
    token_id=9,
    patch=4,
    merge=2,
    frames=2,
    min_pixels=64,
    max_pixels=4096,
    mean=(0.48, 0.45, 0.4),
    std=(0.26, 0.26, 0.27),
)


def png_header(width: int, height: int) -> bytes:
    """A PNG file of some bytes that says that it has so many pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\x00\x00\x00\x00IEND\xaeB`\x82"


def animated() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:])
    return file.getvalue()


def png(data: bytes) -> str:
    return image_uri(data, "image/png")


WHOLE = base64.b64decode(picture(0).partition(",")[2])
REFUSED = {
    "remote": ("https://example.com/cat.png", "never fetched"),
    "file": ("file:///etc/passwd", "never fetched"),
    "svg": ("data:image/svg+xml;base64,AAAA", "expected image/png or image/jpeg"),
    "plain": ("data:image/png,AAAA", "as base64"),
    "letters": ("data:image/png;base64,@@@@", "not valid base64"),
    "empty": ("data:image/png;base64,", "not a complete PNG"),
    "other": (image_uri(WHOLE, "image/jpeg"), "not a complete JPEG"),
    "cut": (png(WHOLE[:-30]), "not a complete PNG"),
    "large": (png(bytes(MAX_IMAGE_BYTES + 3)), "more than 2097152 bytes"),
    "wide": (png(png_header(3000, 2000)), "3000 x 2000 pixels"),
    "bomb": (png(png_header(30_000, 30_000)), "pixels"),
    "warned": (png(png_header(10_000, 10_000)), "pixels"),
    "narrow": (png(png_header(1, 300)), "is too narrow"),
    "animated": (png(animated()), "2 frames"),
}


@pytest.mark.parametrize(("uri", "named"), REFUSED.values(), ids=REFUSED)
def test_an_image_that_cannot_be_shown_is_refused_by_name(uri: str, named: str) -> None:
    with pytest.raises(ImageError, match=named):
        check_image(uri)


def test_png_and_jpeg_of_any_mode_are_read() -> None:
    for form, mode in (("PNG", "RGBA"), ("PNG", "P"), ("PNG", "I;16"), ("JPEG", "CMYK"), ("JPEG", "L")):
        file = io.BytesIO()
        Image.new(mode, (9, 7)).save(file, form)
        check_image(image_uri(file.getvalue(), f"image/{form.lower()}"))


@pytest.mark.parametrize("size", [(24, 16), (5, 3), (200, 61), (8, 8), (7, 90)])
def test_patches_are_those_of_the_models_own_processor(size: tuple[int, int]) -> None:
    width, height = size
    uri = picture(1, width=width, height=height)
    own = Qwen2VLImageProcessorPil(
        size={"shortest_edge": RULES.min_pixels, "longest_edge": RULES.max_pixels},
        patch_size=RULES.patch,
        merge_size=RULES.merge,
        temporal_patch_size=RULES.frames,
        image_mean=list(RULES.mean),
        image_std=list(RULES.std),
    )
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as image:
        expected = own(image, return_tensors="np")
    assert tuple(expected["image_grid_thw"][0]) == (1, *RULES.grid(uri))
    np.testing.assert_allclose(RULES.patches(uri), expected["pixel_values"], atol=1e-6)
    assert RULES.num_tokens(uri) * RULES.merge**2 == len(RULES.patches(uri))


def shown(*uris: str) -> list[int]:
    """Tokens that show images, each between two texts."""
    tokens = [1, 2]
    for uri in uris:
        tokens += [RULES.token_id] * RULES.num_tokens(uri) + [3]
    return tokens


def test_positions_are_those_of_the_models_own_code(tmp_path: Path) -> None:
    model: Any = load_causal_lm(save_seeing_model(tmp_path / "seeing"))
    uris = (picture(0), picture(1, width=9, height=40))
    tokens = shown(*uris)
    ids = torch.tensor([tokens])
    grids = torch.tensor([[1, *RULES.grid(uri)] for uri in uris])
    expected, delta = model.model.get_rope_index(ids, (ids == RULES.token_id).int(), image_grid_thw=grids)
    found = positions(RULES, len(tokens), place_images(RULES, tokens, uris))
    np.testing.assert_array_equal(found, expected[:, 0].numpy())
    assert found[0, -1] - (len(tokens) - 1) == int(delta)


def test_an_older_family_is_seen_by_the_same_rules() -> None:
    uris = (picture(0), picture(1, width=9, height=40))
    tokens = shown(*uris)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
        vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": RULES.patch,
            "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [0],
        },
        image_token_id=RULES.token_id,
        vision_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen2_5_VLForConditionalGeneration(config).eval()
    ids = torch.tensor([tokens])
    pixels = torch.from_numpy(np.concatenate([RULES.patches(uri) for uri in uris]))
    grids = torch.tensor([[1, *RULES.grid(uri)] for uri in uris])
    with torch.no_grad():
        expected = model(
            input_ids=ids, pixel_values=pixels, image_grid_thw=grids,
            mm_token_type_ids=(ids == RULES.token_id).int(), use_cache=False,
        ).logits  # fmt: skip
        feed = ImageFeed(model, RULES)
        images = feed.inputs([place_images(RULES, tokens, uris)], num_tokens=len(tokens))
        with feed.showing(images):
            found = model(
                input_ids=ids, position_ids=images.positions, use_cache=False, **images.inputs
            ).logits
    torch.testing.assert_close(found, expected)


def test_tokens_that_do_not_show_the_images_are_refused() -> None:
    uri = picture(0)
    tokens = shown(uri)
    (media,) = place_images(RULES, tokens, [uri])
    check_media(RULES, tokens, [media])
    with pytest.raises(ImageError, match="its 2 images need 12"):
        place_images(RULES, tokens, [uri, uri])
    with pytest.raises(ImageError, match="are not adjacent"):
        place_images(RULES, [9, 9, 1, 9, 9, 9, 9], [uri])
    for wrong in (
        MediaRef(kind="image", uri=uri, start=1),
        MediaRef(kind="sound", uri=uri, start=2),
        MediaRef(kind="image", uri=uri, start=500),
    ):
        with pytest.raises(ImageError, match=r"out of place|not image tokens"):
            check_media(RULES, tokens, [wrong])
    with pytest.raises(ImageError, match="out of place"):
        check_media(RULES, tokens[:-1], [media])
    with pytest.raises(ImageError, match="reads only text"):
        check_media(None, tokens, [media])


def test_a_folder_that_sees_must_say_how(tmp_path: Path) -> None:
    assert image_rules(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "image_token_id": 9}')
    with pytest.raises(DataError, match=r"preprocessor_config.json.*patch_size"):
        image_rules(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama4", "vision_config": {}}')
    assert image_rules(tmp_path) is None
