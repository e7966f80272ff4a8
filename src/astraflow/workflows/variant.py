"""The base classes of workflow configs, and types of their fields.

The workflows of AstraFlow, its add-ons and any other package derive from the same classes. An installed
package names its class as an entry point of the group `astraflow.workflows`.
"""

import string
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, Field

from astraflow.config import Config, Use, Variant, load_component
from astraflow.types import Task
from astraflow.workflows.calls import FormatName, ParserOrName
from astraflow.workflows.conversation import Rewards, Workflow
from astraflow.workflows.roles import name_at

__all__ = [
    "ParserChoice",
    "PolicyRoles",
    "Share",
    "WorkflowVariant",
    "load_function",
    "load_parser",
    "template",
]


class WorkflowVariant(Variant):
    """Base of a workflow's config: the interface of a recipe's `workflow` section.

    A subclass implements `acting` and `make`. The defaults of the other members are for workflows that start
    no programs and fit any tasks and reward.
    """

    is_replayable: ClassVar[bool] = False
    """Whether an episode's requests depend only on its task, its seed and the completions so far. Then it
    makes the same requests when it runs again, as long as it gets the same completions."""
    rewards_itself: ClassVar[bool] = False
    """Whether the workflow may reward episodes without the recipe's reward, which then need not fit the
    tasks."""
    compares_answers: ClassVar[bool] = False
    """Whether an episode has several answers to compare, so that a group may be one episode."""

    @property
    def call_parser(self) -> "ParserChoice | None":
        """How it reads the tool calls of its policies; None if it reads none."""
        return None

    @property
    def commands(self) -> tuple[str, ...]:
        """The programs that its episodes start on the machine, named as for `astraflow join --allow`."""
        return ()

    @property
    def needs_sandbox(self) -> bool:
        """Whether these programs run in the sandbox."""
        return False

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Maps each role to a policy, where the recipe's policies are `names`."""
        raise NotImplementedError

    def make(self) -> Workflow:
        """Makes the workflow. Raises: ConfigError or DataError if something that it needs is missing."""
        raise NotImplementedError

    def make_hiding(self, private: tuple[Path, ...]) -> Workflow:
        """Makes the workflow so that the files and folders of `private` are invisible to its programs."""
        del private
        return self.make()

    def bind(self, function: Callable[..., Awaitable[Rewards]], **made: Any) -> Workflow:
        """Binds the config's fields as keyword arguments of a function; `made` replaces some of them."""
        fields = {key: getattr(self, key) for key in type(self).model_fields if key != "name"}
        return cast("Workflow", partial(function, **{**fields, **made}))

    def check_scoring(self, reward: Config, extract: str) -> None:
        """Checks that the recipe's reward and `tasks.extract` fit. Raises: ConfigError."""

    def check_tasks(self, tasks: Iterable[Task]) -> None:
        """Checks that the tasks of a source fit. Raises: DataError."""

    def check_templates(self, models: Mapping[str, tuple[Path, Mapping[str, Any], str]]) -> None:
        """Checks that the chat templates of the models fit. Raises: ConfigError.

        `models`: the folder, `template_args` and `renderer` of each policy.
        """

    def shrunk(self, fixtures: Path) -> Self:
        """The section for `scale=smoke`: replaces large parts by files of the folder `fixtures`."""
        del fixtures
        return self


class PolicyRoles(WorkflowVariant):
    """Base of a workflow's config in which each role is a field that names a policy.

    If a field is empty, the recipe's policy at the role's place plays the role, or the last policy if the
    recipe has fewer. So a single policy plays all roles.
    """

    roles: ClassVar[tuple[str, ...]] = ("policy",)
    """Names of the fields. The first defaults to the recipe's first policy, and so on."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Maps each role to a policy, where the recipe's policies are `names`."""
        return {role: name_at(names, getattr(self, role), place) for place, role in enumerate(self.roles)}


Share = Annotated[float, Field(ge=0, le=1)]
ParserChoice = Literal["auto"] | FormatName | Use
"""How a model writes tool calls: as its chat template prints them (`auto`), by the name of a format, or as a
function of the user's own reads them."""


def template(*names: str) -> AfterValidator:
    """Checks that a text has only the placeholders `{NAME}` of `names`. Literal braces are doubled."""

    def check(text: str) -> str:
        try:
            used = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
        except ValueError as err:
            raise ValueError(f"{err}; write a literal brace twice") from err
        unknown = used - set(names)
        if unknown:
            choices = ", ".join(f"{{{name}}}" for name in names)
            raise ValueError(f"{{{min(unknown)}}} is not a placeholder of this text (choices: {choices})")
        return text

    return AfterValidator(check)


def load_parser(parser: ParserChoice) -> ParserOrName:
    """Loads the user's own function, if the workflow's key `parser` names one. Raises: ConfigError."""
    return load_function(parser, "workflow.parser") if isinstance(parser, Use) else parser


def load_function(use: Use, where: str) -> Callable[..., Any]:
    """Loads a user's function and binds its arguments. Raises: ConfigError if they do not fit."""
    function = load_component(use, where=where)
    return partial(function, **use.args) if use.args else function
