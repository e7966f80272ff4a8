"""The configs of the source `messages` and of the workflow `supervised`."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from astraflow.errors import DataError
from astraflow.protocols import TaskSource
from astraflow.tasks.variants import SourceContext, SourceVariant
from astraflow.types import Task
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.variant import PolicyRoles

__all__ = ["MessagesSourceConfig", "SupervisedConfig"]


class MessagesSourceConfig(SourceVariant):
    """Conversations for the workflow `supervised`: rows with `messages`, in the format of OpenAI's chat
    completions, and perhaps `tools`. A warning names the rows that are left out."""

    name: Literal["messages"] = "messages"
    path: str
    """File, folder, or name on the hub, as for the source `datasets`."""
    subset: str = ""
    """Name of the data set's configuration; empty: the default one."""
    split: str = "train"
    """Name of the data set's split; ignored for a single file, which has only one."""
    train: Literal["assistant", "last"] = "assistant"
    """Which turns are learned: all of the assistant's, or only its last one. A message's own `train` (true or
    false) or `weight` (0 or 1) decides instead."""

    def make(self, context: SourceContext) -> TaskSource:
        """Reads the rows. Raises: ConfigError or DataError."""
        from astraflow.addons.supervised.chats import read_chats

        return read_chats(self, name=context.name)


class SupervisedConfig(PolicyRoles):
    """The policy learns the conversations of a source `messages`; nothing is sampled. The reward is its mean
    probability of a trained token (geometric) before it learns the conversation."""

    rewards_itself: ClassVar[bool] = True
    name: Literal["supervised"] = "supervised"
    policy: str = ""
    """Policy that learns; empty: the recipe's first policy."""

    def make(self) -> Workflow:
        """Makes the workflow."""
        from astraflow.addons.supervised.supervised import Supervised

        return Supervised(self.policy)

    def check_tasks(self, tasks: Iterable[Task]) -> None:
        """Checks that the tasks are conversations. Raises: DataError."""
        if other := next((task.id for task in tasks if '"kind":"messages"' not in task.spec[:20]), ""):
            raise DataError(f"task {other} isn't a conversation; use a source {{name: messages, path: ...}}")
