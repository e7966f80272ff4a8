"""Trains a tiny model to a partial skill, by supervised learning on demonstrations.

This module owns only the training loop. It trains the model in place, in float32 on the CPU, on each
demonstration once and in the given order. Repeating the training on the same machine with the same number of
threads gives the same weights.
"""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3VLForConditionalGeneration,
)

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.addons.tiny_models.spec import WarmStartConfig
from astraflow.addons.tiny_models.tokenizer import IMAGE_TOKEN, shown_tools
from astraflow.errors import ConfigError, DataError
from astraflow.models.images import ImageRules, place_images
from astraflow.models.vision import ImageFeed
from astraflow.types import Media, Message

__all__ = ["IGNORED", "Progress", "TinyModel", "padded", "torch_threads", "train_on", "warm_start"]

Progress = Callable[[str], None]
"""Receives one line of progress."""
TinyModel = Qwen3ForCausalLM | Qwen3MoeForCausalLM | Qwen3VLForConditionalGeneration
"""A model that a spec describes."""

IGNORED = -100
"""Target of a position that isn't learned, which is torch's default."""
_REPORTS = 10
"""Number of lines of progress that a warm start reports."""
_MAX_GRAD_NORM = 1.0
"""Gradients with a larger norm are scaled down to this norm."""
_RowT = TypeVar("_RowT")
_Row = tuple[list[int], list[int], Media]
"""The token ids of a conversation; its targets, which are the same ids where they are learned and `IGNORED`
elsewhere; and its images."""


def warm_start(
    model: TinyModel,
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: Sequence[Demonstration],
    *,
    config: WarmStartConfig,
    progress: Progress,
    images: ImageRules | None = None,
) -> None:
    """Trains the model to generate the assistant's messages and their end tokens. Nothing else is learned.

    `images`: how images become tokens; None for a text-only model.

    Raises: ConfigError if a demonstration needs characters that the tokenizer lacks, or has no message of the
    assistant; DataError if torch is too old to have Muon.
    """
    if config.steps == 0:
        return
    rows = _encode(tokenizer, demonstrations, images)
    feed = None if images is None else ImageFeed(model, images)
    pad_id = cast("int", tokenizer.pad_token_id)

    def loss_of(batch: Sequence[_Row]) -> Tensor:
        ids, targets = padded([(ids, targets) for ids, targets, _ in batch], pad_id=pad_id)
        # The output at each position predicts the next token.
        logits = _logits(model, ids, feed, [media for _, _, media in batch])[:, :-1]
        return cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)

    train_on(
        rows, loss_of, model=model, optimizers=_optimizers(model, config.lr), config=config, progress=progress
    )


