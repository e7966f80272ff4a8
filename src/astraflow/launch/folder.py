"""The run folder: where a run keeps its recipe, journal, weights, checkpoints, logs and results.

Owns the names in it, atomic writes, the lock that keeps two launchers out of one folder, and the check that a
resumed run still belongs to the recipe that began it. Knows no service.
"""

import fcntl
import json
import os
import secrets
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec

from astraflow.config import dump_yaml, load_mapping, parse_config
from astraflow.errors import ConfigError, DataError
from astraflow.launch.config import Recipe
from astraflow.types import Item

__all__ = [
    "MAY_CHANGE",
    "RecipeChange",
    "RunFolder",
    "RunRecord",
    "ServiceRecord",
    "changes_between",
    "refuse_changes",
    "write_atomic",
]

MAY_CHANGE = (
    "rollout",
    "dataflow.host",
    "dataflow.port",
    "dataflow.tls",
    "dataflow.web",
    "dataflow.max_requests_per_s",
    "dataflow.lease_timeout_s",
    "dataflow.heartbeat_s",
    "dataflow.snapshot_every",
    "dataflow.retain",
    "weights",
    "supervision",
    "launcher",
    "tasks.score_timeout_s",
    "policies.*.train.lr",
    "policies.*.train.loss",
    "policies.*.train.denominator",
    "policies.*.train.fixed_denominator",
    "policies.*.train.minibatches",
    "policies.*.train.token_budget",
    "policies.*.train.optimizer",
    "policies.*.train.backend",
    "policies.*.train.checkpoint_every",
    "policies.*.train.keep_checkpoints",
    "policies.*.sampling.max_tokens",
)
"""Keys that may change when a run is resumed. All others decided data that the journal already holds."""


class ServiceRecord(Item, frozen=True, kw_only=True):
    """One process of a run, in `run.json`."""

    name: str
    pid: int
    port: int = 0
    restarts: int = 0
    state: str = ""
    age_s: float = 0.0
    """Seconds since it was started."""
    silent_s: float | None = None
    """Seconds since its last sign of life; null before the first one."""
    is_silent: bool = False
    trouble: str = ""
    """What is wrong with it and what to do, in words; empty if nothing is known to be wrong."""


class RunRecord(Item, frozen=True, kw_only=True):
    """`run.json`: how to reach a run. `url` answers while `state` is `running`."""

    name: str
    url: str = ""
    state: str = "new"
    """`new`, `running`, `stopped`, `finished` or `failed`."""
    launcher_pid: int = 0
    at_s: float = 0.0
    """When this was written. While a launcher runs, it writes every few seconds."""
    active: tuple[tuple[float, float], ...] = ()
    """Start and end of each time that a launcher ran the services; the last end moves on while it does."""
    services: tuple[ServiceRecord, ...] = ()

    @property
    def wall_s(self) -> float:
        """Wall time of all starts together."""
        return sum(end - begin for begin, end in self.active)

    def active_s(self, begin_s: float, end_s: float) -> float:
        """How much of `[begin_s, end_s]` a launcher ran. The time between an interruption and a resume does
        not count."""
        return sum(max(0.0, min(end, end_s) - max(begin, begin_s)) for begin, end in self.active)


class RecipeChange(Item, frozen=True, kw_only=True):
    """One key whose value differs between the recipe that began a run and the one that resumes it."""

    key: str
    old: str
    """JSON text; empty if the key is new."""
    new: str
    at_s: float = 0.0


