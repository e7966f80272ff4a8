"""Takes a request of results apart, so that one bad result spoils neither the others nor the event loop.

A result whose values are beyond their bounds (a reward of 1e39) is one failed attempt, and the results
beside it count. A malformed one (a wrong type, an unknown field) refuses the request whole. Results are
decoded in slices, between which the caller lets others run: a request may be 256 MiB long.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from astraflow import wire
from astraflow.errors import BoundError, WireError
from astraflow.types import EpisodeResult, Failure, Item
from astraflow.types.bounds import MAX_ERROR_CHARS, LeaseId, OpaqueId

__all__ = ["DecodedResults", "EpisodeResults", "decode_results", "sliced"]

_MAX_RESULTS = 4096
"""As in `types.EpisodeResults`."""


class EpisodeResults(Item, frozen=True, kw_only=True):
    """As in `types`, by name too, but with results that are not decoded yet."""

    worker_id: OpaqueId
    results: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=_MAX_RESULTS)]


class _Named(msgspec.Struct, frozen=True):
    """What is needed of a result to say that it is bad."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class DecodedResults:
    """Results in the order in which they came. Those beyond their bounds are failures, and listed."""

    results: tuple[EpisodeResult, ...]
    beyond_bounds: dict[int, WireError]
    """Position -> the value and its bound."""


def sliced(
    results: Sequence[msgspec.Raw], *, max_bytes: int, max_num: int
) -> Iterator[Sequence[msgspec.Raw]]:
    """The results in order, in runs of at most `max_num` and, but for single ones, of `max_bytes`."""
    start = num_bytes = 0
    for idx, result in enumerate(results):
        size = len(memoryview(result))
        if idx > start and (num_bytes + size > max_bytes or idx - start >= max_num):
            yield results[start:idx]
            start = idx
            num_bytes = 0
        num_bytes += size
    if start < len(results):
        yield results[start:]


def decode_results(raws: Sequence[msgspec.Raw], media_type: str) -> DecodedResults:
    """Decodes results one by one. Raises: WireError if one is malformed."""
    results: list[EpisodeResult] = []
    beyond_bounds: dict[int, WireError] = {}
    for idx, raw in enumerate(raws):
        body = memoryview(raw)
        try:
            results.append(wire.decode(body, EpisodeResult, media_type))
        except BoundError as err:
            # Its lease id is in bounds, or this raises, and there is nobody to send a receipt to.
            lease_id = wire.decode(body, _Named, media_type).lease_id
            failure = Failure(error_class="invalid", message=str(err)[:MAX_ERROR_CHARS])
            results.append(EpisodeResult(lease_id=lease_id, outcome=failure))
            beyond_bounds[idx] = err
    return DecodedResults(tuple(results), beyond_bounds)
