"""The rows of `metrics.jsonl` for the page, straight from the file, so that curves wait for no index."""

from pathlib import Path

import msgspec

from astraflow.user_input.user_files import read_part

__all__ = ["metric_lines"]

_MAX_ROWS = 4000
"""Steps that one answer contains at most; a screen can't show more. Of a longer run, each stretch of steps is
represented by its first row and by the rows with its largest `_SPIKES`."""
_SPIKES = ("grad_norm", "behavior_gap_max", "loss")
"""Metrics whose single large values are news."""
_MAX_LINE_BYTES = 1024 * 1024
"""A longer line is not a row."""


class _Row(msgspec.Struct, gc=False):
    """The columns that decide whether a row is sent."""

    kind: str
    step: int
    policy: str = ""
    grad_norm: float | None = None
    behavior_gap_max: float | None = None
    loss: float | None = None


_DECODER = msgspec.json.Decoder(_Row)


def metric_lines(path: Path, after: int) -> bytes:
    """Returns the rows after a position as a JSON array. A row's `id` is the position of its end in the file.

    Lines that are no rows are left out, like the last one while it is being written. If the file became
    shorter, nothing is returned. Raises: DataError, except for a missing file, which has no rows.
    """
    lines = read_part(path, "metrics", after).splitlines(keepends=True)
    rows: list[tuple[_Row, int, bytes]] = []
    end = after
    for line in lines:
        end += len(line)
        if line.endswith(b"\n") and line.startswith(b"{") and (row := _row_of(line)) is not None:
            rows.append((row, end, line))
    return b"[" + b",".join(b'{"id":%d,' % end + line[1:].strip() for _, end, line in _thinned(rows)) + b"]"


def _thinned(rows: list[tuple[_Row, int, bytes]]) -> list[tuple[_Row, int, bytes]]:
    """Returns all rows or, of too many steps, those that represent their stretch. Evaluations all stay."""
    num_steps = sum(row.kind == "step" for row, _, _ in rows)
    if num_steps <= _MAX_ROWS:
        return rows
    length = -(-num_steps * (1 + len(_SPIKES)) // _MAX_ROWS)
    stretches: dict[tuple[str, int], list[int]] = {}
    for idx, (row, _, _) in enumerate(rows):
        if row.kind == "step":
            stretches.setdefault((row.policy, row.step // length), []).append(idx)
    chosen = {idx for idx, (row, _, _) in enumerate(rows) if row.kind != "step"}
    for members in stretches.values():
        chosen.add(members[0])
        chosen |= {
            max(members, key=lambda idx, name=name: abs(getattr(rows[idx][0], name) or 0.0))
            for name in _SPIKES
        }
    chosen.add(len(rows) - 1)  # what the page shows as the newest value
    return [rows[idx] for idx in sorted(chosen)]


def _row_of(line: bytes) -> _Row | None:
    if len(line) > _MAX_LINE_BYTES:
        return None
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        return None