class RunFolder:
    """The paths of one run folder, and reads and writes that never leave half a file.

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
        self.summary = path / "summary.json"
        self.record = path / "run.json"
        self.curve = path / "learning_curve.png"
        self.cache = path / "cache"
        self.secrets = path / "secrets"
        self._resume = path / "resume"

    def create(self) -> None:
        """Makes the folder and its parts."""
        for folder in (self.path, self.journal, self.weights, self.checkpoints, self.logs, self.samples):
            folder.mkdir(parents=True, exist_ok=True)

    def load_recipe(self) -> Recipe:
        """The recipe that the folder's run was started with. Raises: DataError if there is none."""
        if not self.recipe.is_file():
            raise DataError(f"{self.path} is not a run folder: it has no recipe.yaml")
        return parse_config(load_mapping(self.recipe), Recipe, where=str(self.recipe))

    def save_recipe(self, recipe: Recipe) -> None:
        """Writes the resolved recipe; `load_recipe` returns an equal one."""
        write_atomic(self.recipe, dump_yaml(recipe).encode())

    def load_record(self) -> RunRecord:
        """Reads `run.json`. Raises: DataError if it is missing or broken."""
        try:
            return msgspec.json.decode(self.record.read_bytes(), type=RunRecord)
        except FileNotFoundError as err:
            raise DataError(f"{self.path} is not a run folder: it has no run.json") from err
        except msgspec.DecodeError as err:
            raise DataError(f"{self.record} is broken: {err}; delete it to start the services again") from err

    def save_record(self, record: RunRecord) -> None:
        """Writes `run.json`."""
        write_atomic(self.record, msgspec.json.format(msgspec.json.encode(record), indent=2))

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its end."""
        return self.record.is_file() and self.load_record().state == "finished"

    def ask_to_resume(self) -> None:
        """Lets the next start of the dataflow continue a failed run, because a person asked for it."""
        self._resume.touch()

    @property
    def is_asked_to_resume(self) -> bool:
        """Whether `ask_to_resume` was called and the dataflow has not resumed yet."""
        return self._resume.exists()

    def resumed(self) -> None:
        """The dataflow has resumed. Later restarts leave a failed run as it is."""
        self._resume.unlink(missing_ok=True)

    def note_changes(self, changes: tuple[RecipeChange, ...]) -> None:
        """Appends changes to the history of the recipe in this folder."""
        with self.changes.open("ab") as file:
            for change in changes:
                file.write(msgspec.json.encode(msgspec.structs.replace(change, at_s=time.time())) + b"\n")

    def token(self, role: str) -> str:
        """The token of a role, made at first use, in a file that only its owner can read."""
        path = self.secrets / role
        if not path.is_file():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, secrets.token_urlsafe(24).encode(), mode=0o600)
        return path.read_text(encoding="utf-8").strip()

    @contextmanager
    def locked(self) -> Generator[None]:
        """Holds the folder for one launcher. Raises: ConfigError if another one has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "launcher.lock").open("w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as err:
                raise ConfigError(
                    f"{self.path} is in use by another astraflow process; see `astraflow status "
                    f"{self.path}`, or choose another --run-dir"
                ) from err
            yield


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Writes a file whole or not at all: a temporary file beside it is synced, then renamed."""
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
        part.unlink(missing_ok=True)  # it would take room on a full disk
        raise


# --- a recipe that changed ------------------------------------------------------------------------


def changes_between(before: Recipe, after: Recipe) -> tuple[RecipeChange, ...]:
    """Every key whose value differs, by its dotted path."""
    old = dict(_leaves(before.model_dump(mode="json"), ""))
    new = dict(_leaves(after.model_dump(mode="json"), ""))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return tuple(RecipeChange(key=key, old=old.get(key, ""), new=new.get(key, "")) for key in keys)


def refuse_changes(changes: tuple[RecipeChange, ...], folder: Path) -> None:
    """Raises: ConfigError if a change would break the run in the folder."""
    refused = [change for change in changes if not _may_change(change.key)]
    if not refused:
        return
    listed = "; ".join(f"{c.key} was {c.old or 'unset'} and is {c.new or 'unset'}" for c in refused[:5])
    more = f" (and {len(refused) - 5} more)" if len(refused) > 5 else ""
    raise ConfigError(
        f"{folder} holds a run of another recipe: {listed}{more}. Pass another --run-dir to start a new "
        "run, or undo the change to resume this one"
    )


def _may_change(key: str) -> bool:
    parts = key.split(".")
    return any(
        len(parts) >= len(pattern) and all(p in ("*", k) for p, k in zip(pattern, parts, strict=False))
        for pattern in (text.split(".") for text in MAY_CHANGE)
    )


def _leaves(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """(dotted path, JSON text) of every value; lists count as one value."""
    if isinstance(node, Mapping) and node:
        for key, value in cast("Mapping[str, Any]", node).items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
        return
    yield path, json.dumps(node, sort_keys=True)
