"""What the deciders of a run do in a series of situations, as JSON.

Usage: `python -m drivers.decisions [--reworded] [--planted]`.

With `--reworded`, every literal with a space in it, in the modules that decide or speak, is replaced by other
words before the modules are imported; each place gets words of its own. `--planted` adds a decider that reads
a message, to show that such a one is found.
"""

import ast
import importlib.machinery
import itertools
import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import CodeType, ModuleType

REWORDED = (
    "astraflow.dataflow.core",
    "astraflow.dataflow.service",
    "astraflow.report",
    "astraflow.types.wait_words",
    "astraflow.types.waits",
    "astraflow.recipe.service_state",
    "astraflow.processes.supervisor",
    "astraflow.addons.pool.pool_sizer",
    "astraflow.addons.view.screen",
    "astraflow.addons.watch",
)


class Rewording(ast.NodeTransformer):
    """Puts other words in the place of every sentence and part of a sentence."""

    numbers = itertools.count()

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)  # a docstring

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        node.value = self.visit(node.value)  # its format stays
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_words = isinstance(node.value, str) and " " in node.value and any(map(str.isalpha, node.value))
        return ast.copy_location(ast.Constant(f"<reworded {next(self.numbers)}>"), node) if is_words else node


class RewordingLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = Rewording().visit(ast.parse(self.get_data(path)))  # the compiled file beside it is not read
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class RewordingFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin and fullname.startswith(REWORDED):
            spec.loader = RewordingLoader(fullname, spec.origin)
        return spec


if "--reworded" in sys.argv:
    sys.meta_path.insert(0, RewordingFinder())

from drivers.decision_scenes import play  # noqa: E402 - the finder must be there first

if __name__ == "__main__":
    done, said = play(reads_words="--planted" in sys.argv)
    sys.stdout.write(json.dumps({"decisions": done, "messages": said}))
