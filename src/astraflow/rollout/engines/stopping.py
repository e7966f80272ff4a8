"""When a completion ends: stop token ids of a model, stop texts of a request."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from astraflow.errors import DataError

__all__ = ["StopText", "TokenDecoder", "load_decoder", "stop_ids"]

_TOKENS_PER_CHARACTER = 4
"""A character of UTF-8 has at most 4 bytes, and a token at least one byte."""

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")


class TokenDecoder(Protocol):
    """Text of token ids."""

    def __call__(self, token_ids: Sequence[int]) -> str: ...


class StopText:
    """Watches one completion for texts that end it; decodes only its tail.

    Example: `StopText(("</answer>",), decode).is_reached([5, 8, 13])`.
    """

    def __init__(self, texts: tuple[str, ...], decode: TokenDecoder) -> None:
        self._texts = texts
        self._decode = decode
        longest = max(len(text) for text in texts)
        self.num_tokens = _TOKENS_PER_CHARACTER * (longest + 1)
        """The newest tokens that are enough to see a stop text that has just been completed."""

    def is_reached(self, token_ids: Sequence[int]) -> bool:
        """True if the newest of the completion's tokens completed a stop text."""
        tail = self._decode(token_ids[-self.num_tokens :])
        return any(text in tail for text in self._texts)


def stop_ids(model: Any, model_dir: Path) -> frozenset[int]:
    """Ids that end a completion: of the generation config, else of the model's config, else of the
    tokenizer."""
    for eos in (model.generation_config.eos_token_id, model.config.eos_token_id):
        if eos is not None:
            return frozenset(cast("list[int]", eos) if isinstance(eos, list) else [int(eos)])
    if not _has_tokenizer(model_dir):
        return frozenset()
    eos = _tokenizer(model_dir).eos_token_id
    return frozenset() if eos is None else frozenset([int(eos)])


def load_decoder(model_dir: Path) -> TokenDecoder:
    """The decoder of a model folder's tokenizer; special tokens keep their text.

    Raises: DataError if the folder has no tokenizer.
    """
    if not _has_tokenizer(model_dir):  # transformers would make up an empty one
        raise DataError(f"model folder {model_dir} has no tokenizer files ({', '.join(_TOKENIZER_FILES)})")
    tokenizer = _tokenizer(model_dir)

    def decode(token_ids: Sequence[int]) -> str:
        return cast("str", tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    return decode


def _has_tokenizer(model_dir: Path) -> bool:
    return any((model_dir / name).is_file() for name in _TOKENIZER_FILES)


def _tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return cast("Any", AutoTokenizer).from_pretrained(str(model_dir))
