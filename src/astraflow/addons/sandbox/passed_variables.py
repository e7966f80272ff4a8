"""Chooses the environment variables that a service passes on to other people's programs: those that they
need, and no secrets."""

import os
from collections.abc import Collection

from astraflow.service.loopback import proxy_exemptions

__all__ = ["passed_variables"]

_PASSED_ON = frozenset(
    {
        "CONDA_PREFIX",
        "CUDA_VISIBLE_DEVICES",
        "HOME",
        "JAVA_HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "NODE_PATH",
        "PATH",
        "REQUESTS_CA_BUNDLE",
        "SHELL",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TERM",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
    }
)
"""Variables that programs need and that hold no secret."""
_PASSED_PREFIXES = ("LC_", "PYTHON")
"""Variables with these prefixes are also passed on."""


def passed_variables(own_names: Collection[str] = (), *, is_own_python: bool = True) -> dict[str, str]:
    """Returns the variables that a program gets, including those that the recipe names (`own_names`).

    `is_own_python`: False for a program that runs in another Python. It doesn't get the variables of this
    Python, because they would make it use the wrong files.
    """
    variables = {
        key: value
        for key, value in os.environ.items()
        if key in _PASSED_ON or key in own_names or key.startswith(_PASSED_PREFIXES)
    }
    variables |= proxy_exemptions(variables)  # an agent's endpoint is on loopback
    if is_own_python:
        return variables
    own = ("PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX")
    return {key: value for key, value in variables.items() if key in own_names or not key.startswith(own)}
