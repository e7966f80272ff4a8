"""Renders chat templates, which come with models from anywhere, within a time limit.

A template runs in Jinja's sandbox, so it can't reach the machine. But it can loop for years, and raise
anything. Here, both end as an error that says so.
"""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, cast

from astraflow.errors import DataError
from astraflow.user_input.own_code import error_text

__all__ = ["render_chat"]

_LONGEST_S = 10.0
"""Time for one conversation. Templates take milliseconds; on a busy machine, some take seconds."""
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

    def render() -> object:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)

    try:
        return cast("str", _call(render, longest_s))
    except _OverdueError as err:
        raise DataError(
            f"the chat template takes longer than {longest_s:g} s; does it have loops inside loops?"
        ) from err
    except Exception as err:  # a template may raise whatever Python can
        # Jinja's errors say by their class whether the template is invalid, or refuses the conversation.
        raise DataError(f"{type(err).__name__}: {error_text(err)}") from err


def _call(function: Callable[[], _T], longest_s: float) -> _T:
    """Calls a function of pure Python. Raises: _OverdueError, in the function, once the time is over."""
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    is_done = False

    def interrupt() -> None:
        with lock:
            if not is_done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_OverdueError))

    timer = threading.Timer(longest_s, interrupt)
    timer.daemon = True
    timer.start()
    try:
        return function()
    finally:
        # An interruption that comes now is raised at the call below at the latest, so none is left over.
        with lock:
            is_done = True
        timer.cancel()
