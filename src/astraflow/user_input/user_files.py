"""Reads files that a user names, within limits; a wrong file is an error that names the file and the line.

A path may lead to a folder, a pipe, a device, or a file of any size and content. This module never waits for
a pipe, never reads more than its limit, and never recurses as deeply as a file demands.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, cast

from astraflow.errors import DataError

__all__ = [
    "check_regular",
    "format_path",
    "is_there",
    "json_object",
    "json_value",
    "line_at",
    "read_file",
    "read_part",
    "read_token",
]

_MAX_BYTES = 64 * 2**20
"""Size limit of files that are read as a whole, such as a model's settings; tokenizers have about 20 MiB."""
_MAX_TOKEN_BYTES = 16 * 2**10
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_there(path: Path) -> bool:
    """Returns whether something exists at a path. Nothing exists at an invalid path: one that is too long or
    contains a null byte."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def check_regular(path: Path, what: str) -> None:
    """Checks that a path leads to a file that can be read without blocking. Raises: DataError."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as err:  # ValueError: a null byte in the path
        raise DataError(f"{what} {format_path(path)} cannot be read: {_reason(err)}") from err
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "")
    if kind:
        raise DataError(f"{what} {format_path(path)} is {kind}; expected a file")


def read_file(path: Path, what: str, *, max_bytes: int = _MAX_BYTES) -> bytes:
    """Reads a whole file. Raises: DataError if it isn't a regular file, can't be read, or is too large."""
    check_regular(path, what)
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as err:
        raise DataError(f"{what} {format_path(path)} cannot be read: {_reason(err)}") from err
    if len(content) > max_bytes:
        raise DataError(f"{what} {format_path(path)} has more than {max_bytes} bytes, which is the limit")
    return content


def read_part(path: Path, what: str, start: int = 0, *, max_bytes: int = _MAX_BYTES) -> bytes:
    """Reads a part of a file that may be growing; empty if the file is missing. Raises: DataError."""
    if not os.path.lexists(path):
        return b""
    check_regular(path, what)
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(max_bytes)
    except OSError as err:
        raise DataError(f"{what} {format_path(path)} cannot be read: {_reason(err)}") from err


def read_token(path: Path | None, what: str = "--token-file") -> str:
    """Reads the token in a file; empty without a path. Raises: DataError if the file doesn't hold a token."""
    if path is None:
        return ""
    content = read_file(path, what, max_bytes=_MAX_TOKEN_BYTES)
    token = content.decode("utf-8", "surrogateescape").strip()
    if not token.isprintable():
        raise DataError(f"{what} {format_path(path)} must hold one line of printable UTF-8")
    return token


def format_path(path: Path) -> str:
    """Returns a path for a message. A very long path is truncated, and hidden characters are written out."""
    text = str(path)
    text = os.fsencode(text).decode("utf-8", "backslashreplace")  # names of files may be any bytes
    return text if text.isprintable() and len(text) <= 300 else repr(text)[:300]


def _reason(err: OSError | ValueError) -> str:
    return (err.strerror if isinstance(err, OSError) else None) or str(err)


def json_value(content: str | bytes, where: str) -> Any:
    """Parses a JSON text. Raises: DataError that begins with `where` and names the line."""
    try:
        return json.loads(content)
    except json.JSONDecodeError as err:
        raise DataError(f"{where}, line {err.lineno} is not valid JSON: {err.msg}") from err
    except UnicodeDecodeError as err:
        raise DataError(f"{where}, line {line_at(err)} is not UTF-8: {err.reason}") from err
    except RecursionError as err:
        raise DataError(f"{where} is not usable: its JSON is nested too deeply") from err
    except ValueError as err:  # a number with thousands of digits
        raise DataError(f"{where} is not usable: {err}") from err


def json_object(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file; empty if there is no file. Raises: DataError."""
    if not path.exists():
        return {}
    content: object = json_value(read_file(path, "the file"), str(path))
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object")
    return cast("dict[str, Any]", content)


def line_at(err: UnicodeDecodeError) -> int:
    """Returns the line of a text at which its bytes stop being UTF-8."""
    return err.object[: err.start].count(b"\n") + 1
