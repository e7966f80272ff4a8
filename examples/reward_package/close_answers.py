"""A package that adds a reward to AstraFlow: a number near the correct one earns part of the reward.

After `pip install examples/reward_package`, a recipe names it: `tasks: {reward: {name: close_answer}}`.
"""

from typing import ClassVar, Literal

from pydantic import Field

from astraflow.protocols import Scorer, ScoringCall
from astraflow.tasks.variants import RewardVariant


class CloseAnswerReward(RewardVariant):
    """Returns 1 for the task's answer, and less the further away the number is."""

    is_harmless: ClassVar[bool] = True
    name: Literal["close_answer"] = "close_answer"
    tolerance: float = Field(default=10.0, gt=0)
    """Distance at which the reward becomes 0."""

    def make(self) -> Scorer:
        return CloseAnswer(self.tolerance)


class CloseAnswer(Scorer):
    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance

    def __call__(self, call: ScoringCall) -> float:
        try:
            distance = abs(float(call.text) - float(call.task.answer))
        except ValueError:  # the model did not write a number
            return 0.0
        return max(0.0, 1.0 - distance / self._tolerance)
