"""Which of a service's environment variables other people's programs get: those they need, and no secret."""

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
"""Variables with these prefixes are passed on too."""


def passed_variables(kept: Collection[str] = (), *, is_own_python: bool = True) -> dict[str, str]:
    """The variables that a program gets, with those that the recipe names (`kept`).

    `is_own_python`: False for a program of another Python, which those of this one would lead astray.
    """
    passed = {
        key: value
        for key, value in os.environ.items()
        if key in _PASSED_ON or key in kept or key.startswith(_PASSED_PREFIXES)
    }
    passed |= proxy_exemptions(passed)  # an agent's endpoint is on loopback
    if is_own_python:
        return passed
    own = ("PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX")
    return {key: value for key, value in passed.items() if key in kept or not key.startswith(own)}
