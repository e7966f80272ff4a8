"""Measures the memory that a program uses, which is less than the address space that it reserves.

A box for programs has no /proc, so its zygote gets the machine's /proc as an open folder. Programs cannot
reach it: they close all descriptors that they inherit before any of their code runs. The zygote reads only
the ids and sizes of its programs, and any user may read these.
"""

import contextlib
import os
import resource

__all__ = ["RESERVED_BYTES", "Memory", "open_processes"]

RESERVED_BYTES = 4 << 30
"""Address space that a measured program may reserve in addition to the memory that it may use. Programs of
contests ask for stacks of up to 512 MiB for their threads. A program never uses more than both together, even
if it is faster than the measurements."""
_PAGE_BYTES = resource.getpagesize()


def open_processes() -> int:
    """Opens the machine's /proc, to be inherited by a zygote. Returns -1 if there is none."""
    try:
        fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return -1
    os.set_inheritable(fd, True)
    return fd


class Memory:
    """Measures programs that this process started. Example: `Memory(fd).used_bytes(pidfd)`."""

    def __init__(self, processes: int) -> None:
        """`processes`: what `open_processes` returned."""
        self._processes = processes
        self.is_measurable = False
        """Whether this machine lets a process read sizes."""
        if processes >= 0:
            os.set_inheritable(processes, False)
            own = os.pidfd_open(os.getpid())
            self.is_measurable = self.used_bytes(own) > 0
            os.close(own)

    def used_bytes(self, pidfd: int) -> int:
        """Returns the resident memory of a process; 0 if it has ended."""
        with contextlib.suppress(OSError, StopIteration, ValueError, IndexError):
            # The folder belongs to the machine, so these are ids of the machine's namespace.
            lines = self._read(f"self/fdinfo/{pidfd}").splitlines()
            pid = next(int(line.split()[1]) for line in lines if line.startswith(b"Pid:"))
            return int(self._read(f"{pid}/statm").split()[1]) * _PAGE_BYTES
        return 0

    def _read(self, path: str) -> bytes:
        fd = os.open(path, os.O_RDONLY, dir_fd=self._processes)
        try:
            return os.read(fd, 4096)
        finally:
            os.close(fd)
