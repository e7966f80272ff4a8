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
    "ZeroedBy",
]

PROTOCOL_VERSION = 1
"""Version of these items on the wire. A peer with another version is refused with a clear message."""

LeaseKind = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "abort"]
ZeroedBy = Literal["", "filter", "credit"]
Reduction = Literal["mean", "sum", "max", "min", "last", "p50", "p95"]
PERCENTILES: Mapping[Reduction, float] = {"p50": 0.5, "p95": 0.95}
"""The reductions that are percentiles, and the share of values that do not exceed each."""
RESUMED_TOKENS = "resumed_tokens"
"""Metric of an episode that an earlier attempt had begun: number of that attempt's tokens that it reuses."""
RESAMPLED_TOKENS = "resampled_tokens"
"""Metric of such an episode: number of the earlier attempt's tokens that matched none of its requests and
were sampled again."""
RunState = Literal["running", "draining", "finished", "failed"]
Fate = Literal["trained", "filtered", "stale", "evicted", "failed", "unadmitted", "unused", "cancelled"]


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """Base of all items. They are frozen, and decoding refuses unknown fields."""
