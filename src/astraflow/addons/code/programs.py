"""Decides which text of a reply is its program."""

import ast
import builtins
import re
import warnings
from collections.abc import Iterator, Sequence
from textwrap import dedent

from astraflow.addons.sandbox.fences import FencedBlock, fenced_blocks

__all__ = ["program_of"]

_PYTHON = re.compile(r"(?:i|micro|c)?py(?:thon|py)?\d*")
_MAX_PARSED = 1 << 20
"""Largest number of characters to parse for one reply. Parsing a megabyte takes a few seconds."""
_MAX_PARAGRAPHS = 8
"""Largest number of paragraphs between a program without an opening fence and the next fence."""
_TILDES = re.compile(r"^~{3}", re.MULTILINE)
"""`~~~python` is also a Python expression."""


def program_of(reply: str, function: str = "") -> str:
    """The program in a reply: its last block of Python that is a whole program; the reply if it has no block.

    A block is Python if its fence names Python or no language. It is a whole program if Python can parse it,
    if it does something (`6` is an example's output), and if it needs no name that only an earlier block
    defines, as an example of use or a part that is explained does. But if the earlier block prints nothing,
    both together are the program. If the task names a function, blocks that define it come first. If no block
    is a whole program, the last block of Python counts.
    """
    reply = reply.replace("\r\n", "\n")
    parser = _Parser()
    if "```" not in reply and "~~~" not in reply:
        return reply
    if _TILDES.search(reply) is None and parser.tree(reply) is not None:
        return reply
    blocks = _blocks(reply, parser)
    ours = [block for block in blocks if not block.tag or _PYTHON.fullmatch(block.tag)]
    for group in (ours, blocks):
        programs = _whole_programs(group, parser, joins=not function)
        defining = [text for text in programs if function and _defines(parser.tree(text), function)]
        if defining or programs:
            return (defining or programs)[-1]
    named = [block for block in ours if block.tag]
    return next((group[-1].text for group in (named, ours, blocks) if group), reply)


def _blocks(reply: str, parser: "_Parser") -> list[FencedBlock]:
    """The blocks of a reply. A program before the first fence is a block as well.

    The program's opening fence may belong to the prompt, so the reply begins inside the block.
    """
    lines = reply.split("\n")
    first = next(at for at, line in enumerate(lines) if "```" in line or "~~~" in line)
    head = "\n".join(lines[:first])
    before, _, after = re.split(r"(`{3,}|~{3,})", lines[first], maxsplit=1)
    if before.strip() and not after.strip():
        head += f"\n{before}"
    program = _leading_program(head, parser)
    if not program:
        return fenced_blocks(reply, parser.is_whole)
    is_closing = program == head and not after.strip()
    rest = lines[first + is_closing :]
    return [FencedBlock("", program, -1), *fenced_blocks("\n".join(rest), parser.is_whole)]


def _leading_program(text: str, parser: "_Parser") -> str:
    """The program that a text begins with; empty if it begins with something else. Paragraphs may follow."""
    for _ in range(_MAX_PARAGRAPHS):
        if parser.is_program(text):
            return text
        text = text.rstrip().rpartition("\n\n")[0]
    return ""


def _whole_programs(blocks: Sequence[FencedBlock], parser: "_Parser", *, joins: bool) -> list[str]:
    """The texts of the blocks that are whole programs, in order.

    `joins`: whether a block that prints completes an earlier one that it needs and that prints nothing.
    """
    programs: list[str] = []
    defined: set[str] = set()
    for block in blocks:
        text = _unindented(block.text)
        tree = parser.tree(text)
        if tree is None or not parser.is_program(text):
            continue
        if not _unbound_names(tree) & defined:
            programs.append(text)
        elif joins and programs and _prints(tree) and not _prints(parser.tree(programs[-1])):
            programs[-1] += text
        defined |= set(_defined_names(tree))
    return programs


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DOING = (*_DEFINITIONS, ast.Call, ast.Import, ast.ImportFrom, ast.For, ast.While, ast.Lambda)


def _prints(tree: ast.Module | None) -> bool:
    """Whether a program may print: it names a function such as `print` or `sys.stdout.write`."""
    return tree is not None and any(
        (isinstance(node, ast.Name) and node.id == "print")
        or (isinstance(node, ast.Attribute) and node.attr.startswith(("write", "print")))
        for node in ast.walk(tree)
    )


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """The names of functions, classes and variables outside functions. What is imported doesn't count: some
    tasks import it for the solution."""
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, _DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif not isinstance(node, ast.Lambda):
            nodes += ast.iter_child_nodes(node)


def _defines(tree: ast.Module | None, function: str) -> bool:
    """Whether a program defines a function, or the class `Solution` that may have it as a method."""
    if tree is None:
        return False
    for node in tree.body:
        if isinstance(node, _DEFINITIONS) and node.name in (function, "Solution"):
            return True
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == function for target in targets):
            return True
    return False


def _unbound_names(tree: ast.Module) -> set[str]:
    """The names that a program reads and binds nowhere."""
    read: set[str] = set()
    bound = set(dir(builtins))
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name.partition(".")[0])
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound.add(name)
            case _:
                pass
    return read - bound


class _Parser:
    """Parses the texts of one reply, up to a number of characters in total."""

    def __init__(self) -> None:
        self._trees: dict[str, ast.Module | None] = {}
        self._num_parsed = 0

    def is_whole(self, tag: str, text: str) -> bool:
        """Whether a block is complete. Only Python can be parsed, so other blocks never are."""
        is_python = not tag or _PYTHON.fullmatch(tag) is not None
        return is_python and self.tree(_unindented(text)) is not None

    def is_program(self, text: str) -> bool:
        """Whether a text is Python that does something: it calls, defines or imports something."""
        tree = self.tree(text)
        return tree is not None and any(isinstance(node, _DOING) for node in ast.walk(tree))

    def tree(self, text: str) -> ast.Module | None:
        """The parsed text; None if it isn't Python, or if too much has been parsed already."""
        if text not in self._trees:
            self._num_parsed += len(text)
            if self._num_parsed > _MAX_PARSED:
                return None
            self._trees[text] = _parse(text)
        return self._trees[text]


def _unindented(text: str) -> str:
    """The text without the indentation of its first line, which Python would refuse."""
    return dedent(text) if text.lstrip("\n")[:1] in (" ", "\t") else text


def _parse(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # about backslashes in strings
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