def train_on(
    rows: Sequence[_RowT],
    loss_of: Callable[[Sequence[_RowT]], Tensor],
    *,
    model: Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: WarmStartConfig,
    progress: Progress,
) -> None:
    """Trains a model in place on `config.steps` batches of rows. `loss_of` returns the loss of a batch."""
    model.train()
    for step in range(config.steps):
        start = step * config.batch_size
        loss = loss_of(rows[start : start + config.batch_size])
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        lr = config.lr * _schedule(step, config.steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        if (step + 1) % math.ceil(config.steps / _REPORTS) == 0:
            progress(f"warm start: step {step + 1} of {config.steps}, loss {loss.item():.3f}")
    model.eval()


def _encode(
    tokenizer: PreTrainedTokenizerFast, demonstrations: Sequence[Demonstration], images: ImageRules | None
) -> list[_Row]:
    """Encodes each conversation as the chat template renders it.

    The targets are the assistant's messages and their end tokens.

    Raises: ConfigError if a demonstration has no message of the assistant, or if the tokenizer lacks a
    character.
    """
    opening = cast("int", tokenizer.convert_tokens_to_ids("<assistant>"))
    end = cast("int", tokenizer.eos_token_id)
    # One call of the tokenizer for all texts takes a tenth of the time of single calls.
    texts: list[str] = []
    for each in demonstrations:
        # The first text shows the tools; it may be empty.
        texts += [shown_tools(each.tools), *(_text(message, images) for message in each.conversation)]
    encode = cast("Callable[[list[str]], Any]", tokenizer)
    encoded = iter(cast("list[list[int]]", encode(texts)["input_ids"]) if texts else [])
    rows: list[_Row] = []
    for demonstration in demonstrations:
        ids = list(next(encoded))
        targets = [IGNORED] * len(ids)
        for message in demonstration.conversation:
            words = next(encoded)
            is_learned = message.role == "assistant"
            ids += [opening, *words, end] if is_learned else words
            targets += [IGNORED, *words, end] if is_learned else [IGNORED] * len(words)
        _check(demonstration, ids, targets, unknown=cast("int", tokenizer.unk_token_id))
        uris = [each.uri for message in demonstration.conversation for each in message.images]
        rows.append((ids, targets, () if images is None else place_images(images, ids, uris)))
    return rows


def _text(message: Message, images: ImageRules | None) -> str:
    """Returns a message's content in which image tokens represent each image.

    Raises: ConfigError if the message has an image and the model is text-only.
    """
    if not message.images:
        return message.content
    if images is None:
        raise ConfigError(
            f"the demonstration {message.content!r} has an image, and architecture.vision_layers is 0"
        )
    text = message.content
    for each in reversed(message.images):
        text = text[: each.start] + IMAGE_TOKEN * images.num_tokens(each.uri) + text[each.start :]
    return text


def _check(demonstration: Demonstration, ids: Sequence[int], targets: Sequence[int], *, unknown: int) -> None:
    turns = " -> ".join(repr(message.content) for message in demonstration.conversation)
    if unknown in ids:
        raise ConfigError(f"tokenizer.characters lack a character of the demonstration {turns}")
    if all(target == IGNORED for target in targets):
        raise ConfigError(f"the demonstration {turns} has no message of the role `assistant` to learn")


def padded(rows: Sequence[tuple[list[int], list[int]]], *, pad_id: int) -> tuple[Tensor, Tensor]:
    """Returns token ids and targets [B, T], padded on the right, where a causal model needs no mask."""
    longest = max(len(ids) for ids, _ in rows)
    padded_ids = torch.full((len(rows), longest), pad_id)
    padded_targets = torch.full((len(rows), longest), IGNORED)
    for row, (ids, targets) in enumerate(rows):
        padded_ids[row, : len(ids)] = torch.tensor(ids)
        padded_targets[row, : len(targets)] = torch.tensor(targets)
    return padded_ids, padded_targets


def _logits(model: Any, ids: Tensor, feed: ImageFeed | None, media: Sequence[Media]) -> Tensor:
    if feed is None or not any(media):
        return model(input_ids=ids, use_cache=False).logits
    images = feed.inputs(media, num_tokens=ids.shape[1])
    with feed.showing(images):
        return model(input_ids=ids, position_ids=images.positions, use_cache=False, **images.inputs).logits


def _optimizers(model: TinyModel, lr: float) -> tuple[torch.optim.Optimizer, ...]:
    """Returns Muon for the layers' matrices, and AdamW for all other parameters.

    Muon (orthogonalized momentum) needs about a third of AdamW's steps here, but it supports only matrices.
    AdamW also trains the embedding and the output head, as Muon's authors advise, and the experts, which are
    one tensor per layer.

    Raises: DataError if torch is too old to have Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise DataError(
            f"the warm start needs torch.optim.Muon, which torch has since 2.9; this is {torch.__version__}. "
            "Everything else runs with torch >= 2.8: build the model where torch is newer and copy its folder"
        )
    if isinstance(model, Qwen3VLForConditionalGeneration):
        parts = cast("Any", model.model)
        layers: list[Module] = [parts.language_model.layers, parts.visual.blocks]
    else:
        layers = [model.model.layers]
    matrices = [p for part in layers for p in part.parameters() if p.ndim == 2]
    are_matrices = {id(p) for p in matrices}  # by identity, because `==` compares tensors element by element
    others = [p for p in model.parameters() if id(p) not in are_matrices]
    return (
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.99), weight_decay=0.0),
    )


def _schedule(step: int, steps: int) -> float:
    """Returns the share of the peak rate: it rises over the first twentieth, then falls linearly to 0."""
    num_rising = max(1, steps // 20)
    return min((step + 1) / num_rising, (steps - step) / (steps - num_rising + 1))


@contextmanager
def torch_threads(num: int) -> Generator[None]:
    """Sets torch's number of threads within the block, because the last bits of sums depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
