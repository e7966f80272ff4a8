"""Writes docs/commands.md, the reference of the command line, from the commands themselves.

With `--check`, nothing is written, and the exit code is 1 if the page is not up to date.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from typer.models import ArgumentInfo

from astraflow.cli.command_group import added_command, in_order
from astraflow.cli.main import app

Command = Callable[..., Any]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
HEAD = """# Command reference

*Generated from the commands by `make docs`; do not edit.*

Every command explains itself with `--help`. A mistake in a recipe or on the command line gives one line
on stderr and exit code 2; any other failure gives exit code 1. `astraflow --debug COMMAND ...` shows the
traceback.

"""


def commands_of(group: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Yields every command with its words. Commands of subgroups come after the group's own."""
    for info in group.registered_commands:
        assert info.callback is not None
        yield (*path, info.name or info.callback.__name__), info.callback
    for info in group.registered_groups:
        assert info.typer_instance is not None
        yield from commands_of(info.typer_instance, (*path, str(info.name)))


def all_commands() -> Iterator[tuple[tuple[str, ...], Command]]:
    """Yields every command with its words, in the order of the help."""
    own = list(commands_of(app))
    for name in in_order(list(dict.fromkeys(path[0] for path, _ in own))):
        added = added_command(name)
        if added is None:
            yield from ((path, command) for path, command in own if path[0] == name)
        elif isinstance(added.run, typer.Typer):
            yield from commands_of(added.run, (name,))
        else:
            yield (name,), added.run


def cell(text: str | None) -> str:
    """Returns a text as a cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")


def kind_of(annotation: Any) -> str:
    """Returns what follows an option on the command line; empty for a flag."""
    kinds = {bool: "", int: " N", Path: " PATH"}
    choices = [a for a in (annotation, *get_args(annotation)) if a in kinds]
    return kinds[choices[0]] if choices else " TEXT"


def section(path: tuple[str, ...], command: Command) -> str:
    """Describes one command: usage, what it does, its arguments and options."""
    hints = get_type_hints(command, include_extras=True)
    usage = ["astraflow", *path]
    arguments = []
    options = []
    for name, parameter in inspect.signature(command).parameters.items():
        annotation, info = get_args(hints[name])[:2]
        if isinstance(info, ArgumentInfo):
            word = str(info.metavar)
            usage.append(word)
            arguments.append(f"| `{cell(word)}` | {cell(info.help)} |")
            continue
        note = " Required." if parameter.default is inspect.Parameter.empty else ""
        declared = str(info.default)  # where typer keeps an annotated option's first name
        shown = declared if declared.startswith("--") else f"--{name.replace('_', '-')}"
        options.append(f"| `{cell(shown + kind_of(annotation))}` | {cell(info.help)}{note} |")
    if options:
        usage.append("[OPTIONS]")
    told = [" ".join(part.split()) for part in inspect.cleandoc(command.__doc__ or "").split("\n\n")]
    rows = ["| argument or option | meaning |", "|---|---|", *arguments, *options]
    head = [f"## {' '.join(path)}", "", "```text", " ".join(usage), "```", ""]
    return "\n".join([*head, "\n\n".join(told), "", *rows, ""])


def page() -> str:
    """Returns the whole page."""
    return HEAD + "\n".join(section(path, command) for path, command in all_commands())


def main() -> int:
    """Writes or checks the page."""
    text = page().rstrip("\n") + "\n"
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.name} is not up to date with the commands; run `make docs`")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
