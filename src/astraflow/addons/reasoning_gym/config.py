"""The source `reasoning_gym` of a recipe."""

from collections.abc import Collection
from typing import Any, Literal

from pydantic import Field

from astraflow.protocols import Scorer, TaskSource
from astraflow.tasks.variants import SourceContext, SourceVariant

__all__ = ["ReasoningGymConfig"]


class ReasoningGymConfig(SourceVariant):
    """Generated tasks with verifiable answers from the `reasoning-gym` library."""

    name: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the data set, e.g. `basic_arithmetic`."""
    size: int = Field(default=10_000, ge=1, le=10**9)
    """Number of tasks."""
    seed: int = 0
    """Seed of the data set. Different seeds give different tasks that may overlap; use `split` for disjoint
    sets."""
    split: Literal["all", "train", "heldout"] = "all"
    """Which tasks to use. A hash of the prompt decides, so `train` and `heldout` never share a prompt."""
    heldout_frac: float = Field(default=0.1, gt=0, lt=1)
    """Share of prompts that are held out. Use the same value in training, evaluation, and the model's
    spec."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of the data set, e.g. `{min_terms: 3, max_digits: 2}`."""
    system: str = ""
    """System message before each prompt; empty: none."""

    def make(self, context: SourceContext) -> TaskSource:
        """Opens the data set. Raises: ConfigError or DataError."""
        from astraflow.addons.reasoning_gym.gym import GymSource

        return GymSource(self, name=context.name)

    def task_columns(self) -> tuple[str, ...]:
        """Returns nothing, because generated tasks have no columns."""
        return ()

    def runs_answers(self, allow: Collection[str]) -> bool:
        """Checks whether the data set's scorer has to run in a sandbox."""
        from astraflow.addons.reasoning_gym.gym import runs_answers

        return runs_answers(self.dataset, allow)

    def load_for_scoring(self) -> None:
        """Imports the data set. Raises: ConfigError."""
        from astraflow.addons.reasoning_gym.gym import load_data_set

        load_data_set(self.dataset)

    @classmethod
    def make_scorer(cls, allow: Collection[str]) -> Scorer:
        """Makes the scorer, which calls the data sets' own scorers."""
        from astraflow.addons.reasoning_gym.scorer import GymScorer

        return GymScorer(allow)
