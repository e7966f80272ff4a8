"""A fork server that imports little, for tests of what does not depend on its imports."""

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from astraflow.cli.fork_server import serve
from astraflow.processes.fork_server import ChildProcess, start_server

__all__ = ["start_light_server"]

_IMPORTS_S = 0.5
"""Time that passes before it answers, as if it imported more."""


def start_light_server(env: Mapping[str, str]) -> tuple[socket.socket, ChildProcess]:
    """Starts it: an argument of `ForkServer`."""
    folders = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [env.get("PYTHONPATH")])])
    return start_server({**env, "PYTHONPATH": folders}, __name__)


if __name__ == "__main__":
    time.sleep(_IMPORTS_S)
    arguments = serve(socket.socket(fileno=int(sys.argv[1])), ("astraflow.cli.main",))
    from astraflow.cli.main import main

    main(arguments)
