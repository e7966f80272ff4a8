"""Runs the members of a group, each by `astraflow run` in a process of its own, some side by side.

Every state is on disk: a member whose run has finished is done, one that failed is noted in `group.json`, and
any other is started, or resumed where it was. So a sweep that was killed continues with the same command.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from astraflow.addons.experiments.cores import num_cores
from astraflow.addons.experiments.group_file import Group, GroupMember, save_group
from astraflow.cli.main import ERROR_FILE_VARIABLE
from astraflow.config import Use
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.gallery import recipe_file
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.trackers import TrackerVariant

__all__ = ["Sweep", "redo", "tracker_overrides"]

_MAX_TAG = 64
"""W&B refuses longer tags."""
_PAUSE_S = 0.2
_CORES_PER_RUN = 2
"""A small run keeps two cores busy: one generates, and one trains."""


def redo(folder: Path, group: Group, names: Sequence[str]) -> Group:
    """Moves the folders of members aside, so that they start again. Raises: ConfigError for other names."""
    known = [member.name for member in group.members]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--redo {unknown[0]}: {folder} has no such run; it has {', '.join(known[:20])}")
    for name in names:
        run = RunFolder(folder / name)
        if run.is_locked:
            raise ConfigError(f"--redo {name}: it is running; stop it first")
        if run.path.exists():
            aside = folder / "redone"
            aside.mkdir(exist_ok=True)
            run.path.rename(aside / f"{name}.{time.time_ns()}")
    failed = {name: why for name, why in group.failed.items() if name not in names}
    group = msgspec.structs.replace(group, failed=failed)
    save_group(folder, group)
    return group


@dataclass
class Sweep:
    """The runs of a group. Example: `Sweep(folder, group, print).run(jobs=2)`."""

    folder: Path
    group: Group
    tell: Callable[[str], None]
    _running: dict[str, "subprocess.Popen[bytes]"] = field(
        default_factory=dict[str, "subprocess.Popen[bytes]"]
    )
    _is_stopped: bool = False

    def run(self, *, jobs: int) -> bool:
        """Runs all members that are neither finished nor noted as failed, `jobs` at a time.

        With 0 jobs, the number of cores decides.

        Returns false if it was interrupted. Raises: ConfigError if another sweep runs this group.
        """
        jobs = jobs or max(1, num_cores() // _CORES_PER_RUN)
        waiting = [
            member
            for member in self.group.members
            if member.name not in self.group.failed and not _is_finished(self.folder / member.name)
        ]
        done = len(self.group.members) - len(waiting)
        if done:
            self.tell(f"{done} of {len(self.group.members)} runs have ended before")
        with self._lock(), self._signals():
            while (waiting or self._running) and not (self._is_stopped and not self._running):
                self._reap()
                while waiting and len(self._running) < jobs and not self._is_stopped:
                    if (member := self._next(waiting)) is None:
                        break
                    self._start(member)
                time.sleep(_PAUSE_S)
        return not self._is_stopped

    def _next(self, waiting: list[GroupMember]) -> GroupMember | None:
        """Takes the next member that no process of an earlier sweep still runs."""
        for member in list(waiting):
            run = RunFolder(self.folder / member.name)
            if run.is_locked:
                continue
            waiting.remove(member)
            if not _is_finished(run.path):
                return member
        return None

    def _start(self, member: GroupMember) -> None:
        labels = tracker_overrides(self.folder, self.group, member)
        argv = [sys.executable, "-m", "astraflow", "run", self.group.recipe, *member.overrides, *labels]
        argv += ["--run-dir", str(self.folder / member.name), "--plain"]
        argv += ["--on", self.group.on] if self.group.on else []
        error = self._log(member.name).with_suffix(".error")
        error.unlink(missing_ok=True)
        with self._log(member.name).open("ab") as log:
            # A session of its own: Ctrl-C reaches the run through this process, and only once.
            process = subprocess.Popen(
                argv,
                env={**os.environ, ERROR_FILE_VARIABLE: str(error.absolute())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running[member.name] = process
        self.tell(f"{member.name}: started")
        if self._is_stopped:  # since before the signal handler could see this process
            process.send_signal(signal.SIGINT)

    def _log(self, name: str) -> Path:
        path = self.folder / "logs" / f"{name}.log"
        path.parent.mkdir(exist_ok=True)
        return path

    def _reap(self) -> None:
        for name, process in list(self._running.items()):
            if (code := process.poll()) is None:
                continue
            del self._running[name]
            if _is_finished(self.folder / name):
                self.tell(f"{name}: finished")
            elif self._is_stopped:
                self.tell(f"{name}: stopped; the same command continues it")
            else:
                self._note_failure(name, code)

    def _note_failure(self, name: str, code: int) -> None:
        end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        with contextlib.suppress(DataError):
            record = RunFolder(self.folder / name).load_record()
            end = record.reason if record.state == "failed" and record.reason else end
        log = self._log(name)
        why = f"{end}; see {log}"
        with contextlib.suppress(OSError, IndexError):
            error = log.with_suffix(".error").read_text(encoding="utf-8")
            why = f"{end}: {error.splitlines()[0]}"
        self.group = msgspec.structs.replace(self.group, failed={**self.group.failed, name: why})
        save_group(self.folder, self.group)
        self.tell(f"{name}: failed ({why})")

    @contextmanager
    def _lock(self) -> Generator[None]:
        with (self.folder / "sweep.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as err:
                raise ConfigError(f"another sweep runs {self.folder}") from err
            yield

    @contextmanager
    def _signals(self) -> Generator[None]:
        """Passes each signal on to the runs: the first stops them, and a second ends them at once."""

        def stop(number: int, frame: object) -> None:
            del number, frame
            self._is_stopped = True
            for process in list(self._running.values()):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, stop) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def _is_finished(path: Path) -> bool:
    with contextlib.suppress(DataError):
        return RunFolder(path).is_finished
    return False


def tracker_overrides(folder: Path, group: Group, member: GroupMember) -> list[str]:
    """Returns the overrides that label a member's run in the trackers of its recipe.

    A group that the recipe names stays, and its tags come first. There are no overrides if no tracker takes
    labels, or if the recipe can't be read, which the run itself then reports.
    """
    with contextlib.suppress(ConfigError):
        file, _ = recipe_file(group.recipe)
        trackers = load_recipe(file, member.overrides).trackers
        # The values by which a member differs from others, such as `lr=1e-4` and `seed=0`.
        split = [override.partition("=") for override in member.overrides]
        own = [(key, value) for key, _, value in split if key in group.values or key == "seed"]
        tags = [f"{key.rpartition('.')[2]}={value}"[:_MAX_TAG] for key, value in own]
        labeled = [_labeled(tracker, folder.resolve().name, tags) for tracker in trackers]
        if labeled != list(trackers):
            mappings = [tracker.model_dump(mode="json") for tracker in labeled]
            # JSON is also valid YAML.
            return [f"trackers={msgspec.json.encode(mappings).decode()}"]
    return []


def _labeled(tracker: TrackerVariant | Use, group: str, tags: list[str]) -> TrackerVariant | Use:
    own = tracker.model_dump()
    labels: dict[str, object] = {}
    if own.get("group") == "":
        labels["group"] = group
    if isinstance(tracker, TrackerVariant) and "tags" in own:
        labels["tags"] = tuple(dict.fromkeys([*own["tags"], *tags]))
    return tracker.model_copy(update=labels) if labels else tracker
