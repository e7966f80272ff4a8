"""Splits a request of results, so that an invalid result affects neither the others nor the event loop.

A result with a value out of bounds (such as a reward of 1e39) becomes a failed attempt, and the others count.
A malformed result (a wrong type or an unknown field) makes the whole request fail. Results are decoded in
slices, between which the caller lets other requests run, because a request may have 256 MiB.
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

__all__ = ["DecodedResults", "EpisodeResults", "decode_results", "split_results"]

_MAX_RESULTS = 4096
"""As in `types.EpisodeResults`."""


class EpisodeResults(Item, frozen=True, kw_only=True):
    """Same name and fields as in `types`, except that the results are not decoded yet."""

    worker_id: OpaqueId
    results: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=_MAX_RESULTS)]


class _LeaseIdOnly(msgspec.Struct, frozen=True):
    """The part of a result that is needed to report that it is invalid."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class DecodedResults:
    """Results in their original order. Failures replace those with a value out of bounds."""

    results: tuple[EpisodeResult, ...]
    beyond_bounds: dict[int, WireError]
    """Position -> an error that names the value and its bound."""


def split_results(
    results: Sequence[msgspec.Raw], *, max_bytes: int, max_num: int
) -> Iterator[Sequence[msgspec.Raw]]:
    """Splits results into runs of at most `max_num` results and `max_bytes` bytes, or one longer result."""
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
            # If the lease id itself is out of bounds, this raises: no receipt could name the lease.
            lease_id = wire.decode(body, _LeaseIdOnly, media_type).lease_id
            failure = Failure(error_class="invalid", message=str(err)[:MAX_ERROR_CHARS])
            results.append(EpisodeResult(lease_id=lease_id, outcome=failure))
            beyond_bounds[idx] = err
    return DecodedResults(tuple(results), beyond_bounds)
