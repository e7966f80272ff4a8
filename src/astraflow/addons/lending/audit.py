"""What `astraflow audit` says about lent devices: each second of a session should have exactly one use.

The record of the uses is for people. If it is damaged, the audit warns, and the run's accounting still holds.
"""

from collections.abc import Sequence
from pathlib import Path

from astraflow.addons.lending.uses import find_problems, read_uses, seconds_by_use
from astraflow.errors import DataError

__all__ = ["audit_lending"]


def audit_lending(run_dir: Path) -> tuple[Sequence[str], Sequence[str]]:
    """Returns a line per device with its seconds by use, and warnings; no problems of the accounting."""
    lines = [
        f"warning: {path.name} is damaged and was set aside; its uses of devices aren't counted"
        for path in sorted(run_dir.glob("lending.damaged-*.jsonl"))
    ]
    try:
        uses = read_uses(run_dir / "lending.jsonl")
    except DataError as err:
        return [*lines, f"warning: {err}; only the record of lent devices is affected"], ()
    for device in dict.fromkeys(use.device for use in uses):
        own = [use for use in uses if use.device == device]
        sums = seconds_by_use(own)
        parts = " + ".join(f"{use} {seconds:.3f}" for use, seconds in sums.items())
        num_unknown = sum(not use.is_end_known for use in own)
        what = f"{num_unknown} use{'s' if num_unknown > 1 else ''}"
        unknown = f"; {what} ended later, when the launcher was killed" if num_unknown else ""
        lines.append(f"device of {device}: {sum(sums.values()):.3f} s = {parts}{unknown}")
    return [*lines, *(f"warning: {problem}" for problem in find_problems(uses))], ()
