"""Installs packages for the Python that runs this program, with uv where possible and with pip otherwise.

    python install.py -c constraints.txt -e '.[quickstart]'   # the arguments of `pip install`
    INSTALLER=pip python install.py ...                       # without uv

uv needs a tenth of pip's processor time. This program takes uv from PATH, or else has pip install it from
wherever pip is configured to look. uv then gets pip's own settings: indexes, folders of wheels, constraints,
certificates, and proxy. pip installs if it has a setting that uv doesn't know, if uv cannot be had, or if uv
fails. So an error message always is pip's.
"""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

UV = "uv>=0.5"
PIP_INSTALL = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")

_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "-c",
    "trusted-host": "--allow-insecure-host",
    "only-binary": "--only-binary",
    "no-binary": "--no-binary",
}
"""Options of pip that may have several values, and uv's names for them."""
_FLAGS = {"no-index": ("--no-index",), "no-cache-dir": ("--no-cache",), "pre": ("--prerelease", "allow")}
_VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""Options of pip that uv reads from an environment variable."""
_WITHOUT_EFFECT = frozenset(
    {
        "break-system-packages",
        "cache-dir",
        "config-file",
        "disable-pip-version-check",
        "exists-action",
        "log",
        "no-color",
        "no-input",
        "no-warn-script-location",
        "progress-bar",
        "quiet",
        "require-virtualenv",
        "retries",
        "root-user-action",
        "verbose",
    }
)
"""Options that do not change what is installed."""


def main(arguments: Sequence[str]) -> int:
    """Installs what the arguments of `pip install` name; returns the exit code."""
    if os.environ.get("INSTALLER", "") != "pip" and _uv_installs(arguments):
        return 0
    return subprocess.run([*PIP_INSTALL, *arguments], check=False).returncode


def _uv_installs(arguments: Sequence[str]) -> bool:
    """Whether uv installed them."""
    settings = pip_settings()
    if unknown := sorted(set(settings) - set(_OPTIONS) - set(_FLAGS) - set(_VARIABLES) - _WITHOUT_EFFECT):
        print(f"pip installs, and not uv, which has no setting like pip's {', '.join(unknown)}", flush=True)
        return False
    if not (uv := find_uv()):
        return False
    options, variables = uv_settings(settings)
    call = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--compile-bytecode", *options]
    done = subprocess.run(
        [*call, *arguments], env={**os.environ, **variables}, capture_output=True, check=False
    )
    return done.returncode == 0


def find_uv() -> str:
    """The path of uv, which pip installs beside this Python if there is none; empty if it can't."""
    own = Path(sys.executable).with_name("uv")
    if found := shutil.which("uv") or shutil.which(own):
        return found
    subprocess.run([*PIP_INSTALL, "--retries", "1", UV], capture_output=True, check=False)
    return shutil.which(own) or ""


def pip_settings() -> dict[str, str]:
    """What pip's files and environment variables set for `pip install`, by option."""
    call = [sys.executable, "-m", "pip", "config", "list"]
    printed = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in printed.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in found:
            found[section][option] = str(ast.literal_eval(value))
    return {**found["global"], **found["install"], **found[":env:"]}


def uv_settings(settings: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The same settings as options of uv and as environment variables.

    By default, pip takes the newest version of all indexes, and uv that of the first index with the package.
    """
    options = ["--index-strategy", "unsafe-best-match"]
    for name, value in settings.items():
        if name in _OPTIONS:
            options += [part for each in value.split() for part in (_OPTIONS[name], each)]
        elif name in _FLAGS and value.lower() in {"1", "true", "yes", "on"}:
            options += _FLAGS[name]
    variables = {_VARIABLES[name]: value for name, value in settings.items() if name in _VARIABLES}
    return options, {name: value for name, value in variables.items() if name not in os.environ}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
