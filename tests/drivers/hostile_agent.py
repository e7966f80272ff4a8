"""An agent program that attacks its box in the sandbox, and what it finds if the box holds.

`AGENT` is a program for `python -c`. Its argument is `Outside.argument`, which is no path: files that a
command names are visible.
"""

import contextlib
import json
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["AGENT", "DISK_BYTES", "FOUND", "Outside", "of_marker", "outside"]

DISK_BYTES = 4 << 20
"""The disk that its box must have."""

AGENT = r"""
import ctypes, json, os, signal, socket, subprocess, sys, urllib.request
secret, path_socket, abstract_socket, port, marker = json.loads(sys.argv[1])
found = {}

def tried(name, act):
    try:
        found[name] = repr(act())
    except (OSError, subprocess.SubprocessError):
        found[name] = ""

def connected(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as end:
        end.settimeout(5)
        end.connect(address)
        return "connected"

def called(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)
    return "done"

def beside(path):
    # An interpreter that is in the home folder has to be there, and nothing else.
    folder = os.path.dirname(path)
    names = [name for name in os.listdir(folder) if not sys.base_prefix.startswith(f"{folder}/{name}")]
    if not names:
        raise OSError("nothing")
    return names

def filled():
    for number in range(4):
        with open(f"/tmp/full{number}", "wb") as file:
            file.write(bytes(DISK_BYTES // 2))

def status(*names):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return [int(lines[name], 16) for name in names]

others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (1, os.getpid())]
found["other processes"] = others
for file in ("environ", "mem", "maps"):
    tried(f"{file} of the first process", lambda: open(f"/proc/1/{file}", "rb").read(1))
for file in ("root/etc/hostname", "cwd", "fd"):
    tried(f"{file} of the first process", lambda: os.listdir(f"/proc/1/{file}"))
os.kill(1, signal.SIGKILL)
tried("a file outside", lambda: open(secret).read())
tried("its folder", lambda: beside(secret))
for path in ("/run", "/var", "/etc/passwd", "/etc/shadow", "/sys", "/dev/mem"):
    tried(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path).read(1))
for folder in ("", "/usr", sys.prefix, "/dev", "/box", "/etc"):
    tried(f"writing to {folder}/", lambda: open(f"{folder}/spy", "w"))
tried("a kernel setting", lambda: open("/proc/sys/kernel/core_pattern", "a"))
tried("a path socket", lambda: connected(socket.AF_UNIX, path_socket))
tried("an abstract socket", lambda: connected(socket.AF_UNIX, "\0" + abstract_socket))
tried("a port of the machine", lambda: connected(socket.AF_INET, ("127.0.0.1", port)))
tried("the network", lambda: connected(socket.AF_INET, ("192.0.2.1", 80)))
tried("IPv6", lambda: connected(socket.AF_INET6, ("2001:db8::1", 80)))
tried("datagrams", lambda: connected(socket.AF_INET, ("192.0.2.1", 53), socket.SOCK_DGRAM))
tried("raw packets", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
tried("the kernel's network", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
tried("a new user namespace", lambda: called("unshare", 0x10000000))
tried("a mount", lambda: called("mount", b"none", b"/tmp", b"tmpfs", 0, None))
tried("an unmount", lambda: called("umount2", b"/proc", 2))
tried("tracing", lambda: called("ptrace", 16, 1, 0, 0))
tried("a full disk", filled)
tried("locked memory", lambda: called("mlockall", 1))
found["networks"] = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
found["sockets of others"] = len(open("/proc/net/unix").readlines()) - 1
found["capabilities"] = status("CapEff", "CapPrm")
found["no new rights, filter"] = status("NoNewPrivs", "Seccomp")
found["open files"] = [fd for fd in range(3, 100) if os.path.exists(f"/proc/self/fd/{fd}")]
found["root of the box"] = sorted(set(os.listdir("/")) & {"home", "run", "var", "sys", "mnt", "media", "srv"})
for number in range(4):
    if os.path.exists(f"/tmp/full{number}"):
        os.unlink(f"/tmp/full{number}")
with open("/tmp/mine", "w") as file:
    file.write("#!/bin/sh\necho shells run\n")
os.chmod("/tmp/mine", 0o700)
found["its own script"] = subprocess.run(["/tmp/mine"], capture_output=True, text=True).stdout
asked = {"model": os.environ["ASTRAFLOW_MODEL"], "messages": [{"role": "user", "content": "2+3"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(asked).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
found["the gateway"] = urllib.request.urlopen(request).status
found["home and temporary folder"] = [os.environ["HOME"], os.environ["TMPDIR"]]
daemon = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
subprocess.Popen([sys.executable, "-I", "-S", "-c", daemon, marker], start_new_session=True)
orphan = f"import os\nif os.fork(): os._exit(0)\nos.setsid()\n{daemon}"
subprocess.run([sys.executable, "-I", "-S", "-c", orphan, marker])
print(json.dumps(found))
""".replace("DISK_BYTES", str(DISK_BYTES))

FOUND: dict[str, object] = {
    "other processes": [],
    "networks": ["lo"],
    "sockets of others": 0,
    "capabilities": [0, 0],
    "no new rights, filter": [1, 2],
    "open files": [],
    "root of the box": [],
    "its own script": "shells run\n",
    "the gateway": 200,
    "home and temporary folder": ["/tmp", "/tmp"],
}
"""What it finds; everything else that it tries fails."""


@dataclass(frozen=True)
class Outside:
    """What is outside of the box."""

    argument: str
    """As JSON: a secret file, the path of a Unix socket and the name of an abstract one on which somebody
    listens, a port of the machine, and the marker."""
    marker: str
    """The last argument of the processes that the program leaves behind."""


@contextlib.contextmanager
def outside(secret: Path, folder: Path) -> Iterator[Outside]:
    """Somebody who listens outside of the box. `folder`: for a socket."""
    name = f"astraflow-test-{secrets.token_hex(8)}"
    path = folder / "socket"
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        abstract.bind("\0" + name)
        abstract.listen()
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o777)
        told = [str(secret), str(path), name, port.getsockname()[1], name]
        yield Outside(json.dumps(told), name)


def of_marker(marker: str) -> list[str]:
    """Processes of this machine that carry a marker as their last argument."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().rstrip(b"\0").split(b"\0")[-1] == marker.encode():
                found.append(path.parent.name)
    return found
