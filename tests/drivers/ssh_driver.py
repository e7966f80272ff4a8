"""Hosts that ssh reaches, on this machine: each is a network namespace with an sshd.

The launcher runs on the head. What the tests write is hidden from the hosts. A host can be killed as if it
had lost power: its cable is cut first, so that nobody is told. Needs root, and Debian's openssh-server and
iproute2.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from drivers.host_network import HostNetwork
from drivers.system_driver import Place

SSHD = "/usr/sbin/sshd"
_LONGEST_START_S = 30.0


def missing_for_ssh() -> str:
    """What this machine lacks for such hosts; empty if it has everything."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [program for program in (SSHD, "ip", "ssh", "ssh-keygen") if shutil.which(program) is None]
    return f"needs {', '.join(lacking)} (apt-get install openssh-server iproute2)" if lacking else ""


class SshHosts:
    """A head and some hosts; `hidden` is the folder that hosts do not see."""

    def __init__(self, count: int, *, hidden: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="astraflow-ssh-"))
        self._hidden = hidden
        self._sshds: dict[str, subprocess.Popen[bytes]] = {}
        self._network = HostNetwork(count, name="ssh")
        self.addresses = self._network.addresses
        for name in ("host_key", "user_key"):
            key = str(self._folder / name)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        host_key = (self._folder / "host_key.pub").read_text()
        known = "".join(f"{address} {host_key}" for address in self.addresses)
        (self._folder / "known_hosts").write_text(known)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd asks for it
        for address in self.addresses:
            self.start(address)

    @property
    def options(self) -> list[str]:
        """Arguments of `ssh` that reach the hosts, and nothing of the user's own."""
        key, known = self._folder / "user_key", self._folder / "known_hosts"
        return ["-F", "/dev/null", "-i", str(key), "-o", f"UserKnownHostsFile={known}"]

    def launcher(self, *hosts: str, **settings: object) -> dict[str, object]:
        """The section `launcher` of a recipe."""
        return {
            "name": "ssh",
            "hosts": list(hosts or self.addresses),
            "python": sys.executable,
            "options": self.options,
            **settings,
        }

    @property
    def head(self) -> Place:
        """Where runs start."""
        here = Place()
        return Place(tuple(self._network.on_head(*here.command)), here.env)

    def start(self, address: str) -> None:
        """Switches a host on."""
        script = f"mount -t tmpfs none {self._hidden} && exec {SSHD} -D -e -f {self._sshd_config(address)}"
        self._network.set_cable(address, "up")
        with (self._folder / f"sshd-{address}.log").open("wb") as log:
            self._sshds[address] = subprocess.Popen(
                self._network.on_host(address, "unshare", "--mount", "sh", "-c", script),
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _LONGEST_START_S
        command = self._network.on_head("ssh", *self.options, address, "true")
        while subprocess.run(command, capture_output=True, check=False).returncode != 0:
            assert time.monotonic() < deadline, (self._folder / f"sshd-{address}.log").read_text()
            time.sleep(0.2)

    def cut_power(self, address: str) -> None:
        """Ends everything on a host at once, and says so to nobody."""
        self._network.set_cable(address, "down")
        for pid in self._network.pids(address):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._sshds.pop(address).wait()

    def cut_cable(self, address: str, for_s: float) -> None:
        """Cuts a host off for a while."""
        self._network.cut_cable(address, for_s)

    def pids(self) -> list[int]:
        """The processes on all hosts."""
        return [pid for address in self._sshds for pid in self._network.pids(address)]

    def left_over(self) -> list[str]:
        """Command lines of what runs on the hosts besides sshd."""
        found: list[str] = []
        for address in self._sshds:
            for pid in self._network.pids(address):
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if not process.name().startswith("sshd"):
                        found.append(" ".join(process.cmdline()))
        return found

    def close(self) -> None:
        for address in list(self._sshds):
            self.cut_power(address)
        self._network.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _sshd_config(self, address: str) -> Path:
        path = self._folder / f"sshd-{address}.conf"
        path.write_text(
            f"ListenAddress {address}\n"
            f"HostKey {self._folder / 'host_key'}\n"
            f"AuthorizedKeysFile {self._folder / 'user_key.pub'}\n"
            "PermitRootLogin prohibit-password\nStrictModes no\nUsePAM no\nPidFile none\n"
        )
        return path
