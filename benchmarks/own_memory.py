"""How much a process's own memory grows while it does something."""

import threading
from pathlib import Path

__all__ = ["OwnMemory"]


class OwnMemory:
    """The most by which this process's own memory, without mapped files, grows in a block.

    Example: `with OwnMemory() as memory: load()`, then `memory.growth` in bytes.
    """

    growth = 0

    def __enter__(self) -> "OwnMemory":
        self._before = self._now()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.growth = max(self.growth, self._now() - self._before)
            if self._is_over.wait(0.001):
                return

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))
