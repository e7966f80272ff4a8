"""Commands that run one service each. `astraflow run` uses them, and so can you, on any machine."""

import ctypes
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.cli.options import Port
from astraflow.errors import ConfigError, DataError, Error, FencedError, RefusedError, VersionMismatchError

if TYPE_CHECKING:
    import asyncio

__all__ = ["CaFile", "is_final", "join", "publish", "rank", "run_as", "serve", "token_of", "train", "trust"]

_log = logging.getLogger(__name__)

_USER_ERROR_CODE = 2
"""Exit code of a service whose settings are wrong."""

_RunDir = Annotated[Path, typer.Argument(help="Run folder with a recipe.yaml.", metavar="RUN_DIR")]
_Policy = Annotated[str, typer.Option("--policy", help="Name of the policy.")]
_TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with the token. Default: $ASTRAFLOW_TOKEN.")
]
_OwnTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", help="File with the token. Default: $ASTRAFLOW_TOKEN, else the run folder's own."
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        help="PEM file with the certificates for an https URL. Default: $SSL_CERT_FILE, else the system's.",
    ),
]


def serve(
    run_dir: _RunDir,
    port: Port = 0,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that has failed.")] = False,
) -> None:
    """Run the dataflow of a run folder: its tasks, tables and journal."""
    from astraflow.processes.dataflow_process import run_dataflow
    from astraflow.recipe.run_folder import RunFolder

    token_of(None)  # removes an inherited token; the dataflow reads the tokens from the run folder
    if resume:
        RunFolder(run_dir).resume.touch()
    run_as("dataflow", partial(run_dataflow, run_dir=run_dir, port=port))


def publish(
    run_dir: _RunDir,
    policy: _Policy,
    port: Port = 0,
    url: Annotated[str, typer.Option("--url", help="Base URL of the dataflow; for a frozen policy.")] = "",
    ca_file: CaFile = None,
) -> None:
    """Run the publisher of a policy, which owns and serves the files of its versions.

    The publisher of a frozen policy also announces the policy's only version.
    """
    trust(ca_file)
    from astraflow.processes.publisher_process import run_policy_publisher

    main = partial(
        run_policy_publisher, run_dir=run_dir, policy=policy, port=port, url=url, token=token_of(None)
    )
    run_as(f"publisher-{policy}", main)


