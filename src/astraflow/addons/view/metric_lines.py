"""The rows of `metrics.jsonl` for the page, straight from the file, so that curves wait for no index."""

from pathlib import Path

import msgspec

__all__ = ["metric_lines"]

_MAX_ROWS = 4000
"""Steps that one answer contains; of a longer run, only every nth step, because a screen can't show more."""
_MAX_LINE_BYTES = 1024 * 1024
"""A longer line is not a row."""


class _Row(msgspec.Struct, gc=False):
    """The columns that decide whether a row is sent."""

    kind: str
    step: int


_DECODER = msgspec.json.Decoder(_Row)


def metric_lines(path: Path, after: int) -> bytes:
    """Returns the rows after a position as a JSON array. A row's `id` is the position of its end in the file.

    Lines that are no rows are left out, like the last one while it is being written. If the file became
    shorter, nothing is returned. Raises: OSError, except for a missing file, which has no rows.
    """
    try:
        with path.open("rb") as file:
            file.seek(after)
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return b"[]"
    rows: list[tuple[_Row, int, bytes]] = []
    end = after
    for line in lines:
        end += len(line)
        if line.endswith(b"\n") and line.startswith(b"{") and (row := _row_of(line)) is not None:
            rows.append((row, end, line))
    num_steps = sum(row.kind == "step" for row, _, _ in rows)
    every = max(1, -(-num_steps // _MAX_ROWS))
    kept = [each for each in rows if each[0].kind != "step" or each[0].step % every == 0]
    return b"[" + b",".join(b'{"id":%d,' % end + line[1:].strip() for _, end, line in kept) + b"]"


def _row_of(line: bytes) -> _Row | None:
    if len(line) > _MAX_LINE_BYTES:
        return None
    try:
        return _DECODER.decode(line)
    except msgspec.MsgspecError:
        return None
