"""The run folder: where a run keeps its recipe, journal, weights, checkpoints, logs and results.

This module owns the names of files in the folder, atomic writes, and the lock that keeps two launchers from
using the same folder. It knows no service.
"""

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from astraflow.errors import ConfigError, DataError
from astraflow.recipe.service_state import ServiceState
from astraflow.types import Item
from astraflow.types.alarm import Alarm
from astraflow.user_input.user_files import read_part

if TYPE_CHECKING:  # most readers of a run folder need no recipe, whose classes take long to import
    from astraflow.recipe.recipe import Recipe
    from astraflow.recipe.resume import RecipeChange

__all__ = ["RunFolder", "RunRecord", "set_aside", "write_atomic"]

_log = logging.getLogger(__name__)

_RESERVE_BYTES = 512 * 1024
"""Space for `run.json`, summary, curve and episodes of a run that ends while its disk is full."""


class RunRecord(Item, frozen=True, kw_only=True):
    """`run.json`: the state of a run and how to reach it. `url` answers while `state` is `running`."""

    name: str
    url: str = ""
    state: str = "new"
    """`new`, `running`, `stopped`, `finished` or `failed`."""
    reason: str = ""
    """Why the run ended; empty while it is running."""
    launcher_pid: int = 0
    at_s: float = 0.0
    """When this was written. A running launcher writes it every few seconds."""
    active: tuple[tuple[float, float], ...] = ()
    """Start and end of each period in which a launcher ran the services. The last end advances while a
    launcher runs them."""
    services: tuple[ServiceState, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    """What the watchdog currently finds to be wrong."""
    pool: str = ""
    """How many rollout services a pool that sizes itself has, and why it last changed, in words."""
    module_path: tuple[str, ...] = ()
    """Folders where the recipe's own modules were found."""

    @property
    def wall_s(self) -> float:
        """Wall time of all periods in `active` together."""
        return sum(end - begin for begin, end in self.active)


class RunFolder:
    """The paths of one run folder, with reads and writes that never leave half a file.

    Example: `RunFolder(Path("runs/quickstart")).journal`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.changes = path / "recipe_changes.jsonl"
        self.journal = path / "journal"
        self.weights = path / "weights"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.samples = path / "samples"
        self.metrics = path / "metrics.jsonl"
        self.trackers = path / "trackers"
        self.summary = path / "summary.json"
        self.record = path / "run.json"
        self.pool = path / "pool.jsonl"
        self.curve = path / "learning_curve.png"
        self.cache = path / "cache"
        self.secrets = path / "secrets"
        self.resume = path / "resume"
        """Exists if a person asked that a failed run is continued, until the dataflow has started again."""
        self._lock = path / "launcher.lock"
        self._reserve = path / "reserve"

    def create(self) -> None:
        """Makes the folder and its subfolders."""
        for folder in (self.path, self.journal, self.weights, self.checkpoints, self.logs, self.samples):
            folder.mkdir(parents=True, exist_ok=True)

    def load_recipe(self) -> "Recipe":
        """Reads the recipe that the folder's run was started with. Raises: DataError if there is none."""
        from astraflow.config import parse_config
        from astraflow.recipe.recipe import Recipe
        from astraflow.user_input.yaml_files import load_mapping

        if not self.recipe.is_file():
            raise DataError(f"{self.path} is not a run folder: it has no recipe.yaml")
        return parse_config(load_mapping(self.recipe), Recipe, where=str(self.recipe))

    def save_recipe(self, recipe: "Recipe") -> None:
        """Writes the resolved recipe; `load_recipe` returns an equal one."""
        from astraflow.config import dump_yaml

        write_atomic(self.recipe, dump_yaml(recipe).encode())

    def load_record(self) -> RunRecord:
        """Reads `run.json`. Raises: DataError if it is missing or broken."""
        try:
            data = read_part(self.record, "run record")
            if not data and not self.record.exists():
                raise DataError(f"{self.path} is not a run folder: it has no run.json")
            return msgspec.json.decode(data, type=RunRecord)
        except msgspec.DecodeError as err:
            raise DataError(f"{self.record} is broken: {err}; delete it to start the services again") from err

    def save_record(self, record: RunRecord) -> None:
        """Writes `run.json`."""
        write_atomic(self.record, msgspec.json.format(msgspec.json.encode(record), indent=2))

    def reserve(self) -> None:
        """Reserves some disk space, so that a run can still write why it ended when the disk is full."""
        with contextlib.suppress(OSError):  # the disk is full already; the run reports this soon enough
            # Random bytes, because a file system may compress others.
            self._reserve.write_bytes(os.urandom(_RESERVE_BYTES))

    def release(self) -> None:
        """Releases the reserved disk space."""
        self._reserve.unlink(missing_ok=True)

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its end."""
        return self.record.is_file() and self.load_record().state == "finished"

    def note_changes(self, changes: "tuple[RecipeChange, ...]") -> None:
        """Appends changes to the history of the recipe in this folder."""
        with self.changes.open("ab") as file:
            for change in changes:
                file.write(msgspec.json.encode(msgspec.structs.replace(change, at_s=time.time())) + b"\n")

    def token(self, role: str) -> str:
        """Returns the token of a role. The first call makes it, in a file that only its owner can read."""
        path = self.secrets / role
        if not path.is_file():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_once(path, secrets.token_urlsafe(24).encode(), mode=0o600)
        return path.read_text(encoding="utf-8").strip()

    @property
    def is_locked(self) -> bool:
        """Whether a launcher holds the folder."""
        try:
            with open(self._lock, "rb", opener=_without_waiting) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # no launcher has ever held it
        return False

    @contextmanager
    def lock(self) -> Generator[None]:
        """Holds the folder for one launcher. Raises: ConfigError if another launcher holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self._lock, "r+b", buffering=0, opener=_without_waiting) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as err:
                raise ConfigError(
                    f"{self.path} is in use by another astraflow process; see `astraflow status "
                    f"{self.path}`, or choose another --run-dir"
                ) from err
            yield


def _without_waiting(path: str, flags: int) -> int:
    """Opens a lock, which is created for writing only; a pipe in its place is opened without a peer."""
    return os.open(path, flags | os.O_NONBLOCK | (os.O_CREAT if flags & os.O_RDWR else 0), 0o644)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Writes a file completely or not at all: syncs a temporary file in the same folder, then renames it."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)  # it would take up space on a full disk
        raise


def set_aside(path: Path, problem: str) -> str:
    """Renames a damaged record that the run can do without, so that a new one begins. Returns: what was done,
    for people. `problem`: what is wrong with it."""
    free = (path.with_name(f"{path.stem}.damaged-{number}{path.suffix}") for number in itertools.count(1))
    place = next(name for name in free if not name.exists())
    path.rename(place)
    note = f"{problem}. It was renamed to {place.name}; the run goes on with a new one"
    _log.warning("%s", note)
    return note


def _write_once(path: Path, data: bytes, *, mode: int) -> None:
    """Writes a file unless another process has just made it, in which case that file stays."""
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_atomic(own, data, mode=mode)
    try:
        # Unlike a rename, a hard link fails if the file exists, so the first writer wins.
        path.hardlink_to(own)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)