def train(
    run_dir: _RunDir,
    policy: _Policy,
    url: Annotated[str, typer.Option("--url", help="Base URL of the dataflow.")],
    publisher: Annotated[str, typer.Option("--publisher", help="Base URL of the policy's publisher.")],
    *,
    token_file: _OwnTokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Run the trainer of a policy."""
    trust(ca_file)
    from astraflow.processes.trainer_process import run_policy_trainer

    links = {"url": url, "publisher_url": publisher, "token": token_of(token_file)}
    run_as(f"trainer-{policy}", partial(run_policy_trainer, run_dir=run_dir, policy=policy, **links))


def rank(
    run_dir: _RunDir,
    policy: _Policy,
    url: Annotated[str, typer.Option("--url", help="Base URL of the dataflow.")],
    rank: Annotated[int, typer.Option("--rank", help="Its number, from 1.")],
    link: Annotated[int, typer.Option("--link", help="Descriptor of the socket to rank 0.")],
) -> None:
    """Run another rank of a trainer. Trainers start it themselves."""
    from astraflow.processes.rank_process import run_rank

    run_rank(run_dir, policy=policy, url=url, rank=rank, link=link)


def join(  # size: one parameter per option, each with its help
    url: Annotated[str, typer.Argument(help="Base URL of a dataflow.", metavar="URL")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="What differs on this machine, e.g. rollout.engine.device=cuda:0",
            metavar="[rollout.a=value]...",
        ),
    ] = None,
    *,
    name: Annotated[str, typer.Option("--name", help="Name of this service. Default: the host's.")] = "",
    token_file: _TokenFile = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help="Module, or agent command, that the recipe may run here; repeatable."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Folder for model files. Default: a temporary one.")
    ] = None,
    ca_file: CaFile = None,
    peer: Annotated[
        str,
        typer.Option(
            "--peer",
            help="Serve weights to other services at this address of the machine, HOST or HOST:PORT; auto: "
            "the one from which it calls the run. Default: serve none.",
        ),
    ] = "",
) -> None:
    """Join a run as a rollout service. Without --peer, the service only needs outbound connections."""
    from astraflow.service.client import check_url

    check_url(url)
    if peer and url.startswith("https:"):
        raise ConfigError("--peer serves plain HTTP, and this run uses HTTPS; leave --peer out")
    trust(ca_file)
    from astraflow.processes.program import PRIVATE_VARIABLE
    from astraflow.processes.rollout_process import run_rollout_service

    # The files and folders that the launcher hides from agent programs.
    hidden = os.environ.get(PRIVATE_VARIABLE, "").split(os.pathsep)
    main = partial(
        run_rollout_service,
        url=url,
        name=name,
        token=token_of(token_file),
        allow=tuple(allow or ()),
        cache=cache,
        peer=peer,
        overrides=tuple(overrides or ()),
        private=(*(Path(path) for path in hidden if path), *([token_file] if token_file else [])),
    )
    run_as(name or "rollout", main)


def run_as(name: str, main: "Callable[[asyncio.Event], Awaitable[int]]") -> None:
    """Runs a service. Exits with its code, or with 2 if its settings are wrong."""
    from astraflow.service.process import PARENT_FD_VARIABLE, launcher_pipe, run_service
    from astraflow.service.process_ties import die_with_parent

    # Without the launcher's pipe, the parent is a shell or a scheduler's process, not the launcher.
    if launcher_pipe(PARENT_FD_VARIABLE) is not None:
        die_with_parent()  # even during a long computation

    async def guarded(stop: "asyncio.Event") -> int:
        try:
            return await main(stop)
        except Error as err:
            if not is_final(err):
                raise
            _log.error("%s stopped: %s", name, err)
            return _USER_ERROR_CODE

    code = run_service(guarded, name=name)
    logging.shutdown()
    sys.stdout.flush()
    # Don't wait: a thread may still compute a training step, and unloading heavy libraries takes a second.
    os._exit(code)


def is_final(err: Error) -> bool:
    """Returns whether a restarted process would end with the same error, because its settings are wrong.

    A fenced trainer is not such a case: after a restart, it opens the next session and continues.
    """
    is_wrong = isinstance(err, ConfigError | DataError | RefusedError | VersionMismatchError)
    return is_wrong and not isinstance(err, FencedError)


def trust(ca_file: Path | None) -> None:
    """Makes this process verify HTTPS services with the certificates in a file.

    Sets OpenSSL's environment variable, so that every client in the process uses the file.

    Raises: ConfigError if the file does not exist.
    """
    if ca_file is not None:
        from astraflow.recipe.access import CA_VARIABLE

        if not ca_file.is_file():
            raise ConfigError(f"--ca-file {ca_file} is not a file; a PEM file with certificates is expected")
        os.environ[CA_VARIABLE] = str(ca_file.resolve())


def token_of(token_file: Path | None) -> str:
    """Returns the token from a file or from the environment; never from an argument, which others could read.

    Removes the token from the environment, so that no child process inherits it.
    """
    from astraflow.processes.program import TOKEN_VARIABLE
    from astraflow.user_input.user_files import read_token

    token = _taken_from_environment(TOKEN_VARIABLE)
    if not token.isprintable():
        raise ConfigError(f"${TOKEN_VARIABLE} must be one line of printable UTF-8")
    return read_token(token_file) if token_file else token


def _taken_from_environment(name: str) -> str:
    """Removes an environment variable and returns its value.

    On Linux, also wipes it from `/proc/PID/environ`, which shows the initial environment of a process to all
    other processes of its user.
    """
    value = os.environ.get(name, "")
    if value and sys.platform == "linux":
        find = ctypes.CDLL(None).getenv
        find.argtypes = [ctypes.c_char_p]
        find.restype = ctypes.c_void_p
        # The kernel shows the memory that getenv points to, even after the variable is unset.
        address = find(name.encode())
        if address:
            ctypes.memset(address, 0, len(os.fsencode(value)))
    os.environ.pop(name, None)
    return value
