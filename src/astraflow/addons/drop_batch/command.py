"""The command `drop-batch`."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.services import CaFile, trust

__all__ = ["DROP_BATCH", "drop"]


def drop(
    where: Annotated[str, typer.Argument(help="Run folder, or URL of a dataflow.", metavar="RUN_DIR|URL")],
    policy: Annotated[str, typer.Argument(help="Trained policy.", metavar="POLICY")],
    *,
    step: Annotated[
        int,
        typer.Option(
            "--step",
            help="Number of the step whose batch is dropped, if it is the oldest one that is not committed. "
            "Default: that step, whichever it is.",
            min=0,
            show_default=False,
        ),
    ] = 0,
    reason: Annotated[
        str, typer.Option("--reason", help="The reason, which the journal keeps.")
    ] = "it cannot be trained",
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File with the admin token. Default: the run folder's own."),
    ] = None,
    ca_file: CaFile = None,
) -> None:
    """Drop a batch on which the trainer keeps failing, in a live run or a stopped one.

    The command evicts the groups of the batch, and those of a batch that was taken in advance. The steps get
    other groups.
    """
    trust(ca_file)
    _drop_and_report(where, policy, step=step, reason=reason, token_file=token_file)


def _drop_and_report(where: str, policy: str, *, step: int, reason: str, token_file: Path | None) -> None:
    """Drops a batch that cannot be trained, and prints the result."""
    from rich.console import Console

    from astraflow.addons.drop_batch.drop_batch import drop_batch
    from astraflow.report.terminal_text import printable
    from astraflow.user_input.user_files import read_token

    token = read_token(token_file)
    dropped = asyncio.run(drop_batch(where, policy, step=step, reason=reason, token=token))
    steps = ", ".join(str(step + 1) for step in dropped.steps)
    then = (
        "its trainer restarts from its checkpoint"
        if dropped.is_live
        else "`astraflow run` with the same recipe continues the run"
    )
    Console().print(
        printable(
            f"policy {policy}: the batch of step {steps} is dropped ({dropped.num_groups} groups are "
            f"evicted); {then}, with other groups"
        ),
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


DROP_BATCH = AddedCommand(drop, after="audit")
