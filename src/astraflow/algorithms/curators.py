"""Which task is drawn next: the choice of curators, and how a recipe's are built into one chain."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from astraflow.algorithms.config import CuratorConfig, ShuffleConfig, WeightedConfig
from astraflow.algorithms.curation import Curation
from astraflow.algorithms.curriculum import Curriculum
from astraflow.algorithms.greso import Greso
from astraflow.algorithms.own import check_methods, own_object
from astraflow.algorithms.priority import Priority
from astraflow.algorithms.shuffle import Shuffle
from astraflow.algorithms.solved import Solved
from astraflow.algorithms.weighted import Weighted
from astraflow.config import Use
from astraflow.errors import ConfigError
from astraflow.protocols import Curator, TaskGate

__all__ = ["GATES", "make_curation"]


def make_curation(configs: Sequence[CuratorConfig], *, sources: Mapping[str, int], seed: int) -> Curation:
    """The chain over all tasks of the sources (name -> size), in the recipe's order.

    One of the user's own is a class or function that takes `num_tasks` and `seed` besides its `args`; it
    proposes tasks if it has `next`, and passes over them if it has `why_skip`. Without a curator that
    proposes, `shuffle` does.
    Raises: ConfigError if one cannot be loaded, takes other arguments, or lacks a method; if two propose, or
    two have the same name.
    """
    num_tasks = sum(sources.values())
    orders: list[tuple[str, Curator]] = []
    gates: list[tuple[str, TaskGate]] = []
    for config in configs:
        match config:
            case ShuffleConfig():
                orders.append((config.name, Shuffle(num_tasks=num_tasks, seed=seed)))
            case WeightedConfig():
                order = Weighted(sources=sources, weights=config.weights, seed=seed)
                orders.append((config.name, order))
            case Use():
                own = _users_own(config, num_tasks=num_tasks, seed=seed)
                if callable(getattr(own, "next", None)):
                    orders.append((config.use, own))
                else:
                    gates.append((config.use, own))
            case _:
                fields = config.model_dump(exclude={"name"})
                name = f"{config.name}:{config.policy}" if config.policy else config.name
                gates.append((name, GATES[config.name](seed=seed, **fields)))
    if len(orders) > 1:
        raise ConfigError(f"tasks.curators: {len(orders)} of them propose tasks; name one")
    names = [name for name, _ in gates]
    if len(set(names)) < len(names):
        raise ConfigError(f"tasks.curators: {', '.join(names)}: one of them is named twice")
    order_name, order = orders[0] if orders else ("shuffle", Shuffle(num_tasks=num_tasks, seed=seed))
    return Curation(order, gates, order_name=order_name)


def _users_own(config: Use, *, num_tasks: int, seed: int) -> Any:
    where = "tasks.curators"
    curator = own_object(config, where=where, methods=(), num_tasks=num_tasks, seed=seed)
    does = "why_skip" if callable(getattr(curator, "why_skip", None)) else "next"
    check_methods(curator, (does, "observe", "state", "restore"), config, where=where)
    return curator


GATES: dict[str, Callable[..., TaskGate]] = {
    "curriculum": Curriculum,
    "greso": Greso,
    "greso_floors": Greso,
    "priority": Priority,
    "solved": Solved,
}
"""Built-in curators that pass over tasks, by name."""
