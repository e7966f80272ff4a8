"""Labels a sweep's runs in trackers: with the sweep as their group, and with their values as tags."""

import contextlib
from pathlib import Path

import msgspec

from astraflow.addons.experiments.group_file import Group, GroupMember
from astraflow.config import Use
from astraflow.errors import ConfigError
from astraflow.recipe.gallery import recipe_file
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.trackers import TrackerVariant

__all__ = ["tracker_overrides"]

_MAX_TAG = 64
"""W&B refuses longer tags."""


def tracker_overrides(folder: Path, group: Group, member: GroupMember) -> list[str]:
    """Returns the overrides that label a member's run in the trackers of its recipe.

    A group that the recipe names stays, and its tags come first. There are no overrides if no tracker takes
    labels, or if the recipe can't be read, which the run itself then reports.
    """
    with contextlib.suppress(ConfigError):
        file, _ = recipe_file(group.recipe)
        trackers = load_recipe(file, member.overrides).trackers
        tags = [tag[:_MAX_TAG] for tag in _values(group, member)]
        labeled = [_labeled(tracker, folder.resolve().name, tags) for tracker in trackers]
        if labeled != list(trackers):
            mappings = [tracker.model_dump(mode="json") for tracker in labeled]
            # JSON is also valid YAML.
            return [f"trackers={msgspec.json.encode(mappings).decode()}"]
    return []


def _values(group: Group, member: GroupMember) -> list[str]:
    """Returns the values by which a member differs from others, such as `lr=1e-4` and `seed=0`."""
    split = [override.partition("=") for override in member.overrides]
    own = [(key, value) for key, _, value in split if key in group.values or key == "seed"]
    return [f"{key.rpartition('.')[2]}={value}" for key, value in own]


def _labeled(tracker: TrackerVariant | Use, group: str, tags: list[str]) -> TrackerVariant | Use:
    own = tracker.model_dump()
    labels: dict[str, object] = {}
    if own.get("group") == "":
        labels["group"] = group
    if isinstance(tracker, TrackerVariant) and "tags" in own:
        labels["tags"] = tuple(dict.fromkeys([*own["tags"], *tags]))
    return tracker.model_copy(update=labels) if labels else tracker
