"""What one episode has sampled so far: its finished completions, indexed by their requests.

An attempt at an episode collects them while it runs. If the attempt is lost, the next one runs the workflow
again from the start. Wherever it makes the same request (the same token ids, images, sampling parameters,
seed, and version), it gets the completion of the lost attempt. Once a request differs, that request and all
that follow from it are sampled anew. Each token keeps the version that sampled it.
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
    """A hash of a request to a policy: 128 bits in hex, equal only for equal requests to the same policy."""
    rest = msgspec.msgpack.encode((policy, request.sampling, request.version, request.media))
    digest = hashlib.blake2b(rest, digest_size=_DIGEST_BYTES)
    digest.update(column(request.token_ids, "int32"))
    return digest.hexdigest()


class EpisodeProgress:
    """The completions of one attempt at an episode, and those of earlier attempts.

    Example: `progress.recall("actor", request)`, and if that is None, `progress.add("actor", request,
    await engine.generate(request))`. `ProgressReports` sends what `unreported` returns, and then calls
    `note_reported`.
    """

    def __init__(self, earlier: Sequence[PastCompletion] = ()) -> None:
        """`earlier`: all completions of earlier attempts that the dataflow has."""
        self._is_resumed = bool(earlier)
        self.earlier = {completion.request: completion for completion in earlier}
        """Completions that no request has matched yet, by request digest."""
        self._all = list(earlier)
        """All completions, in the order in which they are reported."""
        self._raw: list[tuple[str, GenerateRequest, Generation]] = []
        """New completions. They are encoded only when they are reported: most episodes end before that."""
        self._num_reported = len(earlier)
        self._num_resumed_tokens = 0
        self._is_reporting = True

    def recall(self, policy: str, request: GenerateRequest) -> Generation | None:
        """Returns an earlier attempt's completion for this request, at most once; None if there is none."""
        earlier = self.earlier.pop(request_digest(policy, request), None)
        if earlier is None:
            return None
        self._num_resumed_tokens += _num_tokens(earlier)
        return _decode_completion(earlier)

    def add(self, policy: str, request: GenerateRequest, generation: Generation) -> None:
        """Adds a new completion."""
        if self._is_reporting:
            self._raw.append((policy, request, generation))

    def metrics(self) -> tuple[MetricItem, ...]:
        """Metrics of the used and the unused tokens of earlier attempts; empty for a first attempt."""
        if not self._is_resumed:
            return ()
        unused = sum(_num_tokens(completion) for completion in self.earlier.values())
        return (
            MetricItem(RESUMED_TOKENS, float(self._num_resumed_tokens), "sum"),
            MetricItem(RESAMPLED_TOKENS, float(unused), "sum"),
        )

    def unreported(self) -> tuple[int, Sequence[PastCompletion]]:
        """The number of completions that the dataflow has, and the completions that it doesn't have yet."""
        self._all += [_encode_completion(*item) for item in self._raw]
        self._raw.clear()
        return self._num_reported, self._all[self._num_reported :]

    def note_reported(self, num: int) -> None:
        """Notes that the dataflow now has the first `num` completions; 0 if it lost them."""
        self._num_reported = num

    def stop_reporting(self) -> None:
        """Reports nothing more, because the dataflow doesn't store more. Earlier completions can still be
        recalled."""
        self._is_reporting = False
        self._raw.clear()
        self._all.clear()
        self._num_reported = 0


def _encode_completion(policy: str, request: GenerateRequest, generation: Generation) -> PastCompletion:
    return PastCompletion(
        policy=policy,
        request=request_digest(policy, request),
        token_ids=column(generation.token_ids, "int32"),
        logprobs=column(generation.logprobs, "float32"),
        versions=tuple(version_spans(generation.versions, 0)),
        finish_reason=generation.finish_reason,
        streams=generation.streams,
    )


def _decode_completion(past: PastCompletion) -> Generation:
    return Generation(
        token_ids=tuple(array(past.token_ids, "int32").tolist()),
        logprobs=tuple(array(past.logprobs, "float32").tolist()),
        versions=tuple([span.version for span in past.versions for _ in range(span.length)]),
        finish_reason=past.finish_reason,
        streams=past.streams,
    )


def _num_tokens(past: PastCompletion) -> int:
    return len(past.token_ids) // _ID_BYTES
