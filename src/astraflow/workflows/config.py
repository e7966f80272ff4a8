"""The `workflow` section of a recipe: how policies and a task talk.

Each workflow has a config whose fields are the keyword arguments of its function. Workflows of add-ons and
other packages are found by their entry points.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from astraflow.config import Use, with_installed
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.environment import environment
from astraflow.workflows.single_turn import single_turn
from astraflow.workflows.variant import PolicyRoles, WorkflowVariant

__all__ = [
    "EnvironmentWorkflowConfig",
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


WorkflowConfig = SingleTurnConfig | EnvironmentWorkflowConfig | WorkflowVariant | Use
if not TYPE_CHECKING:  # a type checker cannot know which workflows are installed
    WorkflowConfig = with_installed(WorkflowConfig, "astraflow.workflows")
