"""How a run ended, in words: the reason in `run.json`, in `summary.json` and in `astraflow status`.

A launcher writes the reason when it ends. One that was killed cannot: its run folder says `running`, but
nobody holds its lock any more, which `known_end` notices.
"""

import asyncio
import signal
import time

import msgspec

from astraflow.errors import Error
from astraflow.recipe.run_folder import RunFolder, RunRecord

__all__ = ["ABANDONED", "interruption", "known_end", "reason_of"]

ABANDONED = "the program that launched it ended it"
"""The reason if a Python program leaves the block of `launch` before the run is over."""

_MAX_REASON = 4000
"""Characters of a reason: the last lines of a log fit in."""

_SIGNALS = {
    signal.SIGINT: "it was interrupted by Ctrl-C (SIGINT)",
    signal.SIGTERM: "it was told to stop (SIGTERM)",
    signal.SIGHUP: "its terminal was closed (SIGHUP)",
}


def interruption(number: signal.Signals) -> str:
    """The reason if a signal stops the launcher."""
    return _SIGNALS.get(number, f"it was stopped by a signal ({number.name})")


def reason_of(error: BaseException) -> str:
    """The reason if an error ends the run. Only errors of ours are sentences of their own."""
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return "the program that launched it was interrupted, or cancelled it"
    text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."


def known_end(folder: RunFolder) -> RunRecord:
    """What `run.json` says, corrected for a launcher that was killed. Raises: DataError if there is none."""
    record = folder.load_record()
    if record.state != "running" or folder.is_locked:
        return record
    seen_s = max((end_s for _, end_s in record.active), default=0.0)
    seen = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen_s))
    reason = (
        f"its launcher (process {record.launcher_pid}) is gone without a word, as after a kill, a crash or a "
        f"power cut; it was last seen at {seen}"
    )
    return msgspec.structs.replace(record, state="stopped", reason=reason)
