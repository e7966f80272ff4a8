"""`astraflow conformance`: checks whether a service keeps the rules of the protocol."""

import asyncio
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.services import token_of
from astraflow.errors import ConfigError

if TYPE_CHECKING:
    from astraflow_conformance.harness import Settings
    from astraflow_conformance.report import Report

__all__ = ["CONFORMANCE", "check_dataflow", "check_rollout", "check_trainer", "conformance"]

conformance = typer.Typer(
    name="conformance",
    help="Check a service against the protocol, and say which of its rules it keeps.",
    no_args_is_help=True,
)

_NUM_LOG_LINES = 20
_Recipe = Annotated[
    Path | None,
    typer.Option(
        "--recipe", help="Recipe whose model and tasks the candidate is given. Default: the quickstart's."
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")]
_Patience = Annotated[
    int, typer.Option("--patience", help="Seconds to wait for what a rule asks for.", min=1)
]
_TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with the token. Default: $ASTRAFLOW_TOKEN.")
]
_WorkDir = Annotated[
    Path | None,
    typer.Option(
        "--work-dir", help="Empty folder for the candidate's log and files. Default: a temporary one."
    ),
]


@conformance.command("dataflow")
def check_dataflow(
    target: Annotated[
        str,
        typer.Argument(help="URL of a fresh run, or a command with {port}, {run_dir}.", metavar="URL|CMD"),
    ],
    recipe: _Recipe = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the rules for which a lease must expire.")
    ] = False,
    json: _Json = False,
    patience: _Patience = 60,
    *,
    token_file: _TokenFile = None,
    work_dir: _WorkDir = None,
) -> None:
    """Check a dataflow. The check uses up the run that the dataflow serves.

    Example: astraflow conformance dataflow "astraflow serve {run_dir} --port {port}"
    """
    from astraflow_conformance.harness import judge_dataflow

    def judge(settings: "Settings") -> "Coroutine[Any, Any, Report]":
        return judge_dataflow(target, settings, is_quick=quick)

    _run(judge, recipe, patience, token_file, work_dir=work_dir, is_json=json)


@conformance.command("rollout")
def check_rollout(
    target: Annotated[
        str,
        typer.Argument(
            help="Command with {url}, {token}; or the URL at which the kit waits for a service to join.",
            metavar="CMD|URL",
        ),
    ],
    recipe: _Recipe = None,
    json: _Json = False,
    patience: _Patience = 60,
    *,
    token_file: _TokenFile = None,
    work_dir: _WorkDir = None,
) -> None:
    """Check a rollout service.

    Example: astraflow conformance rollout "astraflow join {url} --name candidate"
    """
    from astraflow_conformance.harness import judge_rollout

    _run(
        lambda settings: judge_rollout(target, settings),
        recipe,
        patience,
        token_file,
        work_dir=work_dir,
        is_json=json,
    )


@conformance.command("trainer")
def check_trainer(
    target: Annotated[
        str,
        typer.Argument(
            help="Command with {url}, {policy}, {run_dir}, {publisher}, {model_dir}, {checkpoints}, {token}.",
            metavar="CMD",
        ),
    ],
    recipe: _Recipe = None,
    json: _Json = False,
    patience: _Patience = 60,
    *,
    token_file: _TokenFile = None,
    work_dir: _WorkDir = None,
) -> None:
    """Check a trainer.

    Example: astraflow conformance trainer
    "astraflow train {run_dir} --policy {policy} --url {url} --publisher {publisher}"
    """
    from astraflow_conformance.harness import judge_trainer

    _run(
        lambda settings: judge_trainer(target, settings),
        recipe,
        patience,
        token_file,
        work_dir=work_dir,
        is_json=json,
    )


def _run(
    judge: "Callable[[Settings], Coroutine[Any, Any, Report]]",
    recipe: Path | None,
    patience: int,
    token_file: Path | None,
    *,
    work_dir: Path | None,
    is_json: bool,
) -> None:
    """Runs the check, prints the report, and exits with 1 if a rule is broken."""
    from rich.console import Console

    from astraflow.recipe.gallery import find_entry
    from astraflow_conformance.harness import Settings

    if work_dir is not None and work_dir.exists() and any(work_dir.iterdir()):
        raise ConfigError(f"--work-dir {work_dir} is not empty")
    with tempfile.TemporaryDirectory(prefix="conformance-") as temporary:
        folder = work_dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        settings = Settings(
            folder.resolve(),
            recipe or find_entry("quickstart").path,
            patience_s=float(patience),
            token=token_of(token_file),
        )
        report = asyncio.run(judge(settings))
        if is_json:
            print(report.json().decode())
        else:
            Console().print(report.table())
        if report.broken and settings.log.is_file():
            lines = settings.log.read_text(encoding="utf-8", errors="replace").splitlines()
            print(
                f"the candidate's last lines ({settings.log}):",
                *lines[-_NUM_LOG_LINES:],
                sep="\n",
                file=sys.stderr,
            )
    raise typer.Exit(report.exit_code)


CONFORMANCE = AddedCommand(conformance)
