"""Writes docs/protocol/items.md, the fields of every item of the protocol, from the items themselves.

`--check` writes nothing and fails if the page is not up to date.
"""

import sys
from pathlib import Path

import msgspec

from astraflow import types
from astraflow.dataflow.openapi import openapi_document

PAGE = Path(__file__).resolve().parent.parent / "docs" / "protocol" / "items.md"
HEAD = """# Items

*Generated from the items by `make docs`; do not edit.*

The fields of every item of the protocol, in order. [openapi.json](../openapi.json) has their types, bounds,
and defaults.

"""


def line_of(item: type[msgspec.Struct]) -> str:
    """One item: its name, how it is encoded if that is special, and its fields."""
    config = item.__struct_config__
    note = " (an array)" if config.array_like else ""
    if config.tag is not None:
        note = f' (`"{config.tag_field}": "{config.tag}"`)'
    fields = ", ".join(f"`{field.encode_name}`" for field in msgspec.structs.fields(item))
    return f"- `{item.__name__}`{note}: {fields}"


def page() -> str:
    """The whole page."""
    items = (getattr(types, name, None) for name in openapi_document()["components"]["schemas"])
    return HEAD + "\n".join(line_of(item) for item in items if item is not None) + "\n"


def main() -> int:
    """Writes or checks the page."""
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
            print(f"{PAGE.name} is not up to date with the items; run `make docs`")
            return 1
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
