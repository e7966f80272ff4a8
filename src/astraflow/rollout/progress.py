"""What one episode has sampled so far: its whole completions, by the requests that led to them.

An attempt at an episode collects them while it runs. If it is lost, the next attempt runs its workflow again
from the start, and gets a completion of the lost attempt wherever it makes the same request: the same token
ids, images, sampling parameters, seed and version. Where a request differs, and in all that follows from it,
it samples anew. Each token keeps the version that sampled it.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from astraflow.rollout.recorder import version_spans
from astraflow.types import (
    RESAMPLED_TOKENS,
    RESUMED_TOKENS,
    GenerateRequest,
    Generation,
    MetricItem,
    PastCompletion,
)
from astraflow.wire import array, column

__all__ = ["EpisodeProgress", "request_digest"]

_DIGEST_BYTES = 16
_ID_BYTES = 4


def request_digest(policy: str, request: GenerateRequest) -> str:
    """Equal for equal requests to the same policy, and for no others: 128 bits in hex."""
    rest = msgspec.msgpack.encode((policy, request.sampling, request.version, request.media))
    found = hashlib.blake2b(rest, digest_size=_DIGEST_BYTES)
    found.update(column(request.token_ids, "int32"))
    return found.hexdigest()


class EpisodeProgress:
    """Lives for one attempt at an episode.

    Example: `progress.recall("actor", request)`, and if that is None, `progress.add("actor", request,
    await engine.generate(request))`. Whoever reports takes `untold`, and notes with `tell` what arrived.
    """

    def __init__(self, earlier: Sequence[PastCompletion] = ()) -> None:
        """`earlier`: all completions of earlier attempts that the dataflow has."""
        self._is_resumed = bool(earlier)
        self._earlier = {completion.request: completion for completion in earlier}
        """Those that no request has met yet."""
        self._all = list(earlier)
        """In the order in which they are reported."""
        self._raw: list[tuple[str, GenerateRequest, Generation]] = []
        """New ones. They take their final form when they are reported: most episodes end before that."""
        self._num_told = len(earlier)
        self._num_resumed_tokens = 0
        self._is_reported = True

    @property
    def has_earlier(self) -> bool:
        """Whether a completion of an earlier attempt is left."""
        return bool(self._earlier)

    def recall(self, policy: str, request: GenerateRequest) -> Generation | None:
        """The completion that an earlier attempt got for the same request, once; None if there is none."""
        found = self._earlier.pop(request_digest(policy, request), None)
        if found is None:
            return None
        self._num_resumed_tokens += _num_tokens(found)
        return _generation(found)

    def add(self, policy: str, request: GenerateRequest, generation: Generation) -> None:
        """Notes a new completion."""
        if self._is_reported:
            self._raw.append((policy, request, generation))

    def metrics(self) -> tuple[MetricItem, ...]:
        """Tokens of earlier attempts that were used, and those that were not; none for a first attempt."""
        if not self._is_resumed:
            return ()
        unused = sum(_num_tokens(completion) for completion in self._earlier.values())
        return (
            MetricItem(RESUMED_TOKENS, float(self._num_resumed_tokens), "sum"),
            MetricItem(RESAMPLED_TOKENS, float(unused), "sum"),
        )

    # --- reports ---

    def untold(self) -> tuple[int, Sequence[PastCompletion]]:
        """How many completions the dataflow has, and those that it does not have yet."""
        self._all += [_past(*item) for item in self._raw]
        self._raw.clear()
        return self._num_told, self._all[self._num_told :]

    def tell(self, num: int) -> None:
        """Notes that the dataflow has so many completions now; 0 if it lost them."""
        self._num_told = num

    def give_up(self) -> None:
        """Reports nothing more of the episode, because the dataflow keeps nothing more. What earlier attempts
        sampled can still be recalled."""
        self._is_reported = False
        self._raw.clear()
        self._all.clear()
        self._num_told = 0


def _past(policy: str, request: GenerateRequest, generation: Generation) -> PastCompletion:
    return PastCompletion(
        policy=policy,
        request=request_digest(policy, request),
        token_ids=column(generation.token_ids, "int32"),
        logprobs=column(generation.logprobs, "float32"),
        versions=tuple(version_spans(generation.versions, 0)),
        finish_reason=generation.finish_reason,
        streams=generation.streams,
    )


def _generation(past: PastCompletion) -> Generation:
    return Generation(
        token_ids=tuple(array(past.token_ids, "int32").tolist()),
        logprobs=tuple(array(past.logprobs, "float32").tolist()),
        versions=tuple([span.version for span in past.versions for _ in range(span.length)]),
        finish_reason=past.finish_reason,
        streams=past.streams,
    )


def _num_tokens(past: PastCompletion) -> int:
    return len(past.token_ids) // _ID_BYTES
