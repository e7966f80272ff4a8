"""`group.json`: which runs a sweep consists of, and by which code and recipe they run.

A group's runs are comparable only if they differ by nothing but the values and seeds of the sweep. Therefore,
the file also has digests of AstraFlow's code, of the modules that the recipe names, and of each member's
resolved recipe. A sweep that continues checks them.
"""

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import astraflow
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.run_folder import write_atomic
from astraflow.types import Item
from astraflow.user_input.user_files import read_file

__all__ = [
    "GROUP_FILE",
    "Group",
    "GroupMember",
    "code_digests",
    "failure_of",
    "load_group",
    "members_of",
    "refuse_other_code",
    "refuse_other_members",
    "save_group",
    "split_values",
]

GROUP_FILE = "group.json"
_UNSAFE = re.compile(r"[^\w.=+-]+")
_MODULE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
_MAX_NAME = 120
_MAX_MEMBERS = 1000
_MAX_FILE_BYTES = 32 * 2**20


class GroupMember(Item, frozen=True, kw_only=True):
    """One run of a group."""

    name: str
    """Name of its folder in the group's folder."""
    overrides: tuple[str, ...]
    recipe: str = ""
    """Digest of its resolved recipe."""


class Group(Item, frozen=True, kw_only=True):
    """The content of `group.json`. Example: `load_group(Path("runs/quickstart-sweep")).members`."""

    name: str
    recipe: str
    """The recipe file or name, as typed."""
    on: str = ""
    """The launcher of the rollout services; empty for the recipe's."""
    values: dict[str, tuple[str, ...]] = {}  # noqa: RUF012 (msgspec copies it)
    """Swept key -> its values."""
    members: tuple[GroupMember, ...] = ()
    code: dict[str, str] = {}  # noqa: RUF012
    """Package of AstraFlow, or module of the recipe -> digest of its source."""
    failed: dict[str, str] = {}  # noqa: RUF012
    """Member that failed -> why. It isn't tried again unless a person asks for it."""


def split_values(text: str) -> list[str]:
    """Splits `0.1,0.2` at the commas that are not inside brackets, braces or quotes."""
    parts = [""]
    depth = 0
    quote = ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        depth += 0 if quote else (char in "[{(") - (char in ")}]")
        if char == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def members_of(overrides: Sequence[str], seeds: Sequence[int]) -> tuple[GroupMember, ...]:
    """Returns a member for each combination of values and each seed.

    Raises: ConfigError if an override has no value, or there are too many members.
    """
    axes: list[list[str]] = []
    fixed: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or key == "seed":
            raise ConfigError(
                f"{override!r} is not KEY=VALUE[,VALUE...]; seeds are given by --seeds, e.g. --seeds 3"
            )
        values = split_values(text)
        if "" in values and len(values) > 1:
            raise ConfigError(f"{override!r} has an empty value between its commas")
        if len(values) > 1:
            axes.append([f"{key}={value}" for value in dict.fromkeys(values)])
        else:
            fixed.append(override)
    members: dict[str, GroupMember] = {}
    for chosen in itertools.product(*axes):
        for seed in seeds:
            own = (*fixed, *chosen, f"seed={seed}")
            name = _folder_name([*chosen, f"seed={seed}"])
            members[name] = GroupMember(name=name, overrides=own)
            if len(members) > _MAX_MEMBERS:
                raise ConfigError(f"this sweep has more than {_MAX_MEMBERS} runs; sweep fewer values")
    return tuple(members.values())


def _folder_name(overrides: Sequence[str]) -> str:
    """Names a member by the last part of each key. Long names end with a digest."""
    short = "_".join(override.partition("=")[0].rpartition(".")[2] + "=" + override.partition("=")[2]
                     for override in overrides)  # fmt: skip
    whole = "_".join(overrides)
    name = _UNSAFE.sub("-", short).lstrip(".")
    if len(name) > _MAX_NAME or name != short:
        name = f"{name[:_MAX_NAME]}-{_digest(whole.encode())[:8]}"
    return name


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def code_digests(recipe: Mapping[str, str], folders: Sequence[str]) -> dict[str, str]:
    """Digests the source of AstraFlow's packages, and of the modules in `folders` that a recipe names."""
    root = Path(astraflow.__file__).parent
    digests: dict[str, str] = {}
    for package in sorted(path for path in root.iterdir() if path.is_dir() or path.suffix == ".py"):
        files = sorted(package.rglob("*.py")) if package.is_dir() else [package]
        if files:
            digests[f"astraflow.{package.stem}"] = _digest(b"\0".join(path.read_bytes() for path in files))
    for value in sorted(set(recipe.values())):
        if match := _MODULE.fullmatch(value):
            part = match[1].replace(".", "/")
            places = [Path(folder, f"{part}{end}") for folder in folders for end in (".py", "/__init__.py")]
            if module := next((place for place in places if place.is_file()), None):
                digests[match[1]] = _digest(module.read_bytes())
    return digests


def refuse_other_code(group: Group, code: Mapping[str, str], where: Path) -> None:
    """Checks that the group's members that are still to run have the code of the others.

    Raises: ConfigError with what has changed.
    """
    changed = [name for name in {**group.code, **code} if group.code.get(name) != code.get(name)]
    if changed:
        raise ConfigError(
            f"the code has changed since {where} began ({', '.join(sorted(changed)[:5])}), so its further "
            "runs would differ by more than their values; go back to that code, or start a new group with "
            "another --group-dir"
        )


def refuse_other_members(group: Group, members: Sequence[GroupMember], where: Path) -> None:
    """Checks that a sweep into an existing folder asks for the same members. Raises: ConfigError."""
    old = {member.name: member for member in group.members}
    new = {member.name: member for member in members}
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if changed:
        raise ConfigError(
            f"{where} is a group of other runs; they differ by {', '.join(changed[:5])}; `astraflow sweep "
            f"{where}` continues it, and another --group-dir starts a new group"
        )


def load_group(folder: Path) -> Group:
    """Reads the group in a folder. Raises: DataError if there is none, or it is broken."""
    path = folder / GROUP_FILE
    if not os.path.lexists(path):
        raise DataError(f"{folder} is not the folder of a sweep: it has no {GROUP_FILE}")
    try:
        group = msgspec.json.decode(read_file(path, "the sweep's", max_bytes=_MAX_FILE_BYTES), type=Group)
    except msgspec.DecodeError as err:
        raise DataError(f"{path} is broken: {err}") from err
    if len(group.members) > _MAX_MEMBERS:
        raise DataError(
            f"{path} is broken: it has {len(group.members):,} members; a sweep has at most {_MAX_MEMBERS:,}"
        )
    for member in group.members:
        if member.name in {"", ".", ".."} or not member.name.isprintable() or "/" in member.name:
            raise DataError(f"{path} is broken: {member.name[:100]!r} is not the name of a member's folder")
    return group


def failure_of(run_dir: Path) -> str:
    """Returns why a member of a sweep failed, even if it never made its folder; empty if it didn't fail."""
    with contextlib.suppress(DataError):
        return load_group(run_dir.parent).failed.get(run_dir.name, "")
    return ""


def save_group(folder: Path, group: Group) -> None:
    """Writes `group.json`."""
    write_atomic(folder / GROUP_FILE, msgspec.json.format(msgspec.json.encode(group), indent=2))
