"""Models that see, with random weights, and pictures to show them."""

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from astraflow.addons.tiny_models.spec import ArchitectureConfig, ModelSpec, TokenizerConfig, WarmStartConfig
from astraflow.addons.tiny_models.tiny import init_model
from astraflow.config import Use
from astraflow.models.images import IMAGE, image_uri
from astraflow.models.loading import load_causal_lm
from astraflow.types import MediaRef, Message

__all__ = ["make_question", "no_demonstrations", "picture", "save_seeing_model"]


def no_demonstrations(num: int, seed: int) -> Sequence[object]:
    """Nothing to learn from."""
    del num, seed
    return ()


def save_seeing_model(folder: Path) -> Path:
    """A folder of a tiny Qwen3-VL whose weights are large enough that every part of an image counts."""
    spec = ModelSpec(
        name="seeing",
        architecture=ArchitectureConfig(
            hidden_size=32, mlp_size=48, vision_layers=2, vision_size=16, max_positions=256
        ),
        tokenizer=TokenizerConfig(characters="abcdefghijklmnopqrstuvwxyz ?.=0123456789\n"),
        demonstrations=Use(use="drivers.vision_models:no_demonstrations", args={}),
        warm_start=WarmStartConfig(steps=0),
    )
    init_model(spec, folder)
    model = load_causal_lm(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    return folder


def picture(seed: int, *, width: int = 24, height: int = 16, form: str = "PNG") -> str:
    """The URI of a picture whose pixels the seed decides."""
    image = Image.new("RGB", (width, height))
    image.putdata([tuple((i * k * (seed + 3)) % 256 for k in (3, 5, 7)) for i in range(width * height)])
    file = io.BytesIO()
    image.save(file, form)
    return image_uri(file.getvalue(), f"image/{form.lower()}")


def make_question(text: str, *pictures: str) -> Message:
    """A user's message with pictures before its text."""
    media = tuple(MediaRef(kind=IMAGE, uri=uri, start=0) for uri in pictures)
    return Message(role="user", content=text, media=media)
