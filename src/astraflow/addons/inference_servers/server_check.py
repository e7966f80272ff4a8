"""Checks, before a run starts, the Python interpreter for an engine's server."""

from collections.abc import Mapping

from astraflow.addons.inference_servers.server_process import server_environment, server_program
from astraflow.errors import ConfigError
from astraflow.user_input.interpreters import ask_program, last_line

__all__ = ["check_python"]


def check_python(named: str, *, library: str, env: Mapping[str, str]) -> None:
    """Checks the Python of an engine's server.

    Raises: ConfigError if it doesn't exist or doesn't have the server installed.
    """
    python = server_program(named)
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({library!r}) is None)"
    where = f"rollout.engine.python = {named!r}"
    try:
        asked = ask_program([python, "-c", find], env=server_environment(env))
    except OSError as err:
        raise ConfigError(
            f"{where} cannot be run: {err.strerror}; expected the Python of an environment that has "
            f"{library} installed"
        ) from err
    if asked.returncode:
        said = last_line(asked.stderr)
        raise ConfigError(
            f"{where} has no {library}{f': {said}' if said else ''}; install it there, e.g. with "
            f"`{python} -m pip install {library}`, or name another Python"
        )
