"""What a recipe's `workflow` section is made of: the base classes of workflow configs, and types of fields.

Workflows of AstraFlow itself, of its add-ons, and of anyone's package derive from the same classes. An
installed package names its class as an entry point of the group `astraflow.workflows`.
"""

import string
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, Field

from astraflow.config import Config, Use, Variant, check_args, load_attr
from astraflow.errors import ConfigError
from astraflow.types import Task
from astraflow.workflows.calls import CALL_PARSERS, CallParser
from astraflow.workflows.conversation import Rewards, Workflow
from astraflow.workflows.roles import name_at

__all__ = [
    "ParserChoice",
    "PolicyRoles",
    "Share",
    "WorkflowVariant",
    "check_differ",
    "load_function",
    "load_parser",
    "template",
]


class WorkflowVariant(Variant):
    """Base of a workflow's config: what AstraFlow asks of a recipe's `workflow` section.

    A subclass implements `acting` and `make`. The other members have defaults for workflows that start no
    programs and fit any tasks and reward.
    """

    is_replayable: ClassVar[bool] = False
    """Whether the requests of an episode depend on nothing but its task, its seed and the completions so far.
    It then makes the same requests when it runs again, as long as it gets the same completions."""
    rewards_itself: ClassVar[bool] = False
    """Whether an episode may be rewarded without the recipe's reward, which then need not fit the tasks."""

    @property
    def commands(self) -> tuple[str, ...]:
        """The programs that its episodes start on the machine, as `astraflow join --allow` names them."""
        return ()

    @property
    def needs_sandbox(self) -> bool:
        """Whether these programs run in the sandbox."""
        return False

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Maps each role to a policy, where the recipe's policies are `names`."""
        raise NotImplementedError

    def make(self) -> Workflow:
        """The workflow. Raises: ConfigError or DataError if something that it needs is missing."""
        raise NotImplementedError

    def make_hiding(self, private: tuple[Path, ...]) -> Workflow:
        """The workflow, whose programs must not see the files and folders of `private`."""
        del private
        return self.make()

    def bound(self, function: Callable[..., Awaitable[Rewards]], **made: Any) -> Workflow:
        """A function with the config's fields as its keyword arguments; `made` replaces some of them."""
        fields = {key: getattr(self, key) for key in type(self).model_fields if key != "name"}
        return cast("Workflow", partial(function, **{**fields, **made}))

    def check_scoring(self, reward: Config, extract: str) -> None:
        """Checks that the recipe's reward and `tasks.extract` fit. Raises: ConfigError."""

    def check_tasks(self, tasks: Iterable[Task]) -> None:
        """Checks that the tasks of a source fit. Raises: DataError."""

    def shrunk(self, fixtures: Path) -> Self:
        """The section for `scale=smoke`: what is large is replaced by files of the folder `fixtures`."""
        del fixtures
        return self


class PolicyRoles(WorkflowVariant):
    """Base of a workflow's config whose roles are fields that name a policy each.

    A role for which no policy is named is played by the recipe's policy at the role's place, or by the last
    one if the recipe has fewer policies. A single policy therefore plays all roles.
    """

    roles: ClassVar[tuple[str, ...]] = ("policy",)
    """The fields: the first defaults to the recipe's first policy, and so on."""

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Maps each role to a policy, where the recipe's policies are `names`."""
        return {role: name_at(names, getattr(self, role), place) for place, role in enumerate(self.roles)}


# --- types of fields --------------------------------------------------------------------------------

Share = Annotated[float, Field(ge=0, le=1)]
ParserChoice = Literal["tagged", "bare_json"] | Use
"""How a model writes tool calls: the name of a built-in parser, or a function of the user's own."""


def template(*names: str) -> AfterValidator:
    """Checks that a text has no placeholders `{NAME}` but those of `names`; a brace as such is doubled."""

    def check(text: str) -> str:
        try:
            used = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
        except ValueError as err:
            raise ValueError(f"{err}; a brace that stands for itself is written twice") from err
        unknown = used - set(names)
        if unknown:
            choices = ", ".join(f"{{{name}}}" for name in names)
            raise ValueError(f"{{{min(unknown)}}} is not a placeholder of this text (choices: {choices})")
        return text

    return AfterValidator(check)


def check_differ(first: str, second: str) -> None:
    """Checks that two choices differ also where upper and lower case do not count, as in verdicts.

    Raises: ValueError.
    """
    if first.lower() == second.lower():
        raise ValueError(f"{first!r} stands for both choices; give each a text of its own")


def load_parser(parser: ParserChoice) -> CallParser:
    """The parser of calls that the key `parser` of the workflow names. Raises: ConfigError."""
    return load_function(parser, "workflow.parser") if isinstance(parser, Use) else CALL_PARSERS[parser]


def load_function(use: Use, where: str) -> Callable[..., Any]:
    """A function of the user's with its arguments. Raises: ConfigError if they do not fit together."""
    function = load_attr(use.use, where=f"{where}.use")
    if not callable(function):
        raise ConfigError(f"{where}.use = {use.use!r} is not a function")
    check_args(function, use.args, where=f"{where}.args")
    return partial(function, **use.args) if use.args else function
