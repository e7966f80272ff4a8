"""The reward `math_verify` of a recipe."""

from collections.abc import Callable
from typing import ClassVar, Literal

from astraflow.config import Config
from astraflow.protocols import Scorer
from astraflow.tasks.variants import RewardVariant
from astraflow.types import Task

__all__ = ["MathVerifyReward"]


class MathVerifyReward(RewardVariant):
    """1 if the final answer of the text equals the task's answer, compared as mathematics by `math-verify`;
    else 0."""

    scores_rows: ClassVar[bool] = True
    name: Literal["math_verify"] = "math_verify"

    def make(self) -> Scorer:
        """Makes the scorer."""
        from astraflow.addons.math.scorer import MathScorer

        return MathScorer()

    def checker(self, source: Config) -> Callable[[Task], object] | None:
        """Makes the check that the answers of rows can be compared as mathematics."""
        from astraflow.addons.math.scorer import can_be_gold
        from astraflow.tasks.answers import answer_checker

        return answer_checker(source, can_be_gold)
