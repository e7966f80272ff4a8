"""The base class of all items, and words that several of them share."""

from collections.abc import Mapping
from typing import Literal

import msgspec

__all__ = [
    "PERCENTILES",
    "PROTOCOL_VERSION",
    "RESAMPLED_TOKENS",
    "RESUMED_TOKENS",
    "Fate",
    "FinishReason",
    "Item",
    "LeaseKind",
    "Reduction",
    "RunState",
]

PROTOCOL_VERSION = 1
"""Version of these items on the wire. A peer with another version is refused with a clear message."""

LeaseKind = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "abort"]
Reduction = Literal["mean", "sum", "max", "min", "last", "p50", "p95"]
PERCENTILES: Mapping[Reduction, float] = {"p50": 0.5, "p95": 0.95}
"""The reductions that are percentiles, with the share of values that they are not below."""
RESUMED_TOKENS = "resumed_tokens"
"""Metric of an episode that another attempt had begun: tokens of that attempt which it contains."""
RESAMPLED_TOKENS = "resampled_tokens"
"""Metric of such an episode: tokens of the earlier attempt that fit none of its requests, and were sampled
anew."""
RunState = Literal["running", "draining", "finished", "failed"]
Fate = Literal["trained", "filtered", "stale", "evicted", "failed", "unadmitted", "unused", "cancelled"]


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """Base of all items. They are frozen, and decoding refuses unknown fields."""
