"""The command `export`."""

from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.options import MOST

__all__ = ["EXPORT", "export"]


def export(
    run_dir: Annotated[Path, typer.Argument(help="Run folder; the run may be live.", metavar="RUN_DIR")],
    out: Annotated[Path, typer.Argument(help="Folder to write.", metavar="DIR")],
    version: Annotated[
        int,
        typer.Option("--version", help="Version of a run's weights. Default: the newest.", min=-1, max=MOST),
    ] = -1,
    policy: Annotated[
        str, typer.Option("--policy", help="Name of the policy. Default: the recipe's first trained one.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace DIR if it is a model folder.")] = False,
) -> None:
    """Write a version of a run's weights as a Hugging Face folder, bit-equal to what was served.

    The folder has weights, config, tokenizer and chat template, and `from_pretrained` opens it. The written
    files are read back and checked against the digest of the version. No service needs to run. If the run no
    longer keeps the version, the error names the versions that it still keeps.

    Example: `astraflow export runs/quickstart models/trained`.
    """
    from astraflow.addons.export.export import export_version

    done = export_version(run_dir, out, policy=policy, version=version, force=force)
    print(
        f"{done.folder}: {done.policy} version {done.version}, {done.num_bytes:,} bytes of weights, "
        f"digest {done.digest}"
    )


EXPORT = AddedCommand(export, after="eval")
