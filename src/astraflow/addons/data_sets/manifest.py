"""The manifest of a prepared data set: its files, their checksums, and where they come from.

A folder is prepared if it has a manifest, which is written last. Each reader of the folder checks the sizes
of the files, which takes almost no time; `verify` compares their checksums.
"""

import hashlib
from pathlib import Path

import msgspec

from astraflow.addons.data_sets.catalogue import DataSet
from astraflow.errors import DataError
from astraflow.user_input.mistakes import hint

__all__ = [
    "CONVERSION",
    "MANIFEST",
    "DataManifest",
    "PreparedSplit",
    "PublishedFile",
    "how_to_get",
    "read_manifest",
    "split_file",
    "verify",
    "write_manifest",
]

MANIFEST = "manifest.json"
"""Name of the manifest in the folder of a data set."""
CONVERSION = 2
"""Increased when converters make different rows from the same files; older folders are then prepared
again."""


class PublishedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A published file that rows come from."""

    repository: str
    revision: str
    """Commit of the repository; `local` for files that were not downloaded."""
    file: str
    sha256: str


class PreparedSplit(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared file."""

    file: str
    num_rows: int
    num_bytes: int
    sha256: str
    left_out: dict[str, int]
    """Number of published rows that are not in the file, by reason."""
    published: tuple[PublishedFile, ...]


class DataManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `manifest.json`."""

    dataset: str
    conversion: int
    holds: str
    """`tasks` or `documents`."""
    splits: dict[str, PreparedSplit]


def how_to_get(dataset: str, folder: Path) -> str:
    """Names the command that prepares a data set, for messages."""
    return f"run `astraflow data prepare {dataset} --out {folder}`"


def read_manifest(data_set: DataSet, folder: Path) -> DataManifest:
    """Reads the manifest of a prepared folder.

    Raises: DataError that names the command to run if the folder is missing, contains another data set, or
    was prepared by another version of the converters.
    """
    path = folder / MANIFEST
    how = how_to_get(data_set.name, folder)
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=DataManifest)
    except FileNotFoundError as err:
        raise DataError(f"the data set {data_set.name} is not prepared in {folder}; {how}") from err
    except (OSError, msgspec.DecodeError) as err:
        raise DataError(f"{path} cannot be read: {err}; remove the folder and {how}") from err
    if manifest.dataset != data_set.name:
        raise DataError(
            f"{folder} contains the data set {manifest.dataset}, not {data_set.name}; "
            f"{how} with another folder"
        )
    if manifest.conversion != CONVERSION:
        raise DataError(f"{folder} was prepared by another version of AstraFlow; {how}")
    return manifest


def write_manifest(manifest: DataManifest, folder: Path) -> None:
    """Writes the manifest, which marks the folder as prepared."""
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST).write_bytes(encoded + b"\n")


def split_file(data_set: DataSet, folder: Path, split: str) -> tuple[Path, PreparedSplit]:
    """Finds the file of a split, and checks its size.

    Raises: DataError if the folder is not prepared, has no such split, or if the file is incomplete.
    """
    splits = read_manifest(data_set, folder).splits
    if split not in splits:
        raise DataError(f"the data set {data_set.name} has no split {split!r}{hint(split, list(splits))}")
    prepared = splits[split]
    path = folder / prepared.file
    how = how_to_get(data_set.name, folder)
    try:
        size = path.stat().st_size
    except OSError as err:
        raise DataError(f"{path}: {err.strerror}; remove the folder and {how}") from err
    if size != prepared.num_bytes:
        raise DataError(
            f"{path} has {size} bytes instead of {prepared.num_bytes}; remove the folder and {how}"
        )
    return path, prepared


def verify(data_set: DataSet, folder: Path) -> DataManifest:
    """Compares each prepared file with its checksum. Raises: DataError that names a file that differs."""
    manifest = read_manifest(data_set, folder)
    for split in manifest.splits:
        path, prepared = split_file(data_set, folder, split)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != prepared.sha256:
            raise DataError(
                f"{path} has the SHA-256 {digest} instead of {prepared.sha256}; remove the folder and "
                f"{how_to_get(data_set.name, folder)}"
            )
    return manifest
