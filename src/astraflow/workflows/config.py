"""The `workflow` section of a recipe: how policies and a task talk.

Each workflow has a config whose fields are the keyword arguments of its function. Workflows of add-ons and
other packages are found by their entry points.
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from astraflow.config import Use, with_installed
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.environment import environment
from astraflow.workflows.multi_turn import FEEDBACK, multi_turn
from astraflow.workflows.single_turn import single_turn
from astraflow.workflows.variant import PolicyRoles, WorkflowVariant, template

__all__ = [
    "EnvironmentWorkflowConfig",
    "MultiTurnConfig",
    "SingleTurnConfig",
    "WorkflowConfig",
]


class SingleTurnConfig(PolicyRoles):
    """One prompt, one completion, one score."""

    is_replayable: ClassVar[bool] = True
    name: Literal["single_turn"] = "single_turn"
    policy: str = ""
    """Policy that answers; empty: the recipe's first policy."""

    def make(self) -> Workflow:
        """The workflow."""
        return self.bind(single_turn)


class MultiTurnConfig(PolicyRoles):
    """A wrong answer gets feedback and another try in the same conversation."""

    is_replayable: ClassVar[bool] = True
    name: Literal["multi_turn"] = "multi_turn"
    policy: str = ""
    """Policy that answers; empty: the recipe's first policy."""
    turns: int = Field(default=3, ge=1)
    """Largest number of answers per episode."""
    feedback: Annotated[str, template("score")] = FEEDBACK
    """Message to the policy after a wrong answer; `{score}` is the score of that answer."""
    rewards_each_turn: bool = False
    """Reward each turn with its own score, instead of the whole conversation with the last score."""

    def make(self) -> Workflow:
        """The workflow."""
        return self.bind(multi_turn)


class EnvironmentWorkflowConfig(PolicyRoles):
    """The policy replies to the task's environment until the environment is done; each turn has its own
    reward."""

    name: Literal["environment"] = "environment"
    policy: str = ""
    """Policy that replies; empty: the recipe's first policy."""
    max_turns: int = Field(default=16, ge=1)
    """Largest number of replies per episode."""

    def make(self) -> Workflow:
        """The workflow."""
        return self.bind(environment)


WorkflowConfig = SingleTurnConfig | MultiTurnConfig | EnvironmentWorkflowConfig | WorkflowVariant | Use
if not TYPE_CHECKING:  # a type checker cannot know which workflows are installed
    WorkflowConfig = with_installed(WorkflowConfig, "astraflow.workflows")
