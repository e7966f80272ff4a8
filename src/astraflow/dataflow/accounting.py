"""The figures of a run's accounting, as audits compute and summaries show them."""

from astraflow.types import FateCounts, Item

__all__ = ["Amounts", "PolicyAudit"]


class Amounts(Item, frozen=True, kw_only=True):
    """The staleness and the tokens of one policy, or of the whole run."""

    staleness_mean: float = 0.0
    """Over trained groups."""
    staleness_max: int = 0
    """Over trained and replayed groups."""
    staleness_bound: int = 0
    generated_tokens: int = 0
    """Sampled tokens of accepted training episodes."""
    committed_tokens: int = 0
    """Sampled tokens in batches of committed steps."""
    gradient_tokens: int | None = None
    """How many of these had a gradient. None if a trainer did not report it for every step."""


class PolicyAudit(Amounts, frozen=True, kw_only=True):
    """One policy's accounting, recomputed."""

    name: str
    fates: FateCounts
    steps: int
    redone_steps: int
    dropped_batches: int = 0
    """Batches dropped by a person. Their groups are evicted."""
    replayed: int = 0
    """Replayed groups in batches, in addition to the fresh ones."""
