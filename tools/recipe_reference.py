"""Writes docs/recipes.md, the reference of every recipe key, from the config classes themselves.

`--check` writes nothing and fails if the page is not up to date.
"""

import sys
import types
import typing
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from astraflow.config import Config, Use
from astraflow.launch.config import Recipe
from astraflow.launch.folder import MAY_CHANGE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recipes.md"
HEAD = """# Recipe reference

*Generated from the config classes by `make docs`; do not edit.*

A recipe is one YAML file. `extends: other.yaml` takes another recipe (path relative to this file) and lays
this one's keys over it; within `policies`, `extends: NAME` does the same with another policy. On the command
line, `a.b.c=value` overrides one key. Sections are laid over each other key by key, but an empty one
(`eval.sets={}`) replaces what was there. An unknown key is an error that names the nearest valid one. Paths
of models and data are relative to the folder that the command runs in.

Where a section has several **variants**, `name` chooses one; `{use: "module:attr", args: {...}}` puts a
component of your own in its place, whose arguments are checked against its signature.

A run can be resumed with other values of [some keys](#keys-that-may-change) only.

"""
TAIL = """
## Keys that may change

`astraflow run` with the folder of an interrupted run resumes it. These keys, and all below them, may then
have other values; the change is noted in the run folder's `recipe_changes.jsonl`. A change of any other key
is refused, since the journal already holds data that the former value decided.

"""


def configs_in(annotation: Any) -> list[type[Config]]:
    """Config classes within an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [c for arg in get_args(annotation) for c in configs_in(arg)]


def type_text(annotation: Any) -> str:
    """A type as a reader of YAML sees it."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is typing.Annotated:
        return type_text(args[0])
    if origin is typing.Literal:
        return " \\| ".join(f"`{a}`" for a in args)
    if origin in (typing.Union, types.UnionType):
        return " \\| ".join(dict.fromkeys(type_text(a) for a in args))
    if origin is tuple:
        inner = [type_text(a) for a in args if a is not Ellipsis]
        return f"list of {inner[0]}" if Ellipsis in args else f"list [{', '.join(inner)}]"
    if origin is dict:
        return f"mapping name → {type_text(args[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    names = {str: "text", int: "integer", float: "number", bool: "true/false"}
    return names.get(annotation, "any value")


def default_text(default: Any, factory: Any) -> str:
    """A default as YAML would say it."""
    if default is PydanticUndefined:
        return "`{}`" if factory is not None else "required"
    if isinstance(default, Config):
        return f"`{default.name}`" if "name" in type(default).model_fields else "defaults"
    if isinstance(default, tuple):
        return "`[" + ", ".join(default_text(d, None).strip("`") for d in default) + "]`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default!r}`" if isinstance(default, str) else f"`{default}`"


def bounds_text(metadata: list[Any]) -> str:
    """Bounds of a number, e.g. `(>= 1)`."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    parts = [
        f"{sign} {getattr(m, key):g}" for m in metadata for key, sign in signs.items() if hasattr(m, key)
    ]
    return f" ({', '.join(parts)})" if parts else ""


def meaning_text(config: type[Config], name: str) -> str:
    """A field's own docstring; else that of the section that it holds; a variant's name is the variant's."""
    field = config.model_fields[name]
    inner = configs_in(field.annotation)
    text = field.description or (inner[0].__doc__ if len(inner) == 1 else "") or ""
    if name == "name" and get_origin(field.annotation) is typing.Literal:
        text = "Chooses this variant."
    return " ".join(text.split())


def section(config: type[Config]) -> str:
    """One class as a table."""
    rows = [
        f"## {config.__name__}",
        "",
        (config.__doc__ or "").strip(),
        "",
        "| key | type | default | meaning |",
    ]
    rows.append("|---|---|---|---|")
    for name, field in config.model_fields.items():
        kind = type_text(field.annotation) + bounds_text(field.metadata)
        meaning = meaning_text(config, name)
        rows.append(
            f"| `{name}` | {kind} | {default_text(field.default, field.default_factory)} | {meaning} |"
        )
    return "\n".join(rows) + "\n"


def page() -> str:
    """The whole page: the recipe, then every class that it reaches, in order of appearance."""
    found: dict[type[Config], None] = {Recipe: None}
    queue = [Recipe]
    while queue:
        for field in queue.pop(0).model_fields.values():
            for config in configs_in(field.annotation) + [c for m in field.metadata for c in configs_in(m)]:
                if config not in found and config is not Use:
                    found[config] = None
                    queue.append(config)
    may_change = "".join(f"- `{key}`\n" for key in MAY_CHANGE)
    return HEAD + "\n".join(section(config) for config in [*found, Use]) + TAIL + may_change


def main() -> int:
    """Writes or checks the page."""
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.name} is not up to date with the config classes; run `make docs`")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
