"""Checks the requests to an engine, and finds the end of completions: stop texts and stop token ids.

All engines share this file. It does not import torch, and loads a tokenizer only if stop texts or stop ids
need one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from astraflow.errors import DataError, RolloutError
from astraflow.models.model_folder import has_tokenizer
from astraflow.models.stop_ids import folder_stop_ids
from astraflow.types import Sampling

__all__ = [
    "StopText",
    "TokenDecoder",
    "check_sampling",
    "check_tokens",
    "load_decoder",
    "stop_ids",
    "stop_ids_below",
]

_MAX_STOPS = 64
_MAX_STOP_CHARS = 256
"""Length of the longest stop text. At every token, an engine searches a tail of about that length."""
_TOKENS_PER_CHARACTER = 4
"""A UTF-8 character has at most 4 bytes, and a token at least one byte."""


def check_sampling(sampling: Sampling) -> None:
    """Raises: RolloutError (not retryable) if a setting is out of range."""
    problems: list[str] = []
    if not 0 <= sampling.temperature < float("inf"):
        problems.append(f"temperature = {sampling.temperature}; expected a number >= 0 (0 is greedy)")
    if not 0 < sampling.top_p <= 1:
        problems.append(f"top_p = {sampling.top_p}; expected a number in (0, 1]")
    if sampling.top_k < 0:
        problems.append(f"top_k = {sampling.top_k}; expected a number >= 0 (0 keeps all)")
    if sampling.max_tokens < 1:
        problems.append(f"max_tokens = {sampling.max_tokens}; expected a number >= 1")
    if "" in sampling.stop:
        problems.append("stop holds an empty text")
    longest = max(map(len, sampling.stop), default=0)
    if longest > _MAX_STOP_CHARS:
        problems.append(f"stop holds a text of {longest} characters; expected at most {_MAX_STOP_CHARS}")
    if len(sampling.stop) > _MAX_STOPS:
        problems.append(f"stop holds {len(sampling.stop)} texts; expected at most {_MAX_STOPS}")
    if problems:
        raise RolloutError(f"sampling settings: {'; '.join(problems)}", is_retryable=False)


def check_tokens(token_ids: Sequence[int], *, num_needed: int, max_context: int, vocab_size: int) -> None:
    """Raises: RolloutError (not retryable) if there are no tokens, too many, or unknown ones."""
    if not token_ids:
        raise RolloutError("the request has no tokens; a prompt needs at least one", is_retryable=False)
    if num_needed > max_context:
        raise RolloutError(
            f"{len(token_ids)} tokens leave no room within rollout.engine.max_context = {max_context}",
            is_retryable=False,
        )
    low = min(token_ids)
    high = max(token_ids)
    if low < 0 or high >= vocab_size:
        raise RolloutError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}; "
            "was the text rendered with another tokenizer?",
            is_retryable=False,
        )


class TokenDecoder(Protocol):
    """Decodes token ids to text."""

    def __call__(self, token_ids: Sequence[int]) -> str: ...


class StopText:
    """Searches a completion for texts that end it. Only the tail of the completion is decoded.

    Example: `StopText(("</answer>",), decode).is_reached([5, 8, 13])`.
    """

    def __init__(self, texts: tuple[str, ...], decode: TokenDecoder) -> None:
        self._texts = texts
        self._decode = decode
        longest = max(len(text) for text in texts)
        self.num_tokens = _TOKENS_PER_CHARACTER * (longest + 1)
        """Number of newest tokens that are certain to contain a stop text that has just been completed."""

    def is_reached(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest token of the completion has completed a stop text."""
        tail = self._decode(token_ids[-self.num_tokens :])
        return any(text in tail for text in self._texts)


def stop_ids(model: Any, model_dir: Path) -> frozenset[int]:
    """The ids that end a completion of a loaded model. See `models.stop_ids`."""
    return stop_ids_below(int(model.config.get_text_config().vocab_size), model_dir)


def stop_ids_below(vocab_size: int, model_dir: Path) -> frozenset[int]:
    """The ids that end a completion, without those outside the model's vocabulary."""
    tokenizer = _load_tokenizer(model_dir) if has_tokenizer(model_dir) else None
    return frozenset(idx for idx in folder_stop_ids(model_dir, tokenizer) if idx < vocab_size)


def load_decoder(model_dir: Path) -> TokenDecoder:
    """Loads the decoder of a model folder's tokenizer. Special tokens keep their text.

    Raises: DataError if the folder has no tokenizer.
    """
    if not has_tokenizer(model_dir):
        raise DataError(f"model folder {model_dir} has no tokenizer files (tokenizer.json)")
    tokenizer = _load_tokenizer(model_dir)

    def decode(token_ids: Sequence[int]) -> str:
        return cast("str", tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    return decode


def _load_tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return cast("Any", AutoTokenizer).from_pretrained(str(model_dir))
