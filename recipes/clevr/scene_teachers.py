"""The teachers of a warm start in `clevr`, and those who play: an expert and a random player.

They go through the cells row by row: `.` for a cell that does not count, else the number of those that count
so far; then the result, as in `..1.23..4=4`. A hasty one counts every shape, whatever its colour.
"""

import random
from collections.abc import Sequence
from typing import Any

from recipes.clevr.scene_pictures import Scene
from recipes.clevr.scene_world import Scenes

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.types import Message

__all__ = ["demonstrations", "expert", "random_player"]


def expert(scene: Scene, *, is_careful: bool = True) -> str:
    """The working and the number."""
    said = ""
    count = 0
    for piece in scene.cells:
        counts = piece is not None and (piece.colour == scene.asked or not is_careful)
        count += counts
        said += str(count) if counts else "."
    return f"{said}={count}"


def random_player(rng: random.Random) -> str:
    """Any number of one digit."""
    return str(rng.randrange(10))


def demonstrations(
    num: int, seed: int, sure_frac: float = 0.5, careful_frac: float = 0.2, **world: Any
) -> Sequence[Demonstration]:
    """Pictures with replies, none of which is a task.

    `sure_frac`: share of the demonstrations, the first ones, that are all careful. `careful_frac`: share of
    careful ones at the last demonstration; linear in between. `world`: arguments of `Scenes`, without `form`,
    `size` and `seed`.
    """
    rng = random.Random(seed)
    scenes = Scenes(**world, form="bare", size=num, seed=f"demonstrations {seed}")
    shown: list[Demonstration] = []
    for idx, task in enumerate(scenes.tasks("train")):
        fallen = max(0.0, (idx / num - sure_frac) / (1.0 - sure_frac))
        is_careful = rng.random() < 1.0 + (careful_frac - 1.0) * fallen
        reply = expert(scenes.scene("train", idx), is_careful=is_careful)
        shown.append(Demonstration(messages=(scenes.message(task), Message(role="assistant", content=reply))))
    return shown
