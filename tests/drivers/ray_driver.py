"""A Ray cluster of several nodes on this machine, and runs on it, with the Ray of the tests' own environment.

Each node has an address of its own, and its processes can be killed together, as if the machine had lost
power. The cluster has a token and a home of its own: Ray would otherwise use, and write, that of the user's
other clusters.
"""

import contextlib
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from drivers.system_driver import Place, environment, free_ports

BIN = Path(sys.executable).parent
_LONGEST_START_S = 120.0
_AGENTS = ("metrics-export", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent")
_NODE_MEMORY = ("--object-store-memory", "100000000")


class RayCluster:
    """The first node has no CPUs to give away, so that services run on the others."""

    def __init__(self) -> None:
        # Ray's sockets lie here, and the system allows their paths about 100 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        token = self._folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.env = {
            **environment(),
            "HOME": str(self._folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_TMPDIR": str(self._folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            # By default, workers run at niceness 15. Beside other work, they would take minutes to start.
            "RAY_worker_niceness": "0",
        }
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.address = ""

    def __enter__(self) -> "RayCluster":
        try:
            text = self._start("--head", "--num-cpus", "0", "--include-dashboard=false", "--port", "0")
        except BaseException:
            self.close()
            raise
        found = re.search(r"--address='([^']+)'", text)
        assert found, text
        self.address = found[1]
        return self

    def __exit__(self, *of_error: object) -> None:
        self.close()

    def add_node(self) -> str:
        """Starts a node with room for one service; returns its address."""
        address = f"127.0.0.{len(self._nodes) + 1}"
        self._start("--address", self.address, "--node-ip-address", address, "--num-cpus", "1")
        return address

    def kill_node(self, address: str) -> None:
        """Kills everything that runs on a node, at once."""
        first = self._nodes[int(address.rpartition(".")[2]) - 1]
        victims = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        first.wait()

    def left_over(self) -> list[str]:
        """Command lines of the processes that still have this cluster's environment."""
        marker = str(self._folder)
        found: list[str] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RAY_TMPDIR") == marker:
                    found.append(" ".join(process.cmdline()))
        return found

    @property
    def place(self) -> Place:
        """Where runs start."""
        return Place((str(BIN / "astraflow"),), self.env)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `astraflow run`, after all overrides."""
        return (f"launcher.address={self.address}", "--on", "ray")

    def close(self) -> None:
        for node in reversed(self._nodes):
            if node.poll() is None:
                self.kill_node(f"127.0.0.{self._nodes.index(node) + 1}")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, *arguments: str) -> str:
        """Starts a node and returns what it has printed once it is ready."""
        log = self._folder / f"node-{len(self._nodes) + 1}.log"
        # A raylet waits 30 s for agents that choose their ports themselves; a busy machine takes longer.
        agents = [
            f"--{name}-port={port}" for name, port in zip(_AGENTS, free_ports(len(_AGENTS)), strict=True)
        ]
        workers = ("--min-worker-port", "0", "--max-worker-port", "0", *agents)
        with log.open("wb") as out:
            node = subprocess.Popen(
                [str(BIN / "ray"), "start", "--block", *_NODE_MEMORY, *workers, *arguments],
                env=self.env,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._nodes.append(node)
        deadline = time.monotonic() + _LONGEST_START_S
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        return log.read_text()
