"""Credit `gae`: rewards as they are; the trainer's critic makes advantages of them (arXiv:1506.02438)."""

from astraflow.algorithms.relative import turn_returns
from astraflow.facts import GroupFacts

__all__ = ["gae"]


def gae(facts: GroupFacts) -> tuple[tuple[float, ...], ...]:
    """One number a turn: its own reward; what the trajectory was rewarded beyond its turns counts for its
    last one.

    The trainer gives each to the last trained token of its turn: see `trainer.gae`.
    """
    return tuple(tuple(turn_returns(t, 0.0).tolist()) for t in facts.trajectories)
