"""Programs that attack the box that they run in, and the verdicts on them.

None of them may reach anything outside. `SECRET` in a program's text stands for the path of a file outside.
"""

import platform
from dataclasses import dataclass

from astraflow.addons.sandbox.verdict import Kind

__all__ = ["HOSTILE", "HostileProgram"]

X86 = platform.machine() == "x86_64"
CALLS = {
    "ptrace": 101,
    "shmget": 29,
    "mq_open": 240,
    "add_key": 248,
    "bpf": 321,
    "unshare": 272,
    "mount": 165,
}
"""Numbers on x86_64; aarch64 has others."""
if not X86:
    CALLS = {
        "ptrace": 117,
        "shmget": 194,
        "mq_open": 180,
        "add_key": 217,
        "bpf": 280,
        "unshare": 97,
        "mount": 40,
    }


@dataclass(frozen=True)
class HostileProgram:
    """A program, and what may become of it."""

    source: str
    kinds: tuple[Kind, ...]
    stdout: str | None = None
    """What it prints; None: anything."""
    error: str = ""
    """Part of what it prints to its standard error: it failed for the reason that was meant."""


def attack(source: str, *kinds: Kind, stdout: str | None = None, error: str = "") -> HostileProgram:
    return HostileProgram(source, kinds, stdout, error)


def call(name: str, *arguments: str) -> str:
    """A program that makes a system call and prints what it returns."""
    given = ", ".join((str(CALLS[name]), *arguments))
    return f"import ctypes\nprint(ctypes.CDLL(None).syscall({given}))"


FAILED = Kind.FAILED
MEMORY = Kind.MEMORY
OUTPUT = Kind.OUTPUT
PASSED = Kind.PASSED
REFUSED = Kind.REFUSED
TIMEOUT = Kind.TIMEOUT
CRASH = Kind.CRASH

