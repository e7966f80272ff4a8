"""The processes of a run's trackers. The run starts and wakes them, and waits for them only at its end.

    launcher:         writes a row to metrics.jsonl --> writes a byte to the pipe (never blocks)
    tracker process:  byte --> reads metrics.jsonl from its position --> tracker --> stores the position

A process that fails, or doesn't process a row for minutes, is ended and restarted, with growing pauses, as
long as the run continues. At the end of the run, the process has a deadline. A message counts the rows that a
tracker has not processed by then. These rows stay in `metrics.jsonl`, and the tracker gets them if the run is
resumed. Only the process that launched the run starts trackers, so there is one writer, whichever launcher
starts the services.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from astraflow.addons.trackers.row_feed import num_waiting, read_position
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.trackers import tracker_key
from astraflow.report.view import RunPage, ShownRun
from astraflow.service.process import MODULE_PATH_VARIABLE
from astraflow.service.restarts import Backoff, end_text, last_lines

__all__ = ["Trackers", "TrackersPage", "make_page"]

_LOOK_EVERY_S = 5.0
_LONGEST_SILENCE_S = 120.0
"""A tracker that doesn't process a row for this long, while rows wait, is restarted."""
_LONGEST_START_S = 120.0
"""The same limit before the first row. Importing a library and connecting can take long on a busy machine."""
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 300.0


class Trackers:
    """All trackers of a run: `start`, then `wake` after each row of `metrics.jsonl`, then `close`."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        note: Callable[[str], None],
        *,
        module_path: Sequence[str] = (),
        python: str = sys.executable,
        longest_silence_s: float = _LONGEST_SILENCE_S,
    ) -> None:
        """`note` receives messages for people, and is called from other threads. `python` runs the
        processes."""
        self._keepers = [
            _Keeper(tracker_key(config), folder, note, module_path, (python, longest_silence_s))
            for config in recipe.trackers
        ]

    def start(self) -> None:
        """Starts the processes, and returns immediately."""
        for keeper in self._keepers:
            keeper.start()

    def wake(self) -> None:
        """Tells the processes that there are new rows. Never blocks."""
        for keeper in self._keepers:
            keeper.wake()

    def close(self, deadline_s: float) -> None:
        """Ends the processes once the trackers have processed all rows, or after `deadline_s` seconds."""
        end_s = time.monotonic() + deadline_s
        for keeper in self._keepers:
            keeper.finish()
        for keeper in self._keepers:
            keeper.join(end_s - time.monotonic(), deadline_s)
        self._keepers = []

    def kill(self) -> None:
        """Ends the processes immediately."""
        for keeper in self._keepers:
            keeper.kill()


class TrackersPage(RunPage):
    """Hands the rows of `metrics.jsonl` over to the trackers of the recipe."""

    def __init__(self, run: ShownRun) -> None:
        self._run = run
        self._trackers: Trackers | None = None

    async def open(self, note: Callable[[str], None]) -> None:
        """Starts the processes of the trackers."""
        run = self._run
        self._trackers = Trackers(run.recipe, run.folder, note, module_path=run.module_path)
        self._trackers.start()

    def wake(self) -> None:
        """Tells the processes that there are new rows."""
        if self._trackers is not None:
            self._trackers.wake()

    def kill(self) -> None:
        """Ends the processes immediately."""
        if self._trackers is not None:
            self._trackers.kill()

    async def close(self, deadline_s: float) -> None:
        """Waits until the trackers have processed all rows, at most `deadline_s` seconds."""
        if self._trackers is not None:
            await asyncio.to_thread(self._trackers.close, deadline_s)


def make_page(run: ShownRun) -> TrackersPage | None:
    """Makes the page of a run's trackers; None if its recipe has none."""
    return TrackersPage(run) if run.recipe.trackers else None


