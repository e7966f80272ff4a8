"""Checks what a run needs from the machine that starts it: the engine's requirements, ports, certificates and
the run folder. `gpu_checks` checks its GPUs.

The checks start no service and write nothing. They query PyTorch and a server's own Python in short-lived
processes.
"""

import os
import subprocess
from pathlib import Path

from astraflow.errors import ConfigError
from astraflow.processes.program import choose_addresses
from astraflow.recipe.access import tls_files
from astraflow.recipe.resume import changes_between, refuse_changes, refuse_fewer_steps, steps_done
from astraflow.recipe.run_folder import RunFolder
from astraflow.rollout.engine_config import EngineVariant
from astraflow.run.checks import Examined, Finding

__all__ = [
    "ask_program",
    "check_addresses",
    "check_certificates",
    "check_engine",
    "check_run_folder",
    "last_line",
]

_ASK_TIMEOUT_S = 120.0
"""Time limit of these processes: importing torch takes seconds, or a minute on a busy disk."""


def check_engine(examined: Examined) -> None:
    """Checks the requirements of the engine. Raises: ConfigError if this machine lacks what it needs."""
    engine = examined.recipe.rollout.engine
    if isinstance(engine, EngineVariant) and examined.recipe.has_services_here:
        engine.check_machine()


def ask_program(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a short program in the folder `/`, where no file shadows a Python module."""
    try:
        return subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as err:
        raise ConfigError(f"{command[0]} did not answer within {_ASK_TIMEOUT_S:.0f} s") from err


def last_line(text: str) -> str:
    """Returns the last line of a program's output; empty if there is none."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def check_addresses(examined: Examined) -> None:
    """Checks the ports in the recipe.

    Raises: ConfigError if a port is taken, unless a run that is active in the folder uses it.
    """
    if not RunFolder(examined.run_dir).is_locked:
        choose_addresses(examined.recipe, {})


def check_certificates(examined: Examined) -> None:
    """Checks that the certificate files are there."""
    named = dict(zip(("cert", "key"), tls_files(examined.recipe) or (), strict=False))
    named |= {"ca": examined.recipe.dataflow.tls.ca}
    for key, path in named.items():
        if path and not Path(path).is_file():
            text = f"dataflow.tls.{key} = {path!r}: this file does not exist"
            examined.add(Finding("fail", "certificates", text))


def check_run_folder(examined: Examined) -> None:
    """Checks the run folder.

    Raises: ConfigError if the folder cannot be written, or belongs to a run of another recipe.
    """
    run_dir = examined.run_dir
    above = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ConfigError(
            f"the run folder {run_dir} cannot be created: {above} is a file; choose another --run-dir"
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the run folder {run_dir} cannot be written: you have no write permission for {above}; choose "
            "another --run-dir"
        )
    folder = RunFolder(run_dir)
    if folder.recipe.is_file():
        refuse_changes(changes_between(folder.load_recipe(), examined.recipe), run_dir)
        refuse_fewer_steps(examined.recipe, steps_done(folder.journal), run_dir)
