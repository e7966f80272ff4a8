"""Prepares a data set once: gets its published files, converts their rows, writes JSONL and a manifest.

    files of the hub, or of a folder -> raw rows -> converter -> FOLDER/SPLIT.jsonl, FOLDER/manifest.json

The folder appears completely or not at all. The library `huggingface_hub` downloads files: into its cache,
where it resumes interrupted downloads. Its environment variables apply, such as HF_ENDPOINT and HF_TOKEN.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from astraflow.addons.data_sets.catalogue import DataSet, Split
from astraflow.addons.data_sets.converted import LeftOut, PreparedRow, RawRow
from astraflow.addons.data_sets.manifest import (
    CONVERSION,
    MANIFEST,
    DataManifest,
    PreparedSplit,
    PublishedFile,
    read_manifest,
    verify,
    write_manifest,
)
from astraflow.addons.data_sets.narrow_floats import with_own_digits
from astraflow.errors import ConfigError, DataError, UnavailableError
from astraflow.tasks.rows import task_from_row
from astraflow.tasks.variants import RowsConfig
from astraflow.types import Task
from astraflow.user_input.new_folder import is_free, new_folder

__all__ = ["prepare", "raw_rows"]

Progress = Callable[[str], None]


def prepare(
    data_set: DataSet,
    folder: Path,
    *,
    given: Path | None = None,
    endpoint: str = "",
    verifies: bool = False,
    progress: Progress,
) -> DataManifest:
    """Prepares a data set in a folder, unless it is prepared already; returns its manifest.

    `given`: a folder with the published files under their own names; if set, nothing is downloaded.
    `endpoint`: URL of the hub; empty: the usual one. `verifies`: also compares files with their checksums.
    `progress` gets a line per file.
    Raises: DataError if the folder contains something else, if a published file is missing or has unexpected
    content, or if a checksum differs; UnavailableError if a file cannot be downloaded.
    """
    if (folder / MANIFEST).is_file() and (current := _find_current(data_set, folder)) is not None:
        progress(f"{data_set.name}: {folder} is up to date")
        return verify(data_set, folder) if verifies else current
    if not is_free(folder) and not (folder / MANIFEST).is_file():
        raise DataError(f"{folder} exists and is not a prepared data set; choose another folder")
    with new_folder(folder, replaces=True) as fresh:
        splits = {
            name: _prepare_split(split, fresh / f"{name}.jsonl", _Origin(given, endpoint), progress)
            for name, split in data_set.splits.items()
        }
        manifest = DataManifest(
            dataset=data_set.name, conversion=CONVERSION, holds=data_set.holds, splits=splits
        )
        write_manifest(manifest, fresh)
    return verify(data_set, folder) if verifies else manifest


def _find_current(data_set: DataSet, folder: Path) -> DataManifest | None:
    """Finds the manifest of a folder that is already prepared; None if another version prepared it.

    Raises: DataError if the folder contains another data set.
    """
    try:
        return read_manifest(data_set, folder)
    except DataError:
        with suppress(ValueError, AttributeError):  # the manifest is broken, as the error says
            if json.loads((folder / MANIFEST).read_bytes()).get("dataset") == data_set.name:
                return None
        raise


# --- published files ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Origin:
    """The source of published files: the hub, or a given folder."""

    given: Path | None
    endpoint: str

    def files(self, split: Split, progress: Progress) -> Iterator[tuple[str, str, Path]]:
        """Yields the commit, name and local path of each published file. Raises: as `prepare`."""
        commit = "local"
        if self.given is None:
            commit = str(self._call_hub(split, "dataset_info", revision=split.revision).sha)
        for name in split.files:
            progress(f"{split.repository}: {name}")
            yield commit, name, self._path(split, name, commit)

    def _path(self, split: Split, name: str, commit: str) -> Path:
        if self.given is None:
            return Path(self._call_hub(split, "hf_hub_download", filename=name, revision=commit))
        path = self.given / name
        if not path.is_file():
            raise DataError(
                f"{path} does not exist; to get it, run `hf download {split.repository} --repo-type dataset "
                f"--local-dir {self.given}`"
            )
        return path

    def _call_hub(self, split: Split, method: str, **arguments: Any) -> Any:
        """Calls a method of the hub's client. Raises: UnavailableError with the reason and a workaround."""
        try:
            import huggingface_hub
        except ImportError as err:
            raise ConfigError("downloads need a package: pip install astraflow[tasks]") from err
        hub = cast("Any", huggingface_hub).HfApi(endpoint=self.endpoint or None)
        repository = {"repo_id": split.repository}
        if method == "hf_hub_download":
            repository["repo_type"] = "dataset"
        try:
            return getattr(hub, method)(**repository, **arguments)
        except (OSError, ValueError) as err:  # errors of the hub and of its HTTP library derive from OSError
            reason = (str(err).strip() or type(err).__name__).splitlines()[0]
            raise UnavailableError(
                f"{split.repository} cannot be downloaded from {hub.endpoint}: {reason}; on a machine that "
                f"reaches it, run `hf download {split.repository} --repo-type dataset --local-dir FOLDER`, "
                "copy the folder here, and pass --from FOLDER"
            ) from err