class _Keeper:
    """Keeps the process of one tracker alive, in its own thread."""

    def __init__(
        self,
        key: str,
        folder: RunFolder,
        note: Callable[[str], None],
        module_path: Sequence[str],
        process: tuple[str, float],
    ) -> None:
        self._key = key
        self._folder = folder
        self._own = folder.trackers / key
        self._log_path = folder.logs / f"tracker-{key}.log"
        self._note = note
        self._module_path = module_path
        self._python, self._longest_silence_s = process
        self._lock = threading.Lock()
        """Guards the next two fields."""
        self._process: subprocess.Popen[bytes] | None = None
        self._bell: int | None = None
        """The write end of the process's pipe."""
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"tracker-{key}", daemon=True)
        self._last_note = ""
        self._last_end = ""
        """How the process ended, if it failed while it processed the last rows."""
        self._position = 0
        self._moved_s = 0.0
        """When the tracker last processed rows, or had none left."""
        self._has_moved = False
        """Whether the process has processed rows since it was started."""

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # full pipe: already woken; broken pipe: ended
            if self._bell is not None:
                os.write(self._bell, b".")

    def finish(self) -> None:
        """Lets the process handle the remaining rows and end."""
        self._finishing.set()
        self._close_bell()

    def join(self, patience_s: float, deadline_s: float) -> None:
        """Waits for the end of the process, and kills it after `patience_s`. Reports the rows that the
        tracker has not processed."""
        if self._thread.ident is None:
            return  # the run failed before it started its trackers
        self._thread.join(max(0.0, patience_s))
        if was_slow := self._thread.is_alive():
            self.kill()
            self._thread.join(2.0)
        if num := num_waiting(self._folder.metrics, self._own):
            why = f" within {deadline_s:.0f} s" if was_slow else self._last_end
            self._note(
                f"tracker {self._key} did not process {num} rows{why}; they are in {self._folder.metrics}, "
                f"and the tracker gets them if the run is resumed (log: {self._log_path})"
            )
        elif was_slow:
            self._note(f"tracker {self._key} processed all rows, but did not close within {deadline_s:.0f} s")

    def kill(self) -> None:
        with self._lock:
            if self._process is not None:
                _kill_session(self._process)

    # --- in the thread ---

    def _keep(self) -> None:
        backoff = Backoff(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        while True:
            code = self._run_once()
            if isinstance(code, str):
                end = f"could not be started: {code}"
            else:
                end = f"{end_text(code)}: {last_lines(self._log_path, 1).strip()[:300]}"
            if self._finishing.is_set():
                self._last_end = f"; it {end}" if code else ""
                return
            self._report(end)
            if self._finishing.wait(backoff.next_delay_s()):
                return

    def _run_once(self) -> int | str:
        """Runs the process until it ends. Returns its exit code, or why there is none."""
        try:
            process = self._start_process()
        except OSError as err:
            return str(err)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(min(_LOOK_EVERY_S, self._longest_silence_s / 4))
                self._look(process)
        finally:
            self._close_bell()
            _kill_session(process)  # the process may have left helper processes

    def _start_process(self) -> "subprocess.Popen[bytes]":
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        module = "astraflow.addons.trackers.tracker_process"
        command = [self._python, "-m", module, str(self._folder.path), self._key]
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        try:
            with self._log_path.open("ab", buffering=0) as log, self._lock:
                log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} tracker {self._key} starts\n".encode())
                self._process = subprocess.Popen(
                    command,
                    stdin=read_fd,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, MODULE_PATH_VARIABLE: os.pathsep.join(self._module_path)},
                    start_new_session=True,
                )
                self._bell = write_fd
        except OSError:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
        self._position = read_position(self._own)
        self._moved_s = time.monotonic()
        self._has_moved = False
        # `finish` may have been called before there was a bell to close.
        if self._finishing.is_set():
            self._close_bell()
        return self._process

    def _look(self, process: "subprocess.Popen[bytes]") -> None:
        """Ends a process that hangs.

        This polls, because the tracker's library doesn't offer an event to wait for.
        """
        position = read_position(self._own)
        now_s = time.monotonic()
        if position != self._position:
            self._has_moved = True
        if position != self._position or position >= self._folder.metrics.stat().st_size:
            self._position = position
            self._moved_s = now_s
        longest_s = (
            self._longest_silence_s if self._has_moved else max(self._longest_silence_s, _LONGEST_START_S)
        )
        if now_s - self._moved_s > longest_s:
            self._report(f"has processed no row for {longest_s:.0f} s and is restarted")
            _kill_session(process)

    def _close_bell(self) -> None:
        with self._lock:
            if self._bell is not None:
                os.close(self._bell)
                self._bell = None

    def _report(self, what: str) -> None:
        """Passes on what went wrong, unless the last note said the same."""
        if what != self._last_note:
            self._last_note = what
            self._note(
                f"tracker {self._key} {what}; the run continues, and its rows wait in metrics.jsonl "
                f"(log: {self._log_path})"
            )


def _kill_session(process: "subprocess.Popen[bytes]") -> None:
    """Kills a process and its helper processes, which are in the same session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
