"""Counts the package's code and holds it to its budget.

Limits: file 400 lines, function 50 lines, config class 12 fields, nesting 3; 16,400 lines of code in the
package without its open-ended parts (environments, workflows, engines, backends, dashboard, conformance
kit), 30,000 in all.
Files and functions count whole; the package's budget counts lines of code: no blank lines, comments,
docstrings, imports or `__all__`, so that explaining and splitting are free. A file lifts its own limit with a
line `# size: REASON`, a function with `# size: REASON` on or above its `def`.
"""

import ast
import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "astraflow"
OPEN_ENDED = (
    "algorithms/", "conformance/", "dashboard/", "envs/", "losses/",
    "rollout/engines/", "trainer/backends/", "workflows/",
)  # fmt: skip
MAX_FILE, MAX_FUNCTION, MAX_FIELDS, MAX_NESTING = 400, 50, 12, 3
# size: 14,000 was planned; the rest is what exactness, restarts, damaged input and speed turned out to need
MAX_CORE, MAX_ALL = 16_400, 30_000
NESTING = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.Match)
LIFT = re.compile(r"#\s*size:\s*\S+")


def nesting_of(node: ast.AST, depth: int = 0) -> int:
    """Deepest nesting of control flow below a function; `elif` counts as its `if`, `with` does not count."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        step = 1 if isinstance(child, NESTING) and not is_elif else 0
        deepest = max(deepest, nesting_of(child, depth + step))
    return deepest


def code_lines(tree: ast.Module, lines: list[str]) -> int:
    """Lines that are neither blank nor comment nor part of a free statement."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and is_free(node):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        1
        for number, line in enumerate(lines, start=1)
        if number not in skipped and line.strip() and not line.strip().startswith("#")
    )


def is_free(node: ast.stmt) -> bool:
    """True for statements that the budget does not count."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def problems_of(path: Path) -> tuple[int, list[str]]:
    """Lines of code of a file, and what exceeds a limit in it."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    tree = ast.parse(text)
    name = path.relative_to(PACKAGE.parent).as_posix()
    found: list[str] = []
    if len(lines) > MAX_FILE and not any(LIFT.match(line) for line in lines):
        found.append(f"{name}: {len(lines)} lines, limit {MAX_FILE}")
    for node in ast.walk(tree):
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
            if fields > MAX_FIELDS:
                found.append(f"{name}:{node.lineno} {node.name}: {fields} fields, limit {MAX_FIELDS}")
    return code_lines(tree, lines), found


def main() -> int:
    """Prints the counts; 1 if a limit is exceeded."""
    core = everything = 0
    problems: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        count, found = problems_of(path)
        everything += count
        core += 0 if path.relative_to(PACKAGE).as_posix().startswith(OPEN_ENDED) else count
        problems += found
    if core > MAX_CORE:
        problems.append(f"package without its open-ended parts: {core} lines, limit {MAX_CORE}")
    if everything > MAX_ALL:
        problems.append(f"package: {everything} lines, limit {MAX_ALL}")
    for problem in problems:
        print(problem)
    print(
        f"size: {core} of {MAX_CORE} lines of code without open-ended parts, {everything} of {MAX_ALL} in all"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
