"""Writes the pages that list what the code defines: the protocol's items and rules, and the watchdog's rules.

With `--check`, nothing is written, and the exit code is 1 if a page is not up to date.
"""

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import msgspec

from astraflow import types
from astraflow.addons.watch.rules import RULES as WATCHDOG_RULES
from astraflow.dataflow.service.openapi import openapi_document
from astraflow_conformance.rules import RULES

FOLDER = Path(__file__).resolve().parent.parent / "docs"
ITEMS_HEAD = """# Items

*Generated from the items by `make docs`; do not edit.*

The fields of every item of the protocol, in order. [openapi.json](../openapi.json) has their types, bounds,
and defaults.

"""
RULES_HEAD = """# Rules

*Generated from the rules of the conformance kit by `make docs`; do not edit.*

Every service follows these numbered rules, and [`astraflow conformance`](conformance.md) checks them. A rule
keeps its number forever.
"""
WATCHDOG_HEAD = """# Watchdog rules

*Generated from the rules of the watchdog by `make docs`; do not edit.*

What each warning of the [watchdog](seeing.md#watchdog) means, and what to do about it. *Usual* is the median
of the last 8 steps.

| rule | condition | what to do |
|---|---|---|
"""


def line_of(item: type[msgspec.Struct]) -> str:
    """Describes one item: its name, how it is encoded if that is special, and its fields."""
    config = item.__struct_config__
    note = " (an array)" if config.array_like else ""
    if config.tag is not None:
        note = f' (`"{config.tag_field}": "{config.tag}"`)'
    fields = ", ".join(f"`{field.encode_name}`" for field in msgspec.structs.fields(item))
    return f"- `{item.__name__}`{note}: {fields}"


def items_page() -> str:
    """Returns a page with the fields of all items."""
    items = (getattr(types, name, None) for name in openapi_document()["components"]["schemas"])
    return ITEMS_HEAD + "\n".join(line_of(item) for item in items if item is not None) + "\n"


def rules_page() -> str:
    """Returns a page with all rules, one section per part."""
    sections = [RULES_HEAD]
    for section, rules in groupby(RULES.values(), key=lambda rule: rule.section):
        lines = "\n".join(f"- **{rule.id}** {rule.text}" for rule in rules)
        sections.append(f"## {section}\n\n{lines}\n")
    return "\n".join(sections)


def watchdog_page() -> str:
    """Returns a page with all rules of the watchdog, in the order in which it applies them."""
    rows = (f"| `{rule.name}` | {rule.condition} | {rule.advice} |\n" for rule in WATCHDOG_RULES)
    return WATCHDOG_HEAD + "".join(rows)


PAGES: dict[str, Callable[[], str]] = {
    "protocol/items.md": items_page,
    "protocol/rules.md": rules_page,
    "watchdog.md": watchdog_page,
}


def out_of_date() -> list[str]:
    """Returns the pages that differ from what would be written."""
    return [
        name
        for name, page in PAGES.items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text(encoding="utf-8") != page()
    ]


def main() -> int:
    """Writes or checks the pages."""
    if "--check" in sys.argv[1:]:
        if found := out_of_date():
            print(f"{', '.join(found)}: not up to date with the code; run `make docs`")
        return int(bool(found))
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
    print(f"wrote {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
