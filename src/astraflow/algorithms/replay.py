"""Replay: groups that were trained on come again in later batches, beside the fresh ones."""

from collections.abc import Mapping
from heapq import nlargest
from typing import Literal

from astraflow.algorithms.task_history import chance
from astraflow.protocols import Completed

__all__ = ["replayed"]


def replayed(
    groups: Mapping[int, Completed], num: int, *, select: Literal["latest", "uniform", "priority"], seed: str
) -> tuple[int, ...]:
    """The ids of at most `num` of the groups; the same for the same arguments.

    `latest`: those with the newest oldest token. `uniform`: each set is equally likely. `priority`: one after
    the other in proportion to the root mean square w of their advantages (keys u^(1/w), u uniform:
    Efraimidis & Spirakis 2006), so that groups without a gradient come last.
    """
    if select == "latest":
        return tuple(nlargest(num, groups, key=lambda i: (groups[i].oldest_version, i)))
    keys = {i: chance(seed, i) for i in groups}
    if select == "priority":
        keys = {i: _weighted_key(key, _weight(groups[i])) for i, key in keys.items()}
    return tuple(nlargest(num, groups, key=lambda i: (keys[i], i)))


def _weight(group: Completed) -> float:
    return (group.advantage_square_sum / max(1, group.num_trained_tokens)) ** 0.5


def _weighted_key(key: float, weight: float) -> float:
    return key ** (1.0 / weight) if weight > 0 else -1.0
