"""Why a run ended, as a sentence for `run.json`, `summary.json` and `astraflow status`.

A launcher writes the reason when it ends. A launcher that was killed can't: its run folder still says
`running`, but nobody holds the folder's lock. `known_end` recognizes that.
"""

import asyncio
import signal
import time

import msgspec

from astraflow.errors import Error
from astraflow.recipe.run_folder import RunFolder, RunRecord

__all__ = ["ABANDONED", "interruption", "known_end", "reason_of"]

ABANDONED = "the program that launched it left its `launch` block before the run was over"
"""The reason if a Python program leaves the block of `launch` early."""

_MAX_REASON = 4000
"""Most characters of a reason; the last lines of a log fit in."""

_SIGNALS = {
    signal.SIGINT: "it was interrupted by Ctrl-C (SIGINT)",
    signal.SIGTERM: "it was asked to stop (SIGTERM)",
    signal.SIGHUP: "its terminal was closed (SIGHUP)",
}


def interruption(number: signal.Signals) -> str:
    """The reason if a signal ends the launcher."""
    return _SIGNALS.get(number, f"it was stopped by a signal ({number.name})")


def reason_of(error: BaseException) -> str:
    """The reason if an error ends the run. Errors of other libraries are prefixed with their class."""
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return "the program that launched it was interrupted, or it cancelled the run"
    text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."


def known_end(folder: RunFolder) -> RunRecord:
    """The content of `run.json`, corrected if the launcher was killed. Raises: DataError if the file is
    missing."""
    record = folder.load_record()
    if record.state != "running" or folder.is_locked:
        return record
    last_s = max((end_s for _, end_s in record.active), default=0.0)
    last_s = min(max(last_s, 0.0), 1e11)  # the file may hold a time that no calendar has
    last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last_s))
    reason = (
        f"its launcher (process {record.launcher_pid}) is gone and recorded no reason, as after a kill, a "
        f"crash or a power failure; its last sign of life was at {last}"
    )
    return msgspec.structs.replace(record, state="stopped", reason=reason)
