"""Checkpoints of one trainer: folders that appear complete or not at all.

A checkpoint is written in two steps. `stage` fills a hidden folder. `finish` makes its bytes durable, writes
the record with the size and hash of every file, and renames the folder into place. `latest` trusts only
folders whose files match their record. Any other folder is damaged: it is set aside under another name for a
person to look at, and an older one is used. One trainer writes at a time.

    folder/step-00000010/{model.safetensors, trainer.pt, config.json, ..., checkpoint.json}
    folder/step-00000010/adapter/{adapter_model.safetensors, adapter_config.json}       with LoRA
    folder/damaged-step-00000020/...
"""

import itertools
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from astraflow import wire
from astraflow.errors import DataError, WireError
from astraflow.types import Item
from astraflow.weights.snapshot import declare_dtype
from astraflow.weights.stores.chunk_store import sync_path

__all__ = [
    "RECORD_FILE",
    "Checkpoint",
    "CheckpointRecord",
    "CheckpointStore",
    "FileRecord",
    "newest_step",
    "sync_path",
]

_log = logging.getLogger(__name__)
RECORD_FILE = "checkpoint.json"
"""Written last: a folder without it is not a checkpoint."""

_PREFIX = "step-"
_STAGED = ".staged-"
_REPLACED = ".replaced-"
_DAMAGED = "damaged-"
_READ_BYTES = 16 * 1024 * 1024


class FileRecord(Item, frozen=True, array_like=True):
    """A file of a checkpoint: its path in the folder, size and xxh3-128 hex."""

    name: str
    num_bytes: int
    hash: str


class CheckpointRecord(Item, frozen=True, kw_only=True):
    """The content of `checkpoint.json`."""

    policy: str
    step: int
    """Number of steps done."""
    created_s: float
    files: tuple[FileRecord, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk, complete or staged."""

    path: Path
    step: int
    """Number of steps done."""
    write: Callable[[], None] | None = None
    """Writes the missing files of a staged checkpoint."""


def newest_step(folder: Path) -> int:
    """Number of steps in the newest checkpoint of a folder, whether it is intact or not; 0 without one."""
    names = [path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


class CheckpointStore:
    """The checkpoints of one policy in one folder; keeps the newest few.

    Example::

        store = CheckpointStore(Path("checkpoints/actor"), policy="actor", keep=2)
        store.finish(store.stage(10, backend.save))
        store.latest()  # Checkpoint(path=.../step-00000010, step=10)
    """

    def __init__(
        self, folder: Path, *, policy: str, keep: int, sync: Callable[[Path], None] = sync_path
    ) -> None:
        """`sync` makes a file or a folder durable."""
        self.folder = folder
        self._policy = policy
        self._keep = keep
        self._sync = sync

    def stage(self, step: int, fill: Callable[[Path], Callable[[], None] | None]) -> Checkpoint:
        """Calls `fill` with an empty hidden folder. Nothing is durable or visible before `finish`.

        `fill` may return a function that writes more files into the folder, which `finish` then calls.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{_STAGED}{step:08d}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return Checkpoint(path, step, write=fill(path))

    def finish(self, staged: Checkpoint) -> Checkpoint:
        """Makes a staged checkpoint durable and visible, then removes the oldest ones beyond `keep`."""
        if staged.write is not None:
            staged.write()
        declare_dtype(staged.path)
        (staged.path / RECORD_FILE).unlink(missing_ok=True)  # of a checkpoint that training began with
        paths = sorted(staged.path.rglob("*"))
        files = [path for path in paths if path.is_file()]
        record = CheckpointRecord(
            policy=self._policy,
            step=staged.step,
            created_s=time.time(),
            files=tuple(_describe(staged.path, path.relative_to(staged.path).as_posix()) for path in files),
        )
        (staged.path / RECORD_FILE).write_bytes(wire.encode(record, wire.JSON))
        for path in (*paths, staged.path / RECORD_FILE, staged.path):
            self._sync(path)
        final = self.folder / f"{_PREFIX}{staged.step:08d}"
        if final.exists():
            replaced = self.folder / f"{_REPLACED}{staged.step:08d}"
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        staged.path.rename(final)
        self._sync(self.folder)
        old = [*self._finished_folders()[: -self._keep], *self.folder.glob(f"{_REPLACED}*")]
        # A trainer that was killed may have left an earlier one, and was restarted with other steps.
        old += [path for path in self.folder.glob(f"{_STAGED}*") if path.name < staged.path.name]
        for path in old:
            shutil.rmtree(path)
        return Checkpoint(final, staged.step)

    def latest(self) -> Checkpoint | None:
        """The newest intact checkpoint, or None. Damaged newer ones are set aside with a warning.

        Raises: DataError if a checkpoint belongs to another policy.
        """
        for path in reversed(self._finished_folders()):
            problem = self._problem(path)
            if not problem:
                return Checkpoint(path, _step_of(path))
            aside = self._set_aside(path)
            _log.warning("checkpoint %s is damaged and is set aside as %s: %s", path, aside.name, problem)
        return None

    @property
    def needed_step(self) -> int:
        """Number of steps in the oldest checkpoint that may still be used: no step before it is ever
        repeated. 0 until there are `keep` checkpoints."""
        finished = self._finished_folders()
        return _step_of(finished[-self._keep]) if len(finished) >= self._keep else 0

    @property
    def damaged(self) -> tuple[Path, ...]:
        """Folders of damaged checkpoints that were set aside."""
        return tuple(sorted(self.folder.glob(f"{_DAMAGED}*"))) if self.folder.is_dir() else ()

    def _set_aside(self, path: Path) -> Path:
        numbers = itertools.count(1)
        aside = path.with_name(f"{_DAMAGED}{path.name}")
        while aside.exists():
            aside = path.with_name(f"{_DAMAGED}{path.name}.{next(numbers)}")
        return path.rename(aside)

    def _finished_folders(self) -> list[Path]:
        """Folders of finished checkpoints, in the order of their steps."""
        if not self.folder.is_dir():
            return []
        names = (p for p in self.folder.iterdir() if p.name.removeprefix(_PREFIX).isdigit())
        return sorted(p for p in names if p.name.startswith(_PREFIX))

    def _problem(self, path: Path) -> str:
        """Why a folder is not an intact checkpoint; empty if it is."""
        try:
            record = wire.decode((path / RECORD_FILE).read_bytes(), CheckpointRecord, wire.JSON)
            wrong = [file.name for file in record.files if _describe(path, file.name) != file]
        except (OSError, WireError) as err:
            return str(err)
        if record.policy != self._policy:
            raise DataError(
                f"checkpoint {path} belongs to policy {record.policy!r}, not {self._policy!r}; is the folder "
                "the right one?"
            )
        return f"{', '.join(wrong)} differ from {RECORD_FILE}" if wrong else ""


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _describe(folder: Path, name: str) -> FileRecord:
    digest = xxhash.xxh3_128()
    num_bytes = 0
    with (folder / name).open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return FileRecord(name, num_bytes, digest.hexdigest())
