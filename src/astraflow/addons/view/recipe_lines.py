"""A recipe as flat lines, so that two recipes can be compared."""

from typing import Any, cast

from astraflow.recipe.run_folder import RunFolder

__all__ = ["recipe_lines"]


def recipe_lines(folder: RunFolder) -> dict[str, str]:
    """Maps dotted keys to the values of the run's resolved recipe, without its secrets.

    Raises: DataError or ConfigError if it cannot be read.
    """
    lines: dict[str, str] = {}
    _flatten("", folder.load_recipe().model_dump(mode="json"), lines)
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
