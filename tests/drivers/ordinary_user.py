"""What root needs to try something as an ordinary user."""

import subprocess
import sys
from collections.abc import Iterator

__all__ = ["NOBODY", "usable_pythons"]

NOBODY = {"user": 65534, "group": 65534, "extra_groups": []}
"""Arguments of `subprocess.run`, with which a process belongs to nobody."""


def usable_pythons(becomes: dict[str, object]) -> Iterator[str]:
    """Interpreters of this version which the user may start."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in (sys.executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        try:
            done = subprocess.run(
                [python, "-c", ask],
                capture_output=True,
                text=True,
                cwd="/",
                check=True,
                **becomes,  # type: ignore[call-overload]
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        if done.stdout.strip() == version:
            yield python
