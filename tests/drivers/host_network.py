"""Hosts on this machine, each a network namespace: their cables can be cut.

head     10.231.0.1; its bridge joins the hosts' cables
hosts    10.231.0.10, 10.231.0.11, ...
"""

import os
import subprocess
import time
from collections.abc import Sequence

_NETWORK = "10.231.0"


class HostNetwork:
    """A head and some hosts. Needs root and iproute2."""

    head_address = f"{_NETWORK}.1"

    def __init__(self, count: int, *, name: str) -> None:
        """`name`: a short one that no other network of this process has."""
        self._prefix = f"{name}-{os.getpid()}"
        self.addresses = [f"{_NETWORK}.{idx + 10}" for idx in range(count)]
        self._make_head()
        for address in self.addresses:
            self._make_host(address)
            self.set_cable(address, "up")

    def on_head(self, *command: str) -> list[str]:
        """The command, to be run on the head."""
        return self._within("head", command)

    def on_host(self, address: str, *command: str) -> list[str]:
        """The command, to be run on a host."""
        return self._within(address, command)

    def set_cable(self, address: str, state: str) -> None:
        """`state`: up or down."""
        _call("ip", "-n", self._namespace("head"), "link", "set", _cable_name(address), state)

    def cut_cable(self, address: str, for_s: float) -> None:
        """Cuts a host off for a while."""
        self.set_cable(address, "down")
        time.sleep(for_s)
        self.set_cable(address, "up")

    def pids(self, address: str) -> list[int]:
        """The processes on a host."""
        return [int(text) for text in _call("ip", "netns", "pids", self._namespace(address)).split()]

    def close(self) -> None:
        for name in ("head", *self.addresses):
            subprocess.run(["ip", "netns", "del", self._namespace(name)], check=False)

    def _within(self, name: str, command: Sequence[str]) -> list[str]:
        # `ip netns exec` would hide the machine's control groups, which slurmd needs.
        return ["nsenter", f"--net=/run/netns/{self._namespace(name)}", *command]

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name.rpartition('.')[2]}"

    def _make_head(self) -> None:
        head = self._namespace("head")
        _call("ip", "netns", "add", head)
        _call("ip", "-n", head, "link", "set", "lo", "up")
        _call("ip", "-n", head, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", head, "addr", "add", f"{_NETWORK}.1/24", "dev", "bridge")
        _call("ip", "-n", head, "link", "set", "bridge", "up")

    def _make_host(self, address: str) -> None:
        head, host = self._namespace("head"), self._namespace(address)
        _call("ip", "netns", "add", host)
        _call("ip", "-n", host, "link", "set", "lo", "up")
        cable = _cable_name(address)
        pair = ("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", host)
        _call("ip", "-n", head, *pair)
        _call("ip", "-n", head, "link", "set", cable, "master", "bridge")
        _call("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
        _call("ip", "-n", host, "link", "set", "eth0", "up")


def _cable_name(address: str) -> str:
    return f"host{address.rpartition('.')[2]}"


def _call(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
    return done.stdout
