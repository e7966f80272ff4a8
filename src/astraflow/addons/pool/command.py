"""The command `retire`."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.options import finite
from astraflow.cli.services import CaFile, trust

__all__ = ["RETIRE", "retire"]


def retire(
    where: Annotated[str, typer.Argument(help="Run folder, or URL of a dataflow.", metavar="RUN_DIR|URL")],
    service: Annotated[
        str, typer.Argument(help="Name or id of a rollout service in `astraflow status`.", metavar="SERVICE")
    ],
    *,
    wait_s: Annotated[
        float,
        typer.Option("--wait-s", help="Wait up to this long until it has left.", min=0.0, callback=finite),
    ] = 600.0,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File with the admin token. Default: the run folder's own."),
    ] = None,
    ca_file: CaFile = None,
) -> None:
    """Retire a rollout service: it takes no new episodes, finishes those that it has, and ends.

    No work is lost, and the service isn't restarted. A resumed run starts it again, and a pool that sizes
    itself may start another one.

    Example: `astraflow retire runs/quickstart rollout-1`.
    """
    trust(ca_file)
    from astraflow.addons.pool.retire import retire_service
    from astraflow.user_input.user_files import read_token

    token = read_token(token_file)
    left = asyncio.run(retire_service(where, service, wait_s=wait_s, token=token, ca_file=str(ca_file or "")))
    print(f"{left.name} has left; rollout services that stay: {', '.join(left.stay) or 'none'}")


RETIRE = AddedCommand(retire, after="drop-batch")
