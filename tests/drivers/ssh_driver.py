"""Hosts that ssh reaches, on this machine: each is a network namespace with an sshd.

    head   where the launcher runs; its bridge joins the hosts' cables
    host-N an sshd; what the tests write is hidden from it

A host can be killed as if it had lost power: its cable is cut first, so that nobody is told. Needs root, and
Debian's openssh-server and iproute2.
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

from drivers.system_driver import Place

SSHD = "/usr/sbin/sshd"
_NETWORK = "10.231.0"
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
        self._prefix = f"astraflow-{os.getpid()}"
        self._sshds: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses = [f"{_NETWORK}.{idx + 10}" for idx in range(count)]
        for name in ("host_key", "user_key"):
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / name))
        host_key = (self._folder / "host_key.pub").read_text()
        known = "".join(f"{address} {host_key}" for address in self.addresses)
        (self._folder / "known_hosts").write_text(known)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd asks for it
        self._make_head()
        for address in self.addresses:
            self._make_host(address)
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
        return Place(("ip", "netns", "exec", self._namespace("head"), *here.command), here.env)

    def start(self, address: str) -> None:
        """Switches a host on."""
        name = self._namespace(address)
        hide = f"mount --make-rprivate / && mount -t tmpfs none {self._hidden}"
        config = self._sshd_config(address)
        self._cable(address, "up")
        with (self._folder / f"sshd-{address}.log").open("wb") as log:
            self._sshds[address] = subprocess.Popen(
                ["ip", "netns", "exec", name, "sh", "-c", f"{hide} && exec {SSHD} -D -e -f {config}"],
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _LONGEST_START_S
        command = ["ip", "netns", "exec", self._namespace("head"), "ssh", *self.options, address, "true"]
        while subprocess.run(command, capture_output=True, check=False).returncode != 0:
            assert time.monotonic() < deadline, (self._folder / f"sshd-{address}.log").read_text()
            time.sleep(0.2)

    def cut_power(self, address: str) -> None:
        """Ends everything on a host at once, and says so to nobody."""
        self._cable(address, "down")
        for pid in self._pids(address):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._sshds.pop(address).wait()

    def cut_cable(self, address: str, for_s: float) -> None:
        """Cuts a host off for a while."""
        self._cable(address, "down")
        time.sleep(for_s)
        self._cable(address, "up")

    def pids(self) -> list[int]:
        """The processes on all hosts."""
        return [pid for address in self._sshds for pid in self._pids(address)]

    def left_over(self) -> list[str]:
        """Command lines of what runs on the hosts besides sshd."""
        found: list[str] = []
        for address in self._sshds:
            for pid in self._pids(address):
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if not process.name().startswith("sshd"):
                        found.append(" ".join(process.cmdline()))
        return found

    def close(self) -> None:
        for address in list(self._sshds):
            self.cut_power(address)
        for name in ("head", *self.addresses):
            subprocess.run(["ip", "netns", "del", self._namespace(name)], check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

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
        cable = self._cable_name(address)
        pair = ("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", host)
        _call("ip", "-n", head, *pair)
        _call("ip", "-n", head, "link", "set", cable, "master", "bridge")
        _call("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
        _call("ip", "-n", host, "link", "set", "eth0", "up")

    def _cable(self, address: str, state: str) -> None:
        _call("ip", "-n", self._namespace("head"), "link", "set", self._cable_name(address), state)

    def _cable_name(self, address: str) -> str:
        return f"host{address.rpartition('.')[2]}"

    def _pids(self, address: str) -> list[int]:
        listed = _call("ip", "netns", "pids", self._namespace(address))
        return [int(text) for text in listed.split()]

    def _sshd_config(self, address: str) -> Path:
        path = self._folder / f"sshd-{address}.conf"
        path.write_text(
            f"ListenAddress {address}\n"
            f"HostKey {self._folder / 'host_key'}\n"
            f"AuthorizedKeysFile {self._folder / 'user_key.pub'}\n"
            "PermitRootLogin prohibit-password\nStrictModes no\nUsePAM no\nPidFile none\n"
        )
        return path


def _call(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
    return done.stdout
