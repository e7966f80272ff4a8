"""The interface between a running batch and a model, and the choice of its implementation.

`lean` runs the Llama family from its parameters, without module code. For small models, it takes a fraction
of the time. `generic` runs any causal language model of transformers whose attention goes through its
`AttentionInterface`. For `exact: true`, an add-on has the pass whose logprobs are bitwise equal to the
trainer's. Each must agree with the model's own forward pass before it is used.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from astraflow import added
from astraflow.errors import DataError
from astraflow.models.families import engine_refusal, family_of, length_refusal
from astraflow.models.images import ImageRules
from astraflow.models.vision import vocab_size_of
from astraflow.rollout.engines.cache import CacheShape, KvCache, Stretch
from astraflow.rollout.engines.generic import GenericForward
from astraflow.rollout.engines.lean import LeanForward, is_lean
from astraflow.rollout.engines.sampling import token_logprobs
from astraflow.types import Media

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Forward", "make_forward", "score"]

logger = logging.getLogger(__name__)

_PROBE_LENGTHS = (24, 7, 1)
"""Lengths of the prefixes in the comparison, longest first. They differ, so that padding is tested too."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.02}
"""Largest mean difference of logprobs in the comparison, in nats. Rounding errors stay below it, and wrong
formulas are far above it."""
_ROUNDING_MARGIN = 1.5
"""A deep model in bfloat16 may differ by more from the same model in float32. The lean forward, which rounds
elsewhere, may differ from the latter by this many times as much."""


_INSTEAD = "Generate with rollout.engine `vllm` or `sglang` (docs/models.md says what was tried)"


class Forward(Protocol):
    """A model that decodes with a `KvCache`. It reads its parameters at every call."""

    @property
    def cache_shape(self) -> CacheShape: ...

    @property
    def vocab_size(self) -> int: ...

    def refresh(self) -> None:
        """Recomputes what is derived from parameters after they have been replaced in place."""
        ...

    def prefill(
        self, tokens: Tensor, rows: Tensor, cache: KvCache, media: Sequence[Media] | None = None
    ) -> None:
        """Stores keys and values of prefixes [B, T], padded on the right, in the cache's rows [B].

        `media` [B]: the images of each prefix; None if no prefix has any, as for all models that read only
        text.
        """
        ...

    def extend(self, tokens: Tensor, stretch: Stretch, cache: KvCache) -> None:
        """Stores keys and values of tokens [B, T] that follow prefixes in the cache, padded on the right."""
        ...

    def decode(self, tokens: Tensor, positions: NDArray[np.int64], cache: KvCache) -> Tensor:
        """Runs one step of rows 0..B-1, from their newest tokens [B] and the positions [B] of these tokens.

        Stores the keys and values of the tokens.
        Returns: logits [B, V] of the next tokens.
        """
        ...

    def sequence_logits(self, tokens: Tensor) -> Iterator[Tensor]:
        """The logits [T - 1, V] of tokens 1..T-1 of one sequence [T], without a cache, cut into parts."""
        ...


@torch.inference_mode()
def make_forward(
    model: "PreTrainedModel",
    *,
    max_context: int,
    name: str = "model",
    exact: bool = False,
    images: ImageRules | None = None,
) -> Forward:
    """Makes the fastest `Forward` that agrees with the model's own; with `exact`, the batch-invariant one.

    `images`: how the model reads images; None if it reads only text.

    Raises: DataError, which names the model's family and the reason, if the model cannot be run with slots.
    """
    config = cast("Mapping[str, Any]", cast("Any", model).config.to_dict())
    who = f"{name} ({family_of(config)}, {type(model).__name__})"
    if reason := engine_refusal(config):
        raise DataError(f"{who}: the torch engine cannot generate with it: {reason}. {_INSTEAD}")
    if reason := length_refusal(config, max_context=max_context):
        raise DataError(f"{who}: {reason}")
    # Any tokens will do for the probe, as long as they differ.
    probe = torch.arange(max(_PROBE_LENGTHS)).mul(7).remainder(vocab_size_of(model))
    probe = probe[: max_context - 1].to(model.device)
    expected = _own_logprobs(model, probe)
    tolerance = _TOLERANCE[model.dtype]
    if exact:
        return _check_exact(added.InvariantForward(model), probe, expected, who)
    if is_lean(model, max_context=max_context):
        precise = _precise_logprobs(model, probe)
        lean = LeanForward(model, max_context=max_context)
        error = _probe_error(lean, probe, precise)
        if error <= max(tolerance, _ROUNDING_MARGIN * _own_error(probe, expected, precise)):
            return lean
        logger.warning("%s: lean forward differs by %.2g nats; using the module code", name, error)
    try:
        generic = GenericForward(model, images)
        error = _probe_error(generic, probe, expected)
    except (AttributeError, DataError, KeyError, RuntimeError, TypeError, ValueError) as err:
        # The code of an untested family may raise any of these.
        raise DataError(
            f"{who}: the torch engine cannot generate with it, because its code does not run with the "
            f"engine's cache: {err}. {_INSTEAD}"
        ) from err
    if not error <= tolerance:  # true for NaN as well
        raise DataError(
            f"{who}: decoding with slots differs from the model's own forward by {error:.2g} nats (allowed: "
            f"{tolerance}); its attention is not one that the torch engine can run. {_INSTEAD}"
        )
    return generic


