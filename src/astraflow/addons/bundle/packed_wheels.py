"""Makes wheels from installed distributions: the same files that run here, without an index or a network.

A distribution's RECORD lists its files with their checksums, and a wheel is an archive of exactly these
files. An installed distribution can therefore be turned into a wheel again. What an installer adds (compiled
modules, start scripts, its own notes) is left out, because the next installer adds it again. A file that was
changed after the installation is an error. A distribution that is installed from a source folder doesn't have
its own files there, so its wheel is built.
"""

import base64
import csv
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlparse

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from astraflow.errors import DataError

__all__ = ["needed_distributions", "pack_wheel", "pack_wheels"]

_OF_INSTALLERS = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
"""Files that an installer writes to a dist-info folder."""
_EPOCH = (2020, 1, 1, 0, 0, 0)
"""Timestamp of all files in a wheel, so that the same files make the same wheel."""
_EXECUTABLE = 0o755 << 16
_PLAIN = 0o644 << 16


def needed_distributions(requirements: Iterable[str]) -> list[Distribution]:
    """Returns the installed distributions that requirements need here, directly or indirectly, by name.

    Example: `needed_distributions(["astraflow[quickstart]"])`.
    Raises: DataError if a distribution is not installed.
    """
    distributions: dict[str, Distribution] = {}
    visited: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "the bundle") for text in requirements]
    while waiting:
        wanted, by = waiting.pop()
        name = canonicalize_name(wanted.name)
        try:
            distributions[name] = distribution(wanted.name)
        except PackageNotFoundError as err:
            raise DataError(
                f"{by} needs {wanted}, which is not installed here; install it, and make the bundle again"
            ) from err
        for extra in ("", *sorted(wanted.extras)):
            if (name, extra) not in visited:
                visited.add((name, extra))
                waiting += [(each, wanted.name) for each in _requirements(distributions[name], extra)]
    return [distributions[name] for name in sorted(distributions)]


def _requirements(dist: Distribution, extra: str) -> list[Requirement]:
    """Returns what a distribution needs here: with one of its extras or, if `extra` is empty, without."""
    every = [Requirement(text) for text in dist.requires or ()]
    return [each for each in every if each.marker is None or each.marker.evaluate({"extra": extra})]


def pack_wheels(distributions: Iterable[Distribution], to: Path, ending: str = "") -> None:
    """Writes wheels into the folder `wheels` below a folder, and their versions into `requirements.txt`.

    `ending`: of the names of both. Raises: as `pack_wheel`.
    """
    wheels = to / f"wheels{ending}"
    wheels.mkdir()
    lines: list[str] = []
    for dist in distributions:
        pack_wheel(dist, wheels)
        lines.append(f"{dist.name}=={dist.version}\n")
    (to / f"requirements{ending}.txt").write_text("".join(lines))


def pack_wheel(dist: Distribution, to: Path) -> Path:
    """Writes the wheel of an installed distribution into a folder, and returns its path.

    Raises: DataError if a file is missing or was changed, or if a source folder can't be built.
    """
    text = dist.read_text("direct_url.json")
    origin: dict[str, Any] = json.loads(text) if text else {}
    if not origin.get("dir_info", {}).get("editable"):
        return _packed(dist, to)
    return _built(dist, Path(unquote(urlparse(str(origin["url"])).path)), to)


def _built(dist: Distribution, source: Path, to: Path) -> Path:
    before = set(to.glob("*.whl"))
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(to), str(source)]
    # Try without build isolation first: if the build tool is installed, no network is needed.
    done = subprocess.run([*argv, "--no-build-isolation"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    wheels = set(to.glob("*.whl")) - before
    if done.returncode != 0 or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise DataError(
            f"{dist.name} is installed from {source}, and cannot be built into a wheel there: {last}; "
            "without a network, install its build tool first (pip install hatchling)"
        )
    return wheels.pop()


def _packed(dist: Distribution, to: Path) -> Path:
    files = _files(dist)
    folders = (place.split("/")[0] for place in files)
    info = next((name for name in folders if name.endswith(".dist-info")), "")
    if not info:
        raise DataError(f"{dist.name} {dist.version} has no dist-info folder; install it with pip again")
    wheel_text = dist.read_text("WHEEL") or ""
    tags = [line.partition(":")[2].strip() for line in wheel_text.splitlines() if line.startswith("Tag:")]
    if not tags:
        raise DataError(
            f"{dist.name} {dist.version} was not installed from a wheel; install it with pip again"
        )
    parts = [
        ".".join(dict.fromkeys(column)) for column in zip(*(tag.split("-") for tag in tags), strict=True)
    ]
    path = to / f"{info.removesuffix('.dist-info')}-{'-'.join(parts)}.whl"
    rows: list[tuple[str, str, int | str]] = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for place, (file, digest) in sorted(files.items()):
            content = _checked(dist, file, digest)
            mode = _EXECUTABLE if file.stat().st_mode & 0o100 else _PLAIN
            _write(archive, place, content, mode)
            rows.append((place, f"sha256={_sha256(content)}", len(content)))
        record = f"{info}/RECORD"
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        _write(archive, record, text.getvalue().encode(), _PLAIN)
    return path


def _write(archive: zipfile.ZipFile, place: str, content: bytes, mode: int) -> None:
    entry = zipfile.ZipInfo(place, _EPOCH)
    entry.external_attr = mode
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, content)


def _files(dist: Distribution) -> dict[str, tuple[Path, str]]:
    """Maps paths in the wheel to (file, checksum in RECORD, which may be empty)."""
    if not dist.files:
        raise DataError(
            f"{dist.name} {dist.version} has no RECORD of its files (it may be the system's own); install it "
            "with pip into this environment"
        )
    contents: dict[str, tuple[Path, str]] = {}
    scripts = {entry.name for entry in dist.entry_points if entry.group.endswith("_scripts")}
    folders = [PurePosixPath(each).parts[0] for each in dist.files]
    infos = (name.removesuffix(".dist-info") for name in folders if name.endswith(".dist-info"))
    data = f"{next(infos, dist.name)}.data"
    for each in dist.files:
        place = PurePosixPath(each)
        digest = f"{each.hash.mode}={each.hash.value}" if each.hash else ""
        if place.suffix == ".pyc" or (place.parent.suffix == ".dist-info" and place.name in _OF_INSTALLERS):
            continue
        if ".." not in place.parts:
            contents[str(place)] = (Path(str(each.locate())), digest)
        elif place.parent.name in {"bin", "Scripts"}:
            if place.name.removesuffix(".exe") not in scripts:
                contents[f"{data}/scripts/{place.name}"] = (Path(str(each.locate())), "")
        else:
            inside = PurePosixPath(*(part for part in place.parts if part != ".."))
            contents[f"{data}/data/{inside}"] = (Path(str(each.locate())), digest)
    return contents


def _checked(dist: Distribution, file: Path, digest: str) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as err:
        raise DataError(f"{dist.name} {dist.version} is incomplete: {err}; install it again") from err
    if digest.startswith("sha256=") and digest != f"sha256={_sha256(content)}":
        raise DataError(
            f"{file} was changed after {dist.name} {dist.version} was installed; install it again, so that "
            "the bundle has what the version says"
        )
    return content


def _sha256(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
