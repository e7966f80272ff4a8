"""The files of a folder that go into a bundle: only regular files, all checked before anything is copied.

A link to a file of the same folder is copied as that file. The same holds for a model in the hub's cache,
where all files of a snapshot are links to `blobs`. Other links are refused because they could bring any file
of this machine into the bundle.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from astraflow.errors import DataError
from astraflow.user_input.user_files import check_regular, format_path

__all__ = ["CHECKSUMS", "copy_files", "files_of", "write_checksums"]

CHECKSUMS = "checksums.txt"


def files_of(source: Path) -> dict[str, Path]:
    """Maps paths below the source to the files to read. If the source is a file, its path is empty.

    Raises: DataError, with the remedy, if something can't be in a bundle.
    """
    _check_name(source)
    if not source.is_dir():
        _check_file(source)
        return {"": source}
    if not source.name:
        raise DataError(f"{source} is the root of the file system; name the folder that the recipe reads")
    return dict(_files_below(source))


def copy_files(files: Mapping[str, Path], to: Path) -> None:
    """Copies what `files_of` found. Raises: OSError."""
    for place, file in files.items():
        target = to / place if place else to
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _files_below(source: Path) -> Iterator[tuple[str, Path]]:
    is_open = [source]
    allowed = [source.resolve()]
    if source.parent.name == "snapshots":  # of the Hugging Face hub's cache, whose files are links to blobs
        allowed.append(source.parent.parent / "blobs")
    while is_open:
        folder = is_open.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as err:
            raise DataError(f"{format_path(folder)} cannot be read: {err.strerror}") from err
        for entry in entries:
            path = Path(entry.path)
            _check_name(path)
            if entry.is_dir(follow_symlinks=False):
                is_open.append(path)
                continue
            if entry.is_symlink():
                _check_link(path, allowed)
            _check_file(path)
            yield path.relative_to(source).as_posix(), path


def _check_name(path: Path) -> None:
    """Checks that the list of checksums can contain a name."""
    if not path.name.isprintable() or "\\" in path.name:
        raise DataError(
            f"{path.name!r} in {format_path(path.parent)} has a name that a list of checksums cannot hold; "
            "rename it to one without line ends, hidden characters and `\\`"
        )


def _check_link(path: Path, allowed: list[Path]) -> None:
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as err:  # RuntimeError: a loop of links, before Python 3.13
        raise DataError(f"{format_path(path)} is a link that leads nowhere; remove it") from err
    if target.is_dir() or not any(target.is_relative_to(folder) for folder in allowed):
        raise DataError(
            f"{format_path(path)} is a link to {format_path(target)}, which a bundle does not follow: it "
            "copies links to files of the same folder only; put the file itself in its place, or remove it"
        )


def _check_file(path: Path) -> None:
    check_regular(path, "for the bundle:")
    if not os.access(path, os.R_OK):
        raise DataError(f"{format_path(path)} cannot be read: permission denied")


def write_checksums(folder: Path) -> int:
    """Writes the checksums of all files in a folder, and returns their total size in bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines: list[str] = []
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {path.relative_to(folder).as_posix()}\n")
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")
    return sum(path.stat().st_size for path in files)