def _check_exact(forward: Forward, tokens: Tensor, expected: Tensor, who: str) -> Forward:
    """Returns `forward`. Raises: DataError if it differs too much from the model's own forward pass."""
    error = _probe_error(forward, tokens, expected)
    if not error <= _TOLERANCE[expected.dtype]:  # true for NaN as well
        raise DataError(
            f"{who}: exact: true differs from the model's own forward by {error:.2g} nats; leave exact out"
        )
    return forward


def _own_logprobs(model: "PreTrainedModel", tokens: Tensor) -> Tensor:
    output = cast("Any", model)(input_ids=tokens[None], use_cache=False)
    return torch.log_softmax(output.logits[0].float(), -1)


def _precise_logprobs(model: "PreTrainedModel", tokens: Tensor) -> Tensor:
    """The model's own logprobs, computed in float32.

    Each module has its weights in float32 only while it runs, so the memory of one is enough.
    """
    kept: dict[nn.Parameter, Tensor] = {}

    def widen(module: nn.Module, _inputs: object) -> None:
        for weight in module.parameters(recurse=False):
            kept[weight] = weight.data
            weight.data = weight.data.float()

    def restore(module: nn.Module, _inputs: object, _output: object) -> None:
        for weight in module.parameters(recurse=False):
            weight.data = kept.pop(weight)

    modules = [module for module in model.modules() if model.dtype != torch.float32]
    hooks = [module.register_forward_pre_hook(widen) for module in modules]
    hooks += [module.register_forward_hook(restore) for module in modules]
    try:
        return _own_logprobs(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()


def _own_error(tokens: Tensor, own: Tensor, precise: Tensor) -> float:
    """Mean difference between two logprobs [T, V] of a model, where `_probe_error` compares them."""
    ends = [n - 1 for n in _PROBE_LENGTHS if n <= len(tokens)]
    difference = (own - precise).abs()
    scored = difference[:-1].gather(1, tokens[1:, None])
    return float(torch.cat((difference[[*ends, *ends]].reshape(-1), scored[:, 0])).mean())


def _probe_error(forward: Forward, tokens: Tensor, expected: Tensor) -> float:
    """Mean difference between a forward's logprobs and the expected ones [T, V], in nats.

    It prefills prefixes of several lengths together, and decodes one token after each. It then computes the
    second half of each prefix again with `extend`, and decodes again. It compares scoring too.
    """
    lengths = [n for n in _PROBE_LENGTHS if n <= len(tokens)]
    cache = KvCache(forward.cache_shape, num_slots=len(lengths), max_context=len(tokens) + 1)
    rows = torch.arange(len(lengths), device=tokens.device)
    forward.prefill(tokens.expand(len(lengths), -1), rows, cache)
    last = np.array(lengths, dtype=np.int64) - 1
    newest = tokens[torch.from_numpy(last).to(tokens.device)]
    logits = forward.decode(newest, last, cache)
    starts = torch.from_numpy(last // 2).to(tokens.device)
    stretch = cache.stretch(rows, starts, lengths[0] - lengths[0] // 2, reach=lengths[0])
    forward.extend(tokens[stretch.positions.clamp(max=len(tokens) - 1)], stretch, cache)
    again = forward.decode(newest, last, cache)
    decoded = torch.log_softmax(torch.cat((logits, again)).float(), -1) - expected[[*last, *last]]
    whole = score(forward, tokens) - expected[:-1].gather(1, tokens[1:, None])[:, 0]
    return float(torch.cat((decoded.abs().reshape(-1), whole.abs())).mean())


def score(forward: Forward, tokens: Tensor) -> Tensor:
    """Logprobs [T - 1] of tokens 1..T-1 of one sequence [T], at temperature 1."""
    start = 1
    found: list[Tensor] = []
    for logits in forward.sequence_logits(tokens):
        found.append(token_logprobs(logits, tokens[start : start + len(logits)]))
        start += len(logits)
    return torch.cat(found)
