"""What is checked on this machine depends on where rollout services run."""

import json
from typing import ClassVar, Literal

import pytest

from astraflow.errors import ConfigError
from astraflow.recipe.launcher_variant import LauncherVariant
from astraflow.recipe.recipe import Recipe
from astraflow.run.start_checks import check_devices


class Elsewhere(LauncherVariant):
    """Starts rollout services on other machines."""

    name: Literal["elsewhere"] = "elsewhere"


class InContainers(LauncherVariant):
    """Starts rollout services on this machine, in containers."""

    spans_machines: ClassVar[bool] = False
    name: Literal["containers"] = "containers"


def launched_by(launcher: LauncherVariant) -> Recipe:
    """A recipe whose engine is on a GPU that no machine has."""
    mapping = {
        "name": "small",
        "tasks": {"sources": {"sums": {"name": "jsonl", "path": "tasks.jsonl"}}},
        "policies": {"actor": {"model": "models/actor"}},
        "rollout": {"engine": {"name": "torch", "device": "cuda:999"}},
    }
    return Recipe.model_validate_json(json.dumps(mapping)).model_copy(update={"launcher": launcher})


def test_devices_of_services_on_other_machines_are_not_checked_here() -> None:
    check_devices(launched_by(Elsewhere()))


def test_devices_of_services_that_an_installed_launcher_starts_here_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.device = 'cuda:999' needs a GPU"):
        check_devices(launched_by(InContainers()))
