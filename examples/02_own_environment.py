"""A custom environment: the model keeps a running total of several numbers.

Try it: astraflow try examples/02_own_environment.yaml --task 1
"""

import json
import random

from astraflow.protocols import InteractiveEnvironment, Observation
from astraflow.types import Task

__all__ = ["RunningTotal"]


class RunningTotal(InteractiveEnvironment):
    """Asks for a sum, then for the next one with the correct total so far. The state is the numbers left."""

    def __init__(self, *, size: int = 1000, length: int = 3) -> None:
        self._size = size
        self._length = length

    def tasks(self, split: str) -> list[Task]:
        draw = random.Random(split)
        games = [draw.choices(range(1, 300), k=self._length) for _ in range(self._size)]
        return [
            Task(id=str(idx), source=split, prompt="Keep a running total.", spec=json.dumps(numbers))
            for idx, numbers in enumerate(games)
        ]

    def reset(self, task: Task, seed: int) -> tuple[list[int], Observation]:
        numbers: list[int] = json.loads(task.spec)
        return numbers, Observation(f"Calculate {numbers[0]} + {numbers[1]}.")

    def step(self, state: list[int], reply: str) -> Observation:
        state[:2] = [state[0] + state[1]]
        reward = float(reply.rpartition("=")[2].strip() == str(state[0]))
        if len(state) == 1:
            return Observation(reward=reward, is_done=True)
        return Observation(f"Calculate {state[0]} + {state[1]}.", reward=reward)
