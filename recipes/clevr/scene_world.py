"""The world `clevr`: how many shapes of a picture have a colour?

Its task is that of CLEVR's counting questions (Johnson et al. 2017, arXiv:1612.06890), in the form of a
number to give (as in CLEVR-Count); its pictures are drawn anew, flat shapes in the cells of a grid. The same
arguments give the same tasks and pictures, byte for byte. `scene_pictures.py` draws, `scene_teachers.py`
answers.
"""

import json
import random
import re
from collections.abc import Sequence
from typing import Literal

import msgspec
from recipes.clevr.scene_pictures import Scene, make_scene, picture

from astraflow.errors import ConfigError
from astraflow.protocols import InteractiveEnvironment, Observation
from astraflow.types import Message, Task

__all__ = ["Scenes", "number_in"]

MOST_READ = 20_000
"""Characters of the end of a reply in which its number is looked for."""
_NUMBER = re.compile(r"\d+", re.ASCII)
_MOST_DIGITS = 3
_INSTRUCTION = "How many {asked} shapes are in the picture? Think, and end with the number alone in a line."


def number_in(reply: str) -> int | None:
    """The last number of a reply; None if there is none, or one too long to be a count."""
    found = _NUMBER.findall(reply[-MOST_READ:])
    return int(found[-1]) if found and len(found[-1]) <= _MOST_DIGITS else None


class Scenes(InteractiveEnvironment):
    """Tasks of the splits `train` and `heldout`: a picture and a question; the reward is 1 for the right
    number, else 0. An episode has one turn."""

    def __init__(
        self,
        *,
        side: int = 5,
        cell_pixels: int = 56,
        form: Literal["full", "bare"] = "full",
        size: int = 3_000,
        seed: int | str = 0,
    ) -> None:
        """`side`: cells along a side of the picture; `cell_pixels`: pixels along a side of a cell. `form`:
        `full` asks in a sentence; `bare` names the colour. `size`: number of tasks of a split.

        Raises: ConfigError if there can be no such picture.
        """
        if not (2 <= side <= 9 and 4 <= cell_pixels <= 200) or size < 1:
            raise ConfigError(
                f"side = {side}, cell_pixels = {cell_pixels}, size = {size}: 2 to 9, 4 to 200 and at least "
                "1 are possible"
            )
        self._side = side
        self._cell_pixels = cell_pixels
        self._is_full = form == "full"
        self._size = size
        self._seed = seed

    def scene(self, split: str, idx: int) -> Scene:
        """The scene of a task. Splits share none but by chance, which for 9 cells is one in 10^7."""
        return make_scene(random.Random(f"{self._seed}/{split}/{idx}"), side=self._side)

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in {"train", "heldout"}:
            raise ConfigError(f"split = {split!r} is not one of: train, heldout")
        return [self._task(split, idx) for idx in range(self._size)]

    def _task(self, split: str, idx: int) -> Task:
        scene = self.scene(split, idx)
        prompt = _INSTRUCTION.format(asked=scene.asked) if self._is_full else f"{scene.asked}?"
        spec = json.dumps(msgspec.to_builtins(scene))
        return Task(id=str(idx), source=split, prompt=prompt, answer=str(scene.count), spec=spec)

    def reset(self, task: Task, seed: int) -> tuple[Task, Observation]:
        return task, Observation([self.message(task)])

    def message(self, task: Task) -> Message:
        """What the policy is shown: the picture, and the question behind it."""
        scene = msgspec.convert(json.loads(task.spec), Scene)
        media = picture(scene, cell_pixels=self._cell_pixels)
        return Message(role="user", content=task.prompt, media=(media,))

    def step(self, state: Task, reply: str) -> Observation:
        return Observation(reward=self.score(state, reply), is_done=True)

    def score(self, task: Task, text: str) -> float:
        return float(number_in(text) == int(task.answer))
