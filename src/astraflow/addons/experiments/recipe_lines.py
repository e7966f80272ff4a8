"""A recipe as flat lines, so that two recipes can be compared."""

from typing import TYPE_CHECKING, Any, cast

from astraflow.errors import ConfigError, DataError
from astraflow.recipe.run_folder import RunFolder

if TYPE_CHECKING:
    from astraflow.recipe.recipe import Recipe

__all__ = ["flat_lines", "recipe_lines"]


def recipe_lines(folder: RunFolder) -> dict[str, str]:
    """Maps dotted keys to the values of the run's resolved recipe, without its secrets.

    Raises: DataError if it cannot be read.
    """
    try:
        return flat_lines(folder.load_recipe())
    except ConfigError as err:  # nobody has just written it, so the folder is damaged
        raise DataError(str(err)) from err


def flat_lines(recipe: "Recipe") -> dict[str, str]:
    """Maps dotted keys to the values of a resolved recipe."""
    lines: dict[str, str] = {}
    _flatten("", recipe.model_dump(mode="json"), lines)
    return lines


def _flatten(key: str, value: Any, lines: dict[str, str]) -> None:
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = list(cast("dict[str, Any]", value).items())
    elif isinstance(value, list):
        parts = [(str(idx), each) for idx, each in enumerate(cast("list[Any]", value))]
    if not parts:
        lines[key] = str(cast("object", value))
    for name, each in parts:
        _flatten(f"{key}.{name}" if key else name, each, lines)
