"""What `astraflow audit` checks of lent devices: each second of a session has exactly one use."""

from collections.abc import Sequence
from pathlib import Path

from astraflow.addons.lending.uses import find_problems, read_uses, seconds_by_use
from astraflow.errors import DataError

__all__ = ["audit_lending"]


def audit_lending(run_dir: Path) -> tuple[Sequence[str], Sequence[str]]:
    """Returns a line per device with its seconds by use, and what is wrong; both empty without lending."""
    try:
        uses = read_uses(run_dir / "lending.jsonl")
    except DataError as err:
        return (), (str(err),)
    lines: list[str] = []
    for device in dict.fromkeys(use.device for use in uses):
        own = [use for use in uses if use.device == device]
        sums = seconds_by_use(own)
        shown = " + ".join(f"{use} {seconds:.3f}" for use, seconds in sums.items())
        num_unknown = sum(not use.is_end_known for use in own)
        what = f"{num_unknown} use{'s' if num_unknown > 1 else ''}"
        unknown = f"; {what} ended later, when the launcher was killed" if num_unknown else ""
        lines.append(f"device of {device}: {sum(sums.values()):.3f} s = {shown}{unknown}")
    return lines, find_problems(uses)
