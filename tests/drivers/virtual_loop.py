"""An event loop whose time passes only when nothing is left to do, and then at once to the next timer."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run_virtual"]

_T = TypeVar("_T")


def run_virtual(main: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine; `asyncio.get_running_loop().time()` begins at 0 and is exact."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._selector_of_time = _Selector()
        super().__init__(self._selector_of_time)

    def time(self) -> float:
        return self._selector_of_time.now_s


class _Selector(selectors.DefaultSelector):
    """Instead of waiting for a timer, takes the time to it. Without any timer it waits for files as usual."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        self.now_s += max(0.0, timeout)
        return super().select(0)
