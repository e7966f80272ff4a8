"""Nothing decides by the words of a message: not by comparing them, and not by any other way."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "astraflow"
TESTS = Path(__file__).parents[1]
SEARCHES = {
    "startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "find", "index",
    "count", "match", "search", "fullmatch", "findall", "compile",
}  # fmt: skip
"""Methods that look for words in a text, of `str` and of `re`."""

WORDS_OF_OTHERS = {
    "user_input/plain_data.py": "PyYAML names the place of a mistake in its message alone",
    "addons/gallery/copies.py": "recipes in the gallery are YAML",
    "rollout/engines/torch_engine.py": "PyTorch raises a bare RuntimeError when a CPU has no more memory",
    "addons/doctor/gpu_checks.py": "NVIDIA says in a GPU's name that it is a slice",
    "weights/range_sockets.py": "the header of HTTP",
    "addons/agents/gateway/gateway.py": "the header of HTTP",
    "addons/agents/hosts/inside/relay.py": "the header of HTTP",
    "addons/envs/harbor.py": "escape sequences of terminals",
    "addons/math": "answers of models",
    "addons/data_sets/question_rows.py": "prompts of data sets",
    "addons/inference_servers": "metrics and logs of other servers",
}  # fmt: skip
"""Where words of others are read, or what people and models wrote, and why that cannot be avoided."""


def is_sentence(text: str) -> bool:
    return " " in text.strip() or (text.endswith(" ") and text.strip().isalpha())


def constants(tree: ast.Module) -> Mapping[str, str]:
    """Texts that a module names at its top."""
    found: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                found[name] = text
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text))):
                found[name] = text
            case _:
                pass
    return found


def texts_of(node: ast.expr, known: Mapping[str, str]) -> Iterator[str]:
    """The texts that an operand is made of. `known`: texts by the names that the module has for them."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Name(id=name) if name in known:
            yield known[name]
        case ast.Tuple(elts=parts) | ast.Set(elts=parts) | ast.List(elts=parts) | ast.JoinedStr(values=parts):
            for part in parts:
                yield from texts_of(part, known)
        case _:
            pass


def operands_of(node: ast.AST) -> Sequence[ast.expr]:
    """What a comparison, or a search in a text, looks at."""
    match node:
        case ast.Compare(left=left, comparators=others):
            return [left, *others]
        case ast.Call(func=ast.Attribute(attr=name), args=args) if name in SEARCHES:
            return args
        case ast.MatchValue(value=value):
            return [value]
        case _:
            return []


def compared_sentences(
    tree: ast.Module, imported: Mapping[tuple[str, str], str]
) -> Iterator[tuple[int, str]]:
    """(line, text) of each sentence that something is compared with, written out or by its name."""
    known = dict(constants(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            pairs = ((alias, (node.module or "", alias.name)) for alias in node.names)
            known |= {alias.asname or alias.name: imported[key] for alias, key in pairs if key in imported}
    for operand in (operand for node in ast.walk(tree) for operand in operands_of(node)):
        for text in texts_of(operand, known):
            if is_sentence(text):
                yield operand.lineno, text


def imported_constants(trees: Mapping[str, ast.Module]) -> Mapping[tuple[str, str], str]:
    return {(module, name): text for module, tree in trees.items() for name, text in constants(tree).items()}


def test_no_module_compares_a_text_with_a_sentence() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    places = {path: path.relative_to(SOURCE).as_posix() for path in files}
    trees = {
        "astraflow." + places[path].removesuffix(".py").replace("/", "."): ast.parse(path.read_text("utf-8"))
        for path in files
    }
    known = imported_constants(trees)
    found = [
        f"{place}:{line}: {text!r}"
        for (path, place), tree in zip(places.items(), trees.values(), strict=True)
        if not any(place.startswith(allowed) for allowed in WORDS_OF_OTHERS)
        for line, text in compared_sentences(tree, known)
    ]
    assert found == []


READS = SEARCHES | {"sub", "split", "splitlines", "replace", "finditer"}
MESSAGES_OF_OTHERS = {
    "rollout/engines/torch_engine.py": "PyTorch raises a bare RuntimeError when a CPU has no more memory",
    "user_input/plain_data.py": "PyYAML calls every text `<unicode string>`",
}  # fmt: skip
"""Where a message of an exception is searched, and why that cannot be avoided."""
SHOWN = {"splitlines", "partition"}
"""Methods that cut a message to its first line, which is shown."""


def is_message(node: ast.AST, errors: Collection[str]) -> bool:
    """Whether an expression is `str(err)`, `err.args[0]`, or a text made of them."""
    match node:
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id=name)]):
            return name in errors
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="args")):
            return name in errors
        case ast.Subscript(slice=ast.Constant(value="msg")):
            return True  # one of pydantic's errors
        case (
            ast.Call(func=ast.Name(id="str"), args=[inner])
            | ast.Call(func=ast.Attribute(value=inner, attr="strip" | "lower" | "splitlines" | "partition"))
        ):
            return is_message(inner, errors)
        case _:
            return False


