"""What a recipe names that pods must find: models, data, interpreters, files and modules."""

import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from astraflow.addons.data_sets.config import HubSourceConfig
from astraflow.errors import ConfigError
from astraflow.models.hub import is_hub_name
from astraflow.recipe.model_checks import models_of
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_plan import named_uses
from astraflow.run.preflight import format_mistakes
from astraflow.user_input.mistakes import as_written
from astraflow.user_input.own_sources import module_file
from astraflow.user_input.user_files import is_there

__all__ = ["pod_needs"]

_PATH_KEYS = frozenset({"path", "folder", "python"})
"""Keys whose value is a file, a folder or an interpreter."""
_READ_SECTIONS = ("tasks", "eval", "workflow", "rollout")
_NOT_IN_PODS = ("launcher", "trackers", "view")
"""Sections whose components run on the machine that starts the run."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def pod_needs(recipe: Recipe) -> list[str]:
    """Lists the paths that pods must find in the image or on the claim at /models, each with its key.

    Raises: ConfigError that lists everything that exists only on this machine, with the remedy.
    """
    wrong: list[str] = []
    needs: list[str] = []
    sources = [*recipe.tasks.sources.values(), *(config.source for config in recipe.eval.sets.values())]
    hub_data = {each.path for each in sources if isinstance(each, HubSourceConfig) and not each.is_local}
    for where, value in _places(recipe):
        if value in hub_data:
            needs.append(f"{as_written(where)}: the network, to download {value}")
        elif Path(value).is_absolute():
            needs.append(f"{as_written(where)}: {value}")
        else:
            wrong.append(_explain_path(as_written(where), value))
    wrong += _own_modules(recipe)
    if len(wrong) == 1:
        raise ConfigError(wrong[0])
    if wrong:
        raise ConfigError(format_mistakes(wrong, "the recipe for the cluster"))
    return needs


def _explain_path(where: str, value: str) -> str:
    """Explains why pods can't find a path that isn't absolute."""
    if is_hub_name(value):
        return (
            f"{where} = {value!r} is a name on the hub, and pods don't download models; put the folder in "
            "the image or below /models (cluster.k8s.models_claim), and name its path"
        )
    return (
        f"{where} = {value!r} is a path on this machine; pods need an absolute path, in the image or below "
        "/models (cluster.k8s.models_claim)"
    )


def _places(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yields the key and the value of everything that names a path or a hub name."""
    for name, policy in recipe.policies.items():
        yield from models_of(name, policy).items()
        if (offline := policy.train.auxiliary.offline) is not None:
            yield f"policies.{name}.train.auxiliary.offline.folder", offline.folder
    mapping: Mapping[str, Any] = json.loads(recipe.model_dump_json())
    for section in _READ_SECTIONS:
        yield from _named_in(mapping[section], section)


def _named_in(node: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, list):
        items: list[Any] = node  # pyright: ignore[reportUnknownVariableType] - any list of a recipe
        for idx, item in enumerate(items):
            yield from _named_in(item, f"{where}.{idx}")
            # An argument of an agent's command may be a file, relative to the current folder.
            is_argument = where.endswith(".command") and isinstance(item, str)
            if is_argument and not Path(item).is_absolute() and is_there(Path(item)):
                yield f"{where}.{idx}", item
    if not isinstance(node, dict):
        return
    section: dict[str, Any] = node  # pyright: ignore[reportUnknownVariableType] - any mapping of a recipe
    # The arguments of a user's own component may have the same keys, with values of any type.
    if section.get("name") == "prepared" and section.get("folder") == "" and "dataset" in section:
        yield f"{where}.folder", f"data/{section['dataset']}"
    match section:
        case {"attach": {"url": str(url)}}:
            is_attached = url != ""
        case _:
            is_attached = False
    for key, value in section.items():
        if not (isinstance(value, str) and value and key in _PATH_KEYS):
            yield from _named_in(value, f"{where}.{key}")
        elif key != "python" or ("/" in value and not is_attached):  # pods may have a name on their PATH
            yield f"{where}.{key}", value


def _own_modules(recipe: Recipe) -> Iterator[str]:
    """Yields a message for each component that pods can't find: its module isn't in an installed package."""
    owners = packages_distributions()
    for where, use in named_uses(recipe):
        module = use.use.partition(":")[0]
        top = module.partition(".")[0]
        is_known = top in owners or top in sys.stdlib_module_names or top == "astraflow"
        if where.startswith(_NOT_IN_PODS) or is_known:
            continue
        file = module_file(module)
        if file is None or not _INSTALLED & set(file.parts):
            state = f"is {file} on this machine" if file is not None else "is not installed here"
            yield (
                f"{as_written(where)}.use = {use.use!r}: the module {module} {state}, and pods find only "
                "what is installed in the image; make a package of it (pyproject.toml), and install it in "
                "both places"
            )
