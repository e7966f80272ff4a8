"""Checks the limits on what a reader must keep in mind at the same time.

The limits are: file 600 lines, function 50 lines, config class 12 fields, nesting 3, one assignment per
statement. The core, which is everything but `addons/`, also has a limit, so that one person can own it. A
line `# size: REASON` lifts the limit of a file. On or above a `def`, it lifts the limit of the function;
above a config class, that of the class.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "src", *sorted(ROOT.glob("packages/*/src")))
MAX_FILE = 600
MAX_FUNCTION = 50
MAX_FIELDS = 12
MAX_NESTING = 3
MAX_CORE = 61_350
NESTING = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.Match)
LIFT = re.compile(r"#\s*size:\s*\S+")


def nesting_of(node: ast.AST, depth: int = 0) -> int:
    """Returns the deepest nesting of control flow below a function. `elif` counts as its `if`; `with` doesn't
    count."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        step = 1 if isinstance(child, NESTING) and not is_elif else 0
        deepest = max(deepest, nesting_of(child, depth + step))
    return deepest


def is_packed(node: ast.AST) -> bool:
    """Checks whether a statement sets several names to separate values, as `a, b = 1, 2` does.

    A swap such as `a, b = b, a` needs the single statement, because a later value reads what an earlier
    target sets.
    """
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            pass
        case _:
            return False
    if len(targets) != len(values) or any(isinstance(item, ast.Starred) for item in (*targets, *values)):
        return False
    for idx, target in enumerate(targets):
        set_here = ast.unparse(target).partition("[")[0]
        read_later = (ast.unparse(part) for value in values[idx + 1 :] for part in ast.walk(value))
        if any(text.partition("[")[0] == set_here for text in read_later):
            return False
    return True


def problems_of(path: Path) -> list[str]:
    """Returns everything in a file that exceeds a limit."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    tree = ast.parse(text)
    name = path.relative_to(ROOT).as_posix()
    found: list[str] = []
    if len(lines) > MAX_FILE and not any(LIFT.match(line) for line in lines):
        found.append(f"{name}: {len(lines)} lines, limit {MAX_FILE}")
    for node in ast.walk(tree):
        if is_packed(node):
            found.append(f"{name}:{node.lineno}: several assignments in one statement; give each its own")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            above = lines[max(0, node.lineno - 2) : node.lineno]
            if any(LIFT.search(line) for line in above):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                found.append(f"{name}:{node.lineno} {node.name}: {length} lines, limit {MAX_FUNCTION}")
            if nesting_of(node) > MAX_NESTING:
                found.append(
                    f"{name}:{node.lineno} {node.name}: nesting {nesting_of(node)}, limit {MAX_NESTING}"
                )
        if isinstance(node, ast.ClassDef) and any(getattr(b, "id", "") == "Config" for b in node.bases):
            fields = sum(isinstance(item, ast.AnnAssign) for item in node.body)
            if fields > MAX_FIELDS and not LIFT.search(lines[node.lineno - 2]):
                found.append(f"{name}:{node.lineno} {node.name}: {fields} fields, limit {MAX_FIELDS}")
    return found


def main() -> int:
    """Prints everything that exceeds a limit. Returns 1 if anything does."""
    files = sorted(path for source in SOURCES for path in source.rglob("*.py"))
    problems = [problem for path in files for problem in problems_of(path)]
    core = [path for path in (ROOT / "src").rglob("*.py") if "addons" not in path.parts]
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in core)
    if num_lines > MAX_CORE:
        problems.append(f"src/astraflow without addons/: {num_lines} lines, limit {MAX_CORE}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