# --- conversion -----------------------------------------------------------------------------------


def _prepare_split(split: Split, out: Path, origin: _Origin, progress: Progress) -> PreparedSplit:
    published: list[PublishedFile] = []
    left_out: Counter[str] = Counter()
    digest = hashlib.sha256()
    num_rows = 0
    with out.open("wb") as file:
        for commit, name, path in origin.files(split, progress):
            with path.open("rb") as published_file:
                sha256 = hashlib.file_digest(published_file, "sha256").hexdigest()
            published.append(
                PublishedFile(repository=split.repository, revision=commit, file=name, sha256=sha256)
            )
            for row in _assign_ids(_convert_rows(path, split, left_out), split, num_rows, left_out):
                line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
                digest.update(line)
                file.write(line)
                num_rows += 1
        num_bytes = file.tell()
    if not num_rows:
        raise DataError(
            f"{split.repository}: no row of {', '.join(split.files)} can be used: {dict(left_out)}"
        )
    return PreparedSplit(
        file=out.name,
        num_rows=num_rows,
        num_bytes=num_bytes,
        sha256=digest.hexdigest(),
        left_out=dict(left_out),
        published=tuple(published),
    )


def _assign_ids(
    rows: Iterator[PreparedRow], split: Split, first: int, left_out: Counter[str]
) -> Iterator[PreparedRow]:
    """Gives each row an id: a row without one gets its number, counted from `first`.

    If the data set repeats rows, only the first row of each id is kept.
    """
    ids: set[str] = set()
    for number, row in enumerate(rows, start=first):
        row.setdefault("id", str(number))
        if split.is_repeated:
            if row["id"] in ids:
                left_out["it repeats an earlier row"] += 1
                continue
            ids.add(row["id"])
        yield row


def _convert_rows(path: Path, split: Split, left_out: Counter[str]) -> Iterator[PreparedRow]:
    """Converts the rows of a file; counts those that cannot be used."""
    for where, raw in raw_rows(path):
        try:
            row = split.convert(raw)
        except (DataError, ValueError, KeyError, TypeError, AttributeError) as err:
            # The file has changed since the converter was written; the error says what is missing.
            raise DataError(f"{where}: {err}") from err
        if isinstance(row, LeftOut):
            left_out[row.reason] += 1
        elif reason := _refusal(row):
            left_out[reason] += 1
        else:
            yield row


def _refusal(row: PreparedRow) -> str:
    """Why a row cannot be read as a task or document; empty if it can."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # JSON may contain halves of surrogate pairs
        return "it has text that is not valid Unicode"
    if "prompt" in row:
        try:
            task_from_row(row, RowsConfig(), task=Task(id="", source="", prompt=""), where="")
        except DataError:
            return "its prompt or answer is missing, or is not a text"
    return ""


# --- rows of a published file ---------------------------------------------------------------------

_ROWS_AT_A_TIME = 64
"""Number of rows of a Parquet file in memory at once: a row of a programming data set may have megabytes."""


def raw_rows(path: Path) -> Iterator[tuple[str, RawRow]]:
    """Yields each row with its place, for messages.

    Raises: DataError if the file is missing or cannot be read; ConfigError if a library is missing.
    """
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(
            f"{path}: files ending in {path.suffix!r} are not supported (choices: {', '.join(readers)})"
        )
    number = 0
    try:
        for number, row in enumerate(readers[path.suffix](path), start=1):
            if not isinstance(row, dict):
                raise DataError(f"{path}, row {number}, is a {type(row).__name__}; expected a mapping")
            yield f"{path}, row {number}", cast("dict[str, Any]", row)
    except (OSError, ValueError, RecursionError) as err:
        if isinstance(err, DataError):
            raise
        raise DataError(f"{path} cannot be read after row {number}: {err}") from err


def _jsonl_rows(path: Path) -> Iterator[object]:
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def _json_rows(path: Path) -> Iterator[object]:
    rows: object = json.loads(path.read_bytes())
    if not isinstance(rows, list):
        raise DataError(f"{path} contains a {type(rows).__name__}; expected a list of rows")
    yield from cast("list[object]", rows)


def _parquet_rows(path: Path) -> Iterator[object]:
    try:
        from pyarrow import parquet
    except ImportError as err:
        raise ConfigError("Parquet files need a package: pip install astraflow[tasks]") from err
    with cast("Any", parquet).ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
            yield from with_own_digits(batch.to_pylist(), batch.schema)
