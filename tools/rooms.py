"""Draws the packages of AstraFlow from the code: docs/images/rooms.svg, and the table docs/code_map.md.

    python tools/rooms.py            # writes both
    python tools/rooms.py --check    # exit code 1 if one is not up to date

The rows are the layers of import-linter in pyproject.toml. The texts are the packages' docstrings.
"""

import ast
import sys
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "astraflow"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
PAGE = ROOT / "docs" / "code_map.md"
WIDTH = 880
ROW = 46
HEAD = """# Code map

*Generated from the packages' docstrings by `make docs`; do not edit.*

Imports point down only, and packages on one row don't import each other. import-linter checks this. The core
finds add-ons by entry points, as it finds packages of your own. Only `added` names modules of add-ons.

![The packages, one row per layer](images/rooms.svg)

A docstring may also say which file decides what.

| package | what it is for | question | file |
|---|---|---|---|
"""


def layers() -> list[list[str]]:
    """Returns the packages and modules of each layer, from the top down."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (
        c for c in settings["tool"]["importlinter"]["contracts"] if c.get("containers") == ["astraflow"]
    )
    return [[name.strip() for name in row.split("|")] for row in contract["layers"] if row != "__main__"]


def docstring(folder: Path) -> str:
    """Returns the docstring of a package."""
    return ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""


def add_ons() -> list[str]:
    """Returns the names of the add-ons."""
    return sorted(init.parent.name for init in (PACKAGE / "addons").glob("*/__init__.py"))


def picture() -> str:
    """Draws one row of boxes per layer."""
    rows = layers()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {ROW * (len(rows) + 1)}" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    top = 0
    for row in rows:
        is_addons = row == ["addons"]
        height = ROW * (2 if is_addons else 1)
        width = WIDTH / len(row)
        for idx, name in enumerate(row):
            left = idx * width
            fill = "#f3efe4" if is_addons else "#e4eef3"
            parts.append(
                f'<rect x="{left + 3:.0f}" y="{top + 3}" width="{width - 6:.0f}" height="{height - 6}" '
                f'rx="6" fill="{fill}" stroke="#789"/>'
                f'<text x="{left + width / 2:.0f}" y="{top + 28}" text-anchor="middle">{escape(name)}</text>'
            )
        if is_addons:
            names = add_ons()
            half = (len(names) + 1) // 2
            for line, shown in enumerate((names[:half], names[half:])):
                parts.append(
                    f'<text x="{WIDTH / 2:.0f}" y="{top + 52 + 20 * line}" text-anchor="middle" '
                    f'font-size="12" fill="#555">{escape(" · ".join(shown))}</text>'
                )
        top += height
    return "\n".join([*parts, "</svg>", ""])


def page() -> str:
    """Returns a table with a row per package, and a row per question that its docstring answers."""
    lines: list[str] = []
    for init in sorted(PACKAGE.rglob("__init__.py")):
        name = init.parent.relative_to(PACKAGE).as_posix()
        if name == ".":
            continue
        first, *rest = docstring(init.parent).split("\n\n")
        lines.append(f"| `{name}` | {' '.join(first.split())} | | |")
        for line in "\n".join(rest).splitlines():
            if "?" in line and ".py" in line:
                question, _, answer = line.partition("?")
                file, *names = answer.split()
                told = " ".join(f"`{word.strip(',')}`" for word in names)
                lines.append(f"| | | {question.strip()}? | `{file}` {told} |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    """Writes the files, or compares them."""
    status = 0
    for path, text in ((PICTURE, picture()), (PAGE, page())):
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"{path.relative_to(ROOT)} is not up to date; run `make docs`", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
