"""Turns what a person typed after `astraflow sweep` into a group, and checks each member's recipe."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from astraflow.addons.experiments.group_file import (
    GROUP_FILE,
    Group,
    GroupMember,
    code_digests,
    load_group,
    members_of,
    refuse_other_code,
    refuse_other_members,
    save_group,
    split_values,
)
from astraflow.addons.experiments.recipe_lines import flat_lines
from astraflow.cli.own_modules import module_path
from astraflow.cli.runs import load_with_checks
from astraflow.errors import ConfigError
from astraflow.recipe.document import keys_as_written
from astraflow.recipe.gallery import build_models, recipe_file

__all__ = ["GroupRequest", "open_group"]

_MAX_SEEDS = 1000


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """What was typed."""

    recipe: str
    """A recipe, or the folder of a group."""
    overrides: tuple[str, ...]
    seeds: str
    group_dir: Path | None
    on: str


def open_group(request: GroupRequest) -> tuple[Path, Group]:
    """Returns the folder and group that a request names; makes them if they are new.

    Raises: ConfigError if a recipe is wrong, or the group has other members or other code; DataError.
    """
    if (Path(request.recipe) / GROUP_FILE).is_file():
        return _known_group(request)
    members = members_of(request.overrides, _seeds_of(request.seeds))
    values = {
        key: tuple(split_values(text)) for key, _, text in (o.partition("=") for o in request.overrides)
    }
    group = Group(
        name="",
        recipe=request.recipe,
        on=request.on,
        values={key: own for key, own in values.items() if len(own) > 1},
        members=members,
    )
    group = _resolved(group)
    folder = request.group_dir or Path("runs") / f"{group.name}-sweep"
    if (folder / GROUP_FILE).is_file():
        known = load_group(folder)
        refuse_other_code(known, group.code, folder)
        refuse_other_members(known, group.members, folder)
        return folder, known
    folder.mkdir(parents=True, exist_ok=True)
    save_group(folder, group)
    return folder, group


def _known_group(request: GroupRequest) -> tuple[Path, Group]:
    """Returns an existing group whose code and recipes are still the same."""
    folder = Path(request.recipe)
    if request.overrides or request.group_dir:
        raise ConfigError(
            f"{folder} is a group, whose values and folder are fixed; leave out "
            f"{' '.join(request.overrides) or '--group-dir'}"
        )
    group = load_group(folder)
    now = _resolved(group)
    refuse_other_code(group, now.code, folder)
    refuse_other_members(group, now.members, folder)
    return folder, group


def _resolved(group: Group) -> Group:
    """Loads each member's recipe, builds missing tiny models, and adds names and digests."""
    file, is_named = recipe_file(group.recipe)
    folders = module_path(file)
    members: list[GroupMember] = []
    lines: dict[str, str] = {}
    models: dict[str, None] = {}
    name = group.name
    for member in group.members:
        with keys_as_written(file, member.overrides):
            recipe = load_with_checks(file, member.overrides)
        own = flat_lines(recipe)
        digest = hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()[:16]
        members.append(msgspec.structs.replace(member, recipe=digest))
        lines |= own
        models |= dict.fromkeys(policy.model for policy in recipe.policies.values())
        name = name or recipe.name
    if is_named:
        build_models(list(models), print)
    return msgspec.structs.replace(
        group, name=name, members=tuple(members), code=code_digests(lines, folders)
    )


def _seeds_of(text: str) -> list[int]:
    """Reads `3` as the seeds 0, 1, and 2, and `0,7` as these two. Raises: ConfigError."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as err:
        raise ConfigError(
            f"--seeds {text}: give a number of seeds, such as 3, or a list, such as 0,7"
        ) from err
    if "," in text:
        return list(dict.fromkeys(numbers))
    if not 1 <= numbers[0] <= _MAX_SEEDS:
        raise ConfigError(f"--seeds {text} is not between 1 and {_MAX_SEEDS}")
    return list(range(numbers[0]))
