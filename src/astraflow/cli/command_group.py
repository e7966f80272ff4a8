"""The group of all commands: AstraFlow's own and those of installed packages, in one list.

A package adds a command with an entry point of the group `astraflow.commands` that has the command's name.
Its module is imported when somebody calls the command, or asks for the list of all commands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

from astraflow.errors import ConfigError

__all__ = ["AddedCommand", "CommandGroup", "added_command", "in_order"]

_GROUP = "astraflow.commands"


@dataclass(frozen=True, slots=True)
class AddedCommand:
    """The object that the entry point of a command names.

    Example: `AddedCommand(greet, after="status")`, where `def greet(name: str) -> None` is the command.
    """

    run: Callable[..., object] | typer.Typer
    """The command; a `typer.Typer` has several subcommands."""
    after: str | None = None
    """The command that it follows in the list. `""` puts it first, and None puts it last."""


def added_command(name: str) -> AddedCommand | None:
    """Returns the command that an installed package adds; None if there is none.

    Raises: ConfigError if it doesn't load, or isn't an `AddedCommand`.
    """
    # Imported here because AstraFlow's own commands don't need it, and start faster without it.
    from astraflow.user_input.installed import find_entries, load_entry, source_of

    for entry in find_entries(_GROUP).select(name=name):
        command = load_entry(entry)
        if command is not None and not isinstance(command, AddedCommand):
            raise ConfigError(f"{source_of(entry)} is not an AddedCommand")
        return command
    return None


def in_order(own: Sequence[str]) -> list[str]:
    """Returns the names of all commands in the order of the list, given AstraFlow's own in their order."""
    from astraflow.user_input.installed import find_entries

    commands = {name: added_command(name) for name in sorted(find_entries(_GROUP).names)}
    waiting = {name: command.after for name, command in commands.items() if command is not None}
    names = ["", *own]  # a command with `after=""` follows the empty name
    while waiting:
        # If none is ready, the remaining commands follow nothing, or a command that isn't installed.
        ready = [name for name, after in waiting.items() if after in names] or list(waiting)
        for name in ready:
            after = waiting.pop(name)
            names.insert(names.index(after) + 1 if after in names else len(names), name)
    return names[1:]


class CommandGroup(TyperGroup):
    """Finds AstraFlow's own commands first, then those of installed packages."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of all commands, in the order of the list."""
        return in_order(super().list_commands(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command with this name; None if there is none.

        Raises: ConfigError if the command has to be installed.
        """
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        added = added_command(cmd_name)
        if added is None:
            from astraflow.user_input.installed import where_to_find

            if place := where_to_find(cmd_name):
                raise ConfigError(f"`astraflow {cmd_name}` {place}")
            return None
        app = typer.Typer()
        app.callback()(lambda: None)  # makes it a group, because Typer drops the name of a single command
        if isinstance(added.run, typer.Typer):
            app.add_typer(added.run, name=cmd_name)
        else:
            app.command(cmd_name)(added.run)
        return typer.main.get_group(app).commands[cmd_name]
