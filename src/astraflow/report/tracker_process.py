"""The main function of a tracker's process: hands the rows of `metrics.jsonl` to one tracker.

    python -m astraflow.report.tracker_process RUN_DIR KEY

Its standard input is a pipe from the launching process: each byte says that there are new rows, and its end
that no more will come. Then, or when the launching process has died, the rest is handed over and the tracker
closed, within a minute. Ctrl-C does not reach this process, which leads a session of its own.
"""

import fcntl
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from astraflow.errors import ConfigError
from astraflow.protocols import EpisodeTracker, Tracker
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.trackers import TrackedRun, make_tracker, tracker_key
from astraflow.report.row_feed import RowFeed
from astraflow.report.sample_table import sample_rows
from astraflow.service.process import MODULE_PATH_VARIABLE

__all__ = ["Bell", "follow", "main", "run_tracker"]

_MOST_WAITING = 100
"""Evaluations whose episodes are asked for again."""
_LAST_MOMENT_S = 60.0
"""Time to hand over the rest and to close; the launcher's patience is shorter, but it may have died."""


class Bell:
    """Rings for new rows, and for the end. A thread reads the pipe, whatever the tracker does meanwhile."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rung = threading.Event()
        self._rung.set()  # rows of an earlier start may wait
        self.is_over = False
        """Whether no more rows will come."""
        threading.Thread(target=self._listen, name="bell", daemon=True).start()

    def _listen(self) -> None:
        while os.read(self._fd, 4096):
            self._rung.set()
        self.is_over = True
        self._rung.set()
        timer = threading.Timer(_LAST_MOMENT_S, _end_session)
        timer.daemon = True
        timer.start()

    def wait(self) -> bool:
        """Returns at the next ring; whether it was the last one."""
        self._rung.wait()
        self._rung.clear()
        return self.is_over


def _end_session() -> None:
    """Ends this process and the helpers that a tracker's library may have started."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def follow(tracker: Tracker, feed: RowFeed, bell: Bell, journal: Path) -> None:
    """Hands rows over until the bell rings for the last time, then closes the tracker.

    A tracker that shows episodes gets some of each evaluation, from `journal`.
    """
    is_last = False
    waiting: list[dict[str, Any]] = []
    while not is_last:
        is_last = bell.wait()  # before reading, so that the last reading misses nothing
        while rows := feed.rows():
            tracker.write(rows)
            feed.taken()
            if isinstance(tracker, EpisodeTracker):
                waiting += [row for row in rows if row.get("kind") == "eval"]
        # The journal's tables follow behind: what is not there yet is asked for at the next ring.
        waiting = [row for row in waiting[-_MOST_WAITING:] if not _show_episodes(tracker, row, journal)]
    tracker.close()


def _show_episodes(tracker: Tracker, row: dict[str, Any], journal: Path) -> bool:
    """Whether episodes of an evaluation were known, and handed over."""
    episodes = sample_rows(journal, row)
    if episodes and isinstance(tracker, EpisodeTracker):
        tracker.write_episodes(row, episodes)
    return bool(episodes)


def run_tracker(run_dir: Path, key: str, bell: Bell) -> None:
    """Opens the tracker of a run that its recipe names by `key`, and follows the run.

    Raises: ConfigError if the recipe names no such tracker or it cannot be made; whatever its library raises.
    """
    folder = RunFolder(run_dir)
    recipe = folder.load_recipe()
    configs = {tracker_key(config): config for config in recipe.trackers}
    if key not in configs:
        raise ConfigError(f"{run_dir}: the recipe names no tracker {key!r} (trackers: {', '.join(configs)})")
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
    follow(make_tracker(configs[key], run), RowFeed(folder.metrics, own), bell, folder.journal)


def main() -> int:
    """Runs the process; returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries may ask questions on standard input, so they get an empty one.
    bell = Bell(os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.path += [part for part in os.environ.get(MODULE_PATH_VARIABLE, "").split(os.pathsep) if part]
    run_dir, key = sys.argv[1:]
    try:
        run_tracker(Path(run_dir), key, bell)
    except Exception as err:
        logging.getLogger(__name__).error("%s", key, exc_info=err)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Libraries leave threads and exit handlers behind that may hang; all that counts is closed by now.
    os._exit(code)
