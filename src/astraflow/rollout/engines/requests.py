"""What every engine refuses in a request, whatever generates. Imports no torch."""

from collections.abc import Sequence

from astraflow.errors import RolloutError
from astraflow.types import Sampling

__all__ = ["check_sampling", "check_tokens"]

_MAX_STOPS = 64
_MAX_STOP_CHARS = 256
"""An engine looks for every stop text in a tail of that length, at every token."""


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
    if any(not text for text in sampling.stop):
        problems.append("stop holds an empty text")
    longest = max((len(text) for text in sampling.stop), default=0)
    if longest > _MAX_STOP_CHARS:
        problems.append(f"stop holds a text of {longest} characters; expected at most {_MAX_STOP_CHARS}")
    if len(sampling.stop) > _MAX_STOPS:
        problems.append(f"stop holds {len(sampling.stop)} texts; expected at most {_MAX_STOPS}")
    if problems:
        raise RolloutError(f"sampling settings: {'; '.join(problems)}", is_retryable=False)


def check_tokens(token_ids: Sequence[int], *, num_needed: int, max_context: int, vocab_size: int) -> None:
    """Raises: RolloutError (not retryable) if there are no tokens, too many, or one that is no token."""
    if not token_ids:
        raise RolloutError("the request has no tokens; a prompt needs at least one", is_retryable=False)
    if num_needed > max_context:
        raise RolloutError(
            f"{len(token_ids)} tokens leave no room within rollout.engine.max_context = {max_context}",
            is_retryable=False,
        )
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise RolloutError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}; "
            "was the text rendered with another tokenizer?",
            is_retryable=False,
        )