HOSTILE: dict[str, HostileProgram] = {
    # --- too much of what it may have
    "prints a gigabyte": attack("while True: print('x' * 1_000_000)", OUTPUT),
    "complains a gigabyte": attack("import sys\nwhile True: sys.stderr.write('x' * 1_000_000)", OUTPUT),
    "sleeps": attack("import time\ntime.sleep(1000)", TIMEOUT),
    "never ends": attack("while True: pass", TIMEOUT),
    "ignores all signals": attack(
        "import signal\nfor n in range(1, 65):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
        TIMEOUT,
    ),
    "cannot be interrupted": attack("print(9 ** 9 ** 9)", TIMEOUT, MEMORY),
    "matches for ever": attack("import re\nre.match('(a|aa)+$', 'a' * 60 + 'b')", TIMEOUT),
    "hoards its input": attack("import sys\nwhile True: sys.stdin.read()", TIMEOUT),
    "closes everything and stays": attack("import os, time\nos.closerange(0, 99)\ntime.sleep(1000)", TIMEOUT),
    "fills the memory": attack("x = bytearray(10 ** 7)\nwhile True: x += bytes(x)", MEMORY),
    "fills the memory with objects": attack("x = []\nwhile True: x.append([0] * 10 ** 6)", MEMORY),
    "fills the memory in the background": attack(
        "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 24)); x[-1].write(b'x' * (1 << 24))",
        FAILED,
        MEMORY,
    ),
    "fills the memory in threads": attack(
        "from threading import Thread as T\n"
        "def fill():\n    x = []\n    while True: x.append(bytearray(10 ** 7))\n"
        "for _ in range(8): T(target=fill).start()",
        MEMORY,
    ),
    "fills the memory and forgives": attack(
        "x = []\nwhile True:\n    try: x.append(bytearray(10 ** 7))\n    except MemoryError: pass", MEMORY
    ),
    "fills the memory in a moment": attack("bytearray(600 << 20)\nprint(1)", MEMORY),
    "forks to fill the memory": attack(
        "import os\nwhile True:\n    os.fork()\n    x = bytearray(10 ** 8)", REFUSED
    ),
    "hides memory in a shared mapping": attack(
        "import mmap\nmmap.mmap(-1, 1 << 20)", FAILED, error="Operation not permitted"
    ),
    "hides much memory in a shared mapping": attack(
        "import mmap\nmmap.mmap(-1, (1 << 32) + 4096)", FAILED, error="Operation not permitted"
    ),
    "hides memory behind a device": attack(
        "import mmap, os\nmmap.mmap(os.open('/dev/zero', 0), 1 << 20, mmap.MAP_SHARED, mmap.PROT_READ)",
        FAILED,
        error="No such device",
    ),
    "looks for the machine's processes": attack(
        "import os\nfor fd in range(70_000):\n"
        "    try: print(os.open('self/statm', 0, dir_fd=fd))\n    except OSError: pass",
        PASSED,
        stdout="",
    ),
    "fills the disk": attack("f = open('f', 'wb')\nwhile True: f.write(b'x' * 1_000_000); f.flush()", OUTPUT),
    "fills the disk with many files": attack(
        "n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'w').close()", OUTPUT
    ),
    "makes a file that is not there": attack(
        "import os\nos.truncate(os.open('f', 66), 1 << 40)", FAILED, OUTPUT
    ),
    "keeps files in memory": attack("import os\nos.memfd_create('x')", FAILED, error="not implemented"),
    "leaks descriptors": attack(
        "x = []\nwhile True: x.append(open('/dev/null'))", FAILED, error="Too many open files"
    ),
    "starts threads": attack(
        "from threading import Thread as T\nimport time\n"
        "while True: T(target=time.sleep, args=(99,), daemon=True).start()",
        FAILED,
        error="start new thread",
    ),
    "raises its own limits": attack(
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
        FAILED,
        error="not allowed",
    ),
    # --- dying in strange ways
    "closes its output": attack("import os\nos.close(1)\nprint(1)", FAILED),
    "segfaults": attack("import ctypes\nctypes.string_at(0)", CRASH),
    "aborts": attack("import os\nos.abort()", CRASH),
    "calls itself": attack(
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()", CRASH, MEMORY, FAILED, TIMEOUT
    ),
    "nests without end": attack(f"x = {'(' * 5000}{')' * 5000}", FAILED, MEMORY),
    "is no text": attack("print('\ud800')\0", FAILED, error="null bytes"),
    "writes NaN": attack("print(float('nan'))", PASSED, stdout="nan\n"),
    "replaces what ends it": attack(
        "import sys, atexit, threading\nsys.excepthook = None\nthreading._shutdown = 1 / 2\nraise ValueError",
        FAILED,
    ),
    # --- processes
    "is a fork bomb": attack("import os\nwhile True: os.fork()", REFUSED),
    "leaves a daemon": attack(
        "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass", REFUSED
    ),
    "runs a shell": attack("import os\nos.execv('/bin/sh', ['sh', '-c', 'id'])", REFUSED),
    "runs an interpreter": attack("import subprocess, sys\nsubprocess.run([sys.executable, '-V'])", REFUSED),
    "signals its parent": attack(
        "import os\nfor pid in (0, os.getppid(), 1, 2): \n"
        "    try: os.kill(pid, 9)\n    except ProcessLookupError: pass\nprint('here')",
        PASSED,
        stdout="here\n",
    ),
    "signals everybody": attack("import os\nos.kill(-1, 9)", FAILED, error="ProcessLookupError"),
    "traces its parent": attack(call("ptrace", "16", "1", "0", "0"), REFUSED),
    "takes rights": attack("import os\nos.setuid(0)", REFUSED),
    # --- files outside
    "reads /proc/1/root": attack(
        "print(open('/proc/1/root/etc/passwd').read())", FAILED, stdout="", error="No such file"
    ),
    "reads through /proc/self": attack(
        "import os\nprint(os.listdir('/proc/self/cwd/..'))", FAILED, stdout="", error="No such file"
    ),
    "writes the memory of others": attack(
        "open('/proc/1/mem', 'wb').write(b'x')", FAILED, error="No such file"
    ),
    "reads a file outside": attack("print(open('SECRET').read())", FAILED, stdout="", error="No such file"),
    "links out of the box": attack(
        "import os\nos.symlink('SECRET', 'x')\nprint(open('x').read())",
        FAILED,
        stdout="",
        error="No such file",
    ),
    "climbs out of the box": attack(
        "import os\nos.chdir('/..')\nprint(os.path.exists('../../SECRET'), os.path.exists('/etc/passwd'), "
        "os.path.exists('/bin/sh'))",
        PASSED,
        stdout="False False False\n",
    ),
    "writes to the interpreter": attack(
        "import os\nopen(os.__file__, 'w').write('x')", FAILED, error="Read-only"
    ),
    "removes the interpreter": attack("import os\nos.unlink(os.__file__)", FAILED, error="Read-only"),
    "links to the interpreter": attack("import os\nos.link(os.__file__, 'x')", FAILED, error="cross-device"),
    "writes beside its folder": attack("open('/box/x', 'w').write('x')", FAILED, error="Read-only"),
    "removes its folder": attack(
        "import os\nos.unlink('main.py')\nos.rmdir('/tmp')", FAILED, error="Read-only"
    ),
    "makes a device": attack("import os\nos.mknod('x', 0o20666, os.makedev(1, 1))", REFUSED),
    "changes its root": attack("import os\nos.chroot('.')", REFUSED),
    "mounts": attack(call("mount", "b'x'", "b'/tmp'", "b'tmpfs'", "0", "0"), REFUSED),
    "finds descriptors": attack(
        "import os\nfound = []\nfor fd in range(3, 1000):\n    try: os.fstat(fd); found.append(fd)\n"
        "    except OSError: pass\nprint(found)",
        PASSED,
        stdout="[]\n",
    ),
    "speaks for the zygote": attack(
        "import sys, socket, gc\n"
        "found = [x for x in gc.get_objects() if isinstance(x, socket.socket)]\n"
        "frame = sys._getframe()\n"
        "while frame:\n"
        "    found += [x for x in frame.f_locals.values() if isinstance(x, socket.socket)]\n"
        "    frame = frame.f_back\n"
        "found[0].sendall(b'x')",
        FAILED,
        error="Bad file descriptor",
    ),
    "reads the environment": attack("import os\nprint(sorted(os.environ.items()))", PASSED),
    # --- the kernel
    "opens a socket": attack("import socket\nsocket.create_connection(('1.1.1.1', 80), 1)", REFUSED),
    "opens a local socket": attack("import socket\nsocket.socket(socket.AF_UNIX).connect('\\0x')", REFUSED),
    "keeps a key": attack(call("add_key", "b'user'", "b'a'", "b'b'", "1", "-4"), REFUSED),
    "loads a program into the kernel": attack(call("bpf", "5", "0", "0"), REFUSED),
    "enters namespaces": attack(call("unshare", "0x10020000"), REFUSED),
    "leaves shared memory": attack(call("shmget", "1", "4096", "0o1666"), PASSED, stdout="-1\n"),
    "leaves a message queue": attack(call("mq_open", "b'x'", "0o102", "0o666", "0"), PASSED, stdout="-1\n"),
    "types into a terminal": attack(
        "import fcntl\nfcntl.ioctl(0, 0x5412, b'x')", FAILED, error="Inappropriate ioctl"
    ),
    **(
        {
            # mov eax, 20 (getpid of 32-bit programs); int 0x80; ret
            "calls the kernel as a 32-bit program": attack(
                "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
                "m.write(bytes.fromhex('b814000000cd80c3'))\n"
                "address = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
                "print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())",
                REFUSED,
            )
        }
        if X86
        else {}
    ),
}
