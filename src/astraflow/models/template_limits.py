"""Renders chat templates, which come with models from anywhere, within a time limit.

A template runs in Jinja's sandbox, so it can't reach the machine. But it can loop for years, and raise
anything. Here, both end as an error that says so.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from astraflow.errors import DataError
from astraflow.user_input.own_code import error_text

__all__ = ["render_chat", "within_limit"]

_LONGEST_S = 10.0
"""CPU time for one conversation, which takes milliseconds. A busy or stopped machine takes nothing of it."""
_LOOK_S = 0.1
"""Time between two looks at the calls that run."""
_T = TypeVar("_T")


class _OverdueError(Exception):
    """The time is over."""


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any] = MappingProxyType({}),
    *,
    longest_s: float = _LONGEST_S,
) -> str:
    """Renders a conversation with the chat template of a tokenizer of transformers, and other arguments.

    Raises: DataError if the template raises an error, or takes too long.
    """
    render = partial(tokenizer.apply_chat_template, list(messages), tokenize=False, **arguments)
    return within_limit(render, longest_s)


def within_limit(render: Callable[[], str], longest_s: float = _LONGEST_S) -> str:
    """Calls a function that renders a template. Raises: DataError, as `render_chat` does."""
    try:
        return _watcher.call(render, longest_s)
    except _OverdueError as err:
        raise DataError(
            f"the chat template takes longer than {longest_s:g} s; does it have loops inside loops?"
        ) from err
    except Exception as err:  # a template may raise whatever Python can
        # Jinja's errors say by their class whether the template is invalid, or refuses the conversation.
        raise DataError(f"{type(err).__name__}: {error_text(err)}") from err


class _Watcher:
    """One thread that interrupts calls whose time is over. A thread per call would wait for its start, which
    takes milliseconds beside an engine that computes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, tuple[int, float]] = {}
        """The clock of each thread with a call, and when its time is over by that clock."""
        self._has_calls = threading.Event()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], _T], longest_s: float) -> _T:
        """Calls a function of pure Python. Raises: _OverdueError, in the function, once the time is over."""
        own = threading.get_ident()
        with self._lock:
            # Only Linux has a CPU clock for each thread.
            clock = time.pthread_getcpuclockid(own) if sys.platform == "linux" else time.CLOCK_MONOTONIC
            self._ends[own] = clock, time.clock_gettime(clock) + longest_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
            self._has_calls.set()  # here, because an interruption in it would leave the event locked
        try:
            return function()
        finally:
            # An interruption that comes now is raised at the call below at the latest, so none is left over.
            with self._lock:
                self._ends.pop(own, None)

    def _watch(self) -> None:
        while True:
            self._has_calls.wait()
            time.sleep(_LOOK_S)
            with self._lock:
                over = [own for own, (clock, end) in self._ends.items() if end < time.clock_gettime(clock)]
                for thread in over:
                    del self._ends[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(_OverdueError)
                    )
                if not self._ends:
                    self._has_calls.clear()


_watcher = _Watcher()


def _forget_watcher() -> None:
    """A fork has no other threads than the one that forked."""
    global _watcher
    _watcher = _Watcher()


os.register_at_fork(after_in_child=_forget_watcher)
