"""A task source and an interactive environment: the model keeps a running total of several sums.

Try it: astraflow try examples/running_total.yaml --task 1
"""

import json
import random

from astraflow.types import Task
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

__all__ = ["RunningTotal", "RunningTotals", "play"]


class RunningTotals:
    """The task source: task `idx` is a list of numbers, the same one for ever."""

    def __init__(self, *, source: str, size: int = 1000, length: int = 3, seed: int = 0) -> None:
        self._source, self._size, self._length, self._seed = source, size, length, seed

    def __len__(self) -> int:
        return self._size

    def task(self, idx: int) -> Task:
        """Its prompt is the first sum; `spec` carries all numbers to the environment."""
        numbers = random.Random(f"{self._seed}/{idx}").choices(range(1, 300), k=self._length)
        return Task(
            id=f"{self._source}/{self._seed}-{idx}",
            source=self._source,
            prompt=f"Calculate {numbers[0]} + {numbers[1]}.",
            answer=str(sum(numbers)),
            spec=json.dumps(numbers),
        )


class RunningTotal:
    """The environment of one episode. It gives a sum, then the next one, with the right total so far."""

    def __init__(self, numbers: list[int]) -> None:
        self._total, *self._rest = numbers

    @property
    def observation(self) -> str:
        """What the model sees now; empty at the end."""
        return f"Calculate {self._total} + {self._rest[0]}." if self._rest else ""

    def step(self, text: str) -> float:
        """Takes an answer, goes on to the next sum, and returns the reward of the answer."""
        self._total += self._rest.pop(0)
        return float(text.rpartition("=")[2].strip() == str(self._total))


async def play(task: ScoredTask, policies: Policies) -> Rewards:
    """The workflow: observation and answer in turn, in one conversation, until the environment ends."""
    rewards, env = Rewards(), RunningTotal(json.loads(task.spec))
    chat = policies["actor"].conversation()
    results: list[float] = []
    while env.observation:
        answer = await chat.say(env.observation)
        results.append(env.step(answer.text))
        rewards.add(answer, results[-1])
    rewards.set_score(sum(results) / len(results))
    return rewards
