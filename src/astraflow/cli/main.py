"""The `astraflow` command: a thin shell over `run`. Heavy imports happen inside the commands.

Commands of add-ons and other packages join the list automatically: see `command_group`.
"""

import atexit
import contextlib
import errno
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import astraflow
from astraflow.cli.command_group import CommandGroup
from astraflow.cli.runs import audit, run
from astraflow.cli.services import join, publish, rank, serve, train
from astraflow.errors import ConfigError, DataError, Error, VersionMismatchError
from astraflow.report.terminal_text import printable
from astraflow.service.loopback import proxy_exemptions
from astraflow.user_input.extras import install_hint, missing_module
from astraflow.user_input.own_code import describe_error, own_frames
from astraflow.user_input.user_files import format_path

__all__ = ["ERROR_FILE_VARIABLE", "app", "main"]

MODULE_PATH_VARIABLE = "ASTRAFLOW_MODULE_PATH"
"""The same as in `service.process`, which is not imported because that would slow down every command."""

ERROR_FILE_VARIABLE = "ASTRAFLOW_ERROR_FILE"
"""Names a file to which a command that fails writes its error, for a program that runs the command."""

_WRONG_PATHS = frozenset({errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
"""Errors of paths that can't be right, whatever the state of the machine."""

_STARTING_GC_THRESHOLDS = (50_000, 20, 100)
"""Thresholds of the garbage collector while modules are imported.

Modules stay in memory, so there is nothing to collect. With Python's default thresholds, the collector takes
a fifth of the time that it takes to import torch and transformers. A service sets its own thresholds once it
is ready (`service.process.settle_memory`).
"""

app = typer.Typer(
    name="astraflow",
    cls=CommandGroup,
    help="Reinforcement learning of LLM agents as a dataflow between autonomous services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    del debug  # `main` reads it, because it handles errors outside of Typer
    if version:
        print(f"astraflow {astraflow.__version__}")
        raise typer.Exit


app.command("run")(run)
app.command("audit")(audit)
app.command("join", rich_help_panel="Single services")(join)
app.command("serve", rich_help_panel="Single services")(serve)
app.command("publish", rich_help_panel="Single services")(publish)
app.command("train", rich_help_panel="Single services")(train)
app.command("rank", hidden=True)(rank)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. Prints one line to stderr for an AstraFlow error.

    The exit code of an error is 2 if the user can correct it, else 1.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    error_file = os.environ.pop(ERROR_FILE_VARIABLE, "")  # not for child processes
    gc.set_threshold(*_STARTING_GC_THRESHOLDS)
    atexit.register(gc.freeze)  # else the last collection walks through all modules, for a tenth of a second
    os.environ.update(proxy_exemptions(os.environ))  # child processes inherit them
    of_recipe = os.environ.get(MODULE_PATH_VARIABLE, "").split(os.pathsep)  # of the recipe's own modules
    sys.path += [path for path in (*of_recipe, os.getcwd()) if path and path not in sys.path]
    try:
        app(args=arguments, prog_name="astraflow")
    except Error as err:
        if "--debug" in arguments:
            raise
        _fail(str(err), error_file, is_users=isinstance(err, ConfigError | DataError | VersionMismatchError))
    except OSError as err:  # for example, a read-only folder or a full disk
        if "--debug" in arguments:
            raise
        is_about_file = err.strerror is not None and err.filename is not None
        reason = f"{format_path(Path(str(err.filename)))}: {err.strerror}" if is_about_file else str(err)
        _fail(reason, error_file, is_users=err.errno in _WRONG_PATHS)
    except Exception as err:
        if (module := missing_module(err)) and "--debug" not in arguments:
            _fail(install_hint(f"`astraflow {arguments[0]}`", [module]), error_file, is_users=True)
        calls = own_frames(err)
        if "--debug" in arguments or not calls:  # if no user code was called, the bug is in AstraFlow
            raise
        lines = [describe_error(err), *[f"  called from {call}" for call in reversed(calls[:-1])]]
        _fail("\n".join(lines), error_file, is_users=False)


def _fail(text: str, error_file: str, *, is_users: bool) -> NoReturn:
    """Ends the command with its error. `is_users`: the user can correct it."""
    line = printable(text, keeps_lines=True)
    print(f"error: {line}", file=sys.stderr)
    if error_file:
        with contextlib.suppress(OSError):
            Path(error_file).write_text(line, encoding="utf-8", errors="replace")
    sys.exit(2 if is_users else 1)


if __name__ == "__main__":
    main()
