"""The main function of a tracker's process: hands the rows of `metrics.jsonl` to one tracker.

    python -m astraflow.addons.trackers.tracker_process RUN_DIR KEY

Its standard input is a pipe from the launcher. Each byte means that there are new rows, and the end of the
pipe means that no more will come. After that, or if the launcher has died, the process has one minute to hand
over the remaining rows and close the tracker. Ctrl-C doesn't reach this process, because it leads its own
session.
"""

import contextlib
import fcntl
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from astraflow.addons.trackers.row_feed import RowFeed
from astraflow.config import Use, load_attr
from astraflow.dataflow.journal.journal_db import TranscriptRow
from astraflow.dataflow.journal.reader import JournalTables
from astraflow.errors import ConfigError, JournalError
from astraflow.protocols import EpisodeTracker, Tracker
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.trackers import TrackedRun, check_tracker, tracker_key
from astraflow.report.terminal_text import speaker_of
from astraflow.service.process import MODULE_PATH_VARIABLE

__all__ = ["Bell", "follow", "main", "run_tracker"]

_MOST_WAITING = 100
"""Largest number of evaluations whose episodes are looked up again."""
_MOST_ROWS = 16
_MOST_TEXT = 4000
"""Largest number of characters of an episode that a table shows."""
_LAST_MOMENT_S = 60.0
"""Time to hand over the remaining rows and close. The launcher ends the process earlier, unless it has
died."""


class Bell:
    """Rings for new rows, and once more at the end. A thread reads the pipe, so a slow tracker cannot block
    it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rung = threading.Event()
        self._rung.set()  # there may be rows that an earlier process has not handed over
        self.is_over = False
        """Whether no more rows will come."""
        threading.Thread(target=self._listen, name="bell", daemon=True).start()

    def _listen(self) -> None:
        while os.read(self._fd, 4096):
            self._rung.set()
        # In this order, because `wait` reads `is_over` after the ring.
        self.is_over = True
        self._rung.set()
        timer = threading.Timer(_LAST_MOMENT_S, _end_session)
        timer.daemon = True
        timer.start()

    def wait(self) -> bool:
        """Blocks until the bell rings. Returns whether it was the last ring."""
        self._rung.wait()
        self._rung.clear()
        return self.is_over


def _end_session() -> None:
    """Ends this process and any helper processes of the tracker's library."""
    # If this process doesn't lead its group, the group also has processes that don't belong to the tracker.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def follow(tracker: Tracker, feed: RowFeed, bell: Bell, journal: Path) -> None:
    """Hands rows to the tracker until the bell has rung for the last time, then closes the tracker.

    A tracker that shows episodes also gets some episodes of each evaluation, from `journal`.
    """
    is_last = False
    waiting: list[dict[str, Any]] = []
    while not is_last:
        is_last = bell.wait()  # before reading, so that the last read misses no row
        while rows := feed.rows():
            tracker.write(rows)
            feed.advance()
            if isinstance(tracker, EpisodeTracker):
                waiting += [row for row in rows if row.get("kind") == "eval"]
        # The journal's tables are written after the rows, so missing episodes are looked up again at the next
        # ring.
        waiting = [row for row in waiting[-_MOST_WAITING:] if not _show_episodes(tracker, row, journal)]
    tracker.close()


def _show_episodes(tracker: Tracker, row: dict[str, Any], journal: Path) -> bool:
    """Hands over the episodes of an evaluation. Returns whether there were any."""
    episodes = _sample_rows(journal, row)
    if episodes and isinstance(tracker, EpisodeTracker):
        tracker.write_episodes(row, episodes)
    return bool(episodes)


def _sample_rows(journal: Path, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns up to 16 episodes of an evaluation, with the keys `task`, `score`, `version`, and `text`.

    `row`: the evaluation's line of `metrics.jsonl`. The journal's tables are written after that line, so the
    result is empty at first.
    """
    where = (
        "rowid IN (SELECT rowid FROM samples WHERE kind = 'eval' AND policy = ? AND version = ? "
        "ORDER BY rowid DESC LIMIT ?)"
    )
    try:
        with JournalTables(journal) as tables:
            samples = tables.transcripts(where, row.get("policy"), row.get("version"), 64 * _MOST_ROWS)
            own = [each for each in samples if each.task_id.startswith(f"{row.get('eval_set')}/")]
            return [_make_row(tables, each) for each in (own or samples)[-_MOST_ROWS:]]
    except JournalError:
        return []


def _make_row(tables: JournalTables, row: TranscriptRow) -> dict[str, Any]:
    text = "its messages were deleted"
    with contextlib.suppress(JournalError):
        text = "\n".join(f"{speaker_of(message)}: {message.content}" for message in tables.messages(row))
    text = text[:_MOST_TEXT].encode("utf-8", "replace").decode()
    return {"task": row.task_id, "score": row.score, "version": row.version, "text": text}


def run_tracker(run_dir: Path, key: str, bell: Bell) -> None:
    """Opens the tracker that the recipe names by `key`, and hands it the run's rows.

    Raises: ConfigError if the recipe has no such tracker, or it cannot be created; any error of its library.
    """
    folder = RunFolder(run_dir)
    recipe = folder.load_recipe()
    configs = {tracker_key(config): config for config in recipe.trackers}
    if key not in configs:
        raise ConfigError(f"{run_dir}: the recipe has no tracker {key!r} (trackers: {', '.join(configs)})")
    own = folder.trackers / key
    own.mkdir(parents=True, exist_ok=True)
    lock = os.open(own / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    # The process of a launcher that was killed may still be handing over its last rows.
    fcntl.flock(lock, fcntl.LOCK_EX)
    run = TrackedRun(
        project=recipe.name,
        name=folder.path.name,
        run_folder=folder.path,
        folder=own,
        recipe=recipe.model_dump(mode="json"),
    )
    config = configs[key]
    check_tracker(config)
    if isinstance(config, Use):
        tracker: Tracker = load_attr(config.use, where="trackers.use")(run, **config.args)
    else:
        tracker = config.make(run)
    follow(tracker, RowFeed(folder.metrics, own), bell, folder.journal)


def main() -> int:
    """Runs the process; returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A library may ask questions on standard input. It gets an empty input, so it cannot consume the bytes of
    # the pipe.
    bell = Bell(os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.path += [part for part in os.environ.get(MODULE_PATH_VARIABLE, "").split(os.pathsep) if part]
    run_dir, key = sys.argv[1:]
    try:
        run_tracker(Path(run_dir), key, bell)
    except Exception as err:
        logging.getLogger(__name__).error("tracker %s failed", key, exc_info=err)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Libraries may leave threads and exit handlers that hang. Everything that matters is closed by now.
    os._exit(code)
