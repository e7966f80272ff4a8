"""Finds where in the user's own code an exception was raised: file, line, function and source line. Also ends
forks that return from that code.

The author of a reward, a workflow or a sampler needs the line that failed. The surrounding frames of this
package, of the standard library and of installed packages only hide it.
"""

import linecache
import os
import sysconfig
from contextlib import ContextDecorator, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import cast

__all__ = [
    "describe_error",
    "ending_forks",
    "error_text",
    "find_own_line",
    "first_error",
    "is_own",
    "own_frames",
]

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARY = Path(sysconfig.get_paths()["stdlib"]).resolve()
_INSTALLED = ("site-packages", "dist-packages")
"""Folders into which packages are installed; the second one is Debian's."""
_COMPILED = frozenset({".pyx", ".pxd", ".pxi"})
"""Extensions of files that Cython names in the frames of a compiled module, and that are not installed. The
traceback of every exception in a service contains such frames, from uvloop."""
_MAX_TEXT = 1_000
"""Number of characters of an exception's text that are shown; enough for any message that a person wrote."""
_MAX_LINE = 160
"""Number of characters of a source line that are shown."""
_RETURNED = 70
"""Exit code of a fork that has returned from the user's code (`EX_SOFTWARE`)."""


class ending_forks(ContextDecorator):  # noqa: N801 - it's a class because a generator takes twice as long
    """Runs the user's code in a block. A process that this code forks, and that leaves the block, ends here.

    Otherwise, it would go on as a second copy of this process, on the same pipes and sockets, and answer each
    call a second time. Children of `subprocess` and `multiprocessing` don't return, so they aren't affected.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._pid:
            note = f"process {os.getpid()}, forked by process {self._pid}, returned from user code and was "
            with suppress(OSError):
                os.write(2, f"{note}ended; end a fork with os._exit, or use subprocess\n".encode())
            os._exit(_RETURNED)


@dataclass(frozen=True, slots=True)
class _Frame:
    """One call on the stack of an exception."""

    file: Path
    line: int
    function: str

    def __str__(self) -> str:
        source = _one_line(linecache.getline(str(self.file), self.line))
        place = f"{_short_path(self.file)}, line {self.line}"
        if self.function != "<module>":
            place += f", in {self.function}"
        return f"{place}: {source}" if source else place


def describe_error(error: BaseException) -> str:
    """Returns the exception's class, its text and the user's own line.

    Example: `KeyError: 'score' (my_rewards.py, line 12, in judge: return reply["score"])`.
    """
    error = first_error(error)
    text = error_text(error)
    name = type(error).__name__
    place = find_own_line(error)
    return f"{name}{f': {text}' if text else ''}{f' ({place})' if place else ''}"


def error_text(error: BaseException) -> str:
    """Returns the text of an exception, truncated; empty if it has none. Never raises, whatever `__str__`
    does."""
    error = first_error(error)
    try:
        # The text of a SyntaxError repeats the file and the line, which `find_own_line` reports.
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception:  # noqa: BLE001 - code of the user's
        return "its __str__ fails, too"
    # Here, because environment hosts import this file in a Python that has the standard library alone.
    from astraflow.types.bounds import as_text

    text = as_text(text)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def find_own_line(error: BaseException) -> str:
    """Returns the user's own line: the innermost one outside this package, the standard library and installed
    packages.

    If there is none, returns the innermost line in the installed package that was called first. If there is
    none either, returns an empty text.
    """
    error = first_error(error)
    if isinstance(error, SyntaxError) and error.filename is not None:
        place = f"{_short_path(Path(error.filename))}, line {error.lineno or 0}"
        source = _one_line(error.text or "")
        return f"{place}: {source}" if source else place
    outside = [frame for frame in _frames(error.__traceback__) if _is_outside(frame.file)]
    own = [frame for frame in outside if is_own(frame.file)]
    if not own and outside:
        # The user's code may be an installed package: the one that was called first.
        own = [frame for frame in outside if _package_of(frame.file) == _package_of(outside[0].file)]
    return str(own[-1]) if own else ""


def own_frames(error: BaseException) -> list[str]:
    """Returns the calls in the user's own code that led to the exception, outermost first.

    Calls in installed packages are left out, because these may be libraries that AstraFlow uses.
    """
    return [str(frame) for frame in _frames(first_error(error).__traceback__) if is_own(frame.file)]


def first_error(error: BaseException) -> BaseException:
    """Returns the exception, or the first one in nested groups: a TaskGroup's group adds no information."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


def _frames(trace: TracebackType | None) -> list[_Frame]:
    frames: list[_Frame] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(_Frame(Path(code.co_filename), trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return frames


def is_own(file: Path) -> bool:
    """Returns whether a file belongs neither to an installed package, nor to Python, nor to AstraFlow."""
    return _is_outside(file) and not _package_of(file)


def _is_outside(file: Path) -> bool:
    """Returns whether a file belongs neither to this package nor to Python itself."""
    if str(file).startswith("<"):  # frozen modules, and code that was compiled from a string
        return False
    if file.suffix in _COMPILED:
        return False
    is_library = file.is_relative_to(_LIBRARY) and not _package_of(file)
    return not is_library and not file.is_relative_to(_PACKAGE)


def _package_of(file: Path) -> str:
    """Returns the folder or file of the installed package that a file belongs to; empty for other files."""
    parts = file.parts
    places = [idx for idx, part in enumerate(parts[:-1]) if part in _INSTALLED]
    return "/".join(parts[: places[-1] + 2]) if places else ""


def _short_path(file: Path) -> str:
    """Returns the path, relative to the current folder if the file is below it; editors can open it."""
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def _one_line(source: str) -> str:
    """Returns a source line for messages: without indentation and hidden characters, and truncated."""
    line = "".join(char if char.isprintable() else " " for char in source.strip())
    return line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE - 3]}..."