def searched_messages(tree: ast.Module) -> Iterator[int]:
    """Lines on which the message of an exception is searched, compared, or rewritten."""
    errors = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    errors |= {"err", "error", "problem", "failure", "cause"}
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others) if any(
                is_message(part, errors) for part in (left, *others)
            ):
                yield node.lineno
            case ast.Call(func=ast.Attribute(value=subject, attr=name), args=args) if name in READS:
                is_read = is_message(subject, errors) and name not in SHOWN
                if is_read or any(is_message(arg, errors) for arg in args):
                    yield node.lineno
            case _:
                pass


def test_no_module_searches_the_message_of_an_exception() -> None:
    found = [
        f"{path.relative_to(SOURCE).as_posix()}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line in searched_messages(ast.parse(path.read_text("utf-8")))
        if path.relative_to(SOURCE).as_posix() not in MESSAGES_OF_OTHERS
    ]
    assert found == []


@pytest.mark.parametrize(
    "expression",
    [
        "_BOUND.search(str(err))",
        're.sub("a", "b", str(err))',
        '"out of range" in str(err)',
        'str(err).startswith("a")',
        'str(err).removeprefix("a")',
        'str(error["msg"]).removeprefix("Value error, ")',
        'str(error["msg"]) == "Field required"',
        'err.args[0] == "x"',
        're.split("x", str(error).lower())',
    ],
)
def test_a_search_in_the_message_of_an_exception_is_found(expression: str) -> None:
    code = f"try:\n    f()\nexcept ValueError as err:\n    error = err\n    held = {expression}"
    assert list(searched_messages(ast.parse(code))) == [5]


@pytest.mark.parametrize(
    "code",
    [
        'held = why().startswith("trainer: all tickets")',
        'held = "are charged now" in why()',
        'held = why() == "a person"',
        'held = re.search(r"policy (.*) has", why())',
        'SIGN = "it is overdue"\nheld = why().startswith((SIGN, "x"))',
        "from signs import OVERDUE as SIGN\nheld = why().startswith(SIGN)",
        'held = who.removeprefix("trainer ")',
        'match why():\n    case "a person":\n        held = True',
    ],
)
def test_a_decision_by_words_is_found(code: str) -> None:
    signs = ast.parse('OVERDUE = "it is overdue"')
    assert list(compared_sentences(ast.parse(code), imported_constants({"signs": signs})))


def decisions(*args: str) -> dict[str, list[object]]:
    """What the deciders do, and what they say, in a process of their own."""
    command = [sys.executable, "-m", "drivers.decisions", *args]
    path = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_other_words_in_every_message_change_no_decision() -> None:
    usual = decisions()
    reworded = decisions("--reworded")
    assert len(usual["decisions"]) > 40
    for before, after in zip(usual["decisions"], reworded["decisions"], strict=True):
        assert before == after
    same = [words for words in usual["messages"] if words in reworded["messages"]]
    assert len(usual["messages"]) > 20
    assert same == [], "these were not reworded, so nothing is shown about them"


def test_a_decider_that_reads_words_would_decide_otherwise() -> None:
    assert decisions("--planted")["decisions"] != decisions("--planted", "--reworded")["decisions"]
