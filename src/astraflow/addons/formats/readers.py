"""Reads the tool calls in a reply, in the format of each family of models.

Each format in `FORMATS` is a reader with its settings: JSON after a mark, a tag per parameter, or Python's
syntax. The forms come from the families' chat templates and model cards, and from the list of vLLM's parsers
(https://docs.vllm.ai/en/latest/features/tool_calling/). No text makes a reader raise: a call that can't be
read has a `problem`, so that the model can be told.
"""

# ruff: noqa: RUF001 - DeepSeek's own bars

import ast
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeAlias

from astraflow.addons.formats.json_values import (
    as_argument,
    check_json,
    is_call,
    read_call,
    to_json,
    values_at,
)
from astraflow.types.model_text import past_separators
from astraflow.workflows.calls import ToolCall

__all__ = ["FORMATS", "Format", "calls_in_any_format", "read_calls"]

_Schemas: TypeAlias = Mapping[str, str]
"""Tool -> the JSON schema of its arguments, as JSON text. Formats that write values as plain text need it."""
_MAX_ENDS = 64
"""Largest number of closing tags that are tried as the end of a value; values seldom contain any."""


@dataclass(frozen=True, slots=True)
class Format:
    """One format of calls."""

    read: Callable[[str, _Schemas], Sequence[ToolCall]]
    mark: str = ""
    """Text with which calls begin; empty if the whole reply is the call."""
    hint: str = ""
    """Text with which a prompt shows tools, if the chat template of the family prints no calls."""


def read_calls(name: str, reply: str, schemas: _Schemas) -> tuple[ToolCall, ...]:
    """Reads the calls in a reply, without its reasoning. `name`: that of the format."""
    form = FORMATS[name]
    calls = tuple(form.read(reply, schemas))
    if not calls and form.mark and form.mark in reply:
        start = reply.find(form.mark)
        return (ToolCall(problem=f"the call after {form.mark} is incomplete", start=start, end=len(reply)),)
    return calls


@lru_cache(8)
def calls_in_any_format(text: str) -> tuple[ToolCall, ...]:
    """The calls in a text in the format that reads most of them, for people to see. It must have tags."""
    read = [read_calls(name, text, {}) for name, form in FORMATS.items() if form.mark and form.mark in text]
    return max(read, key=lambda calls: sum(not call.problem for call in calls), default=())


# --- JSON -----------------------------------------------------------------------------------------

_NAME = re.compile(r'"name"\s*:\s*"[^"\\]*"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:')


def _bare_json(text: str, schemas: _Schemas) -> Sequence[ToolCall]:
    """A reply that is JSON: an object with a name and arguments, several of them, or a list. Other JSON is an
    answer: `{"name": "Alice", "age": 5}`, or a list in which one object is not a call."""
    del schemas
    start = past_separators(text, 0)
    if not text.startswith(("{", "["), start) or not _NAME.search(text) or not _ARGUMENTS.search(text):
        return ()
    values, end, problem = values_at(text, start)
    if not all(map(is_call, values)):
        return ()
    if not problem and end < len(text):
        problem = f"text follows the JSON, at character {end - start}; write the call alone"
    if problem:
        return (ToolCall(problem=f"the call is not valid JSON: {problem}", end=len(text)),)
    return [read_call(value, 0, end) for value in values]


def _after_marks(text: str, schemas: _Schemas, *, opening: str, closing: str) -> list[ToolCall]:
    """JSON after each `opening`: calls or, if a group of `opening` is a name, its arguments.

    The end of the text may stand for the last closing tag.
    """
    del schemas
    calls: list[ToolCall] = []
    pos = 0
    while head := re.compile(opening).search(text, pos):
        name = next(filter(None, head.groups()), "")
        values, pos, problem = values_at(text, head.end(), most=1 if head.groups() else len(text))
        tail = re.compile(closing).match(text, pos)
        if not problem and (tail is None or not (values or (name and tail[0]))):
            problem = "text follows the JSON" if values else "no JSON follows the tag"
            problem = (
                f'{problem}, at character {pos - head.end()}; expected {{"name": ..., "arguments": {{...}}}}'
            )
        if problem:
            tail = next((each for each in re.compile(closing).finditer(text, pos) if each[0]), None)
        pos = tail.end() if tail else len(text)
        read: list[object] = values
        if problem:
            read = [ToolCall(problem=f"the call is not valid JSON: {problem}")]
        elif head.groups():
            read = [{"name": name, "arguments": values[0] if values else None}]
        calls += [read_call(value, head.start(), pos) for value in read]
    return calls


_GEMMA_PART = re.compile(
    r'<\|"\|>(.*?)<\|"\|>|<[^<>\s]*>|((?<=[{,])[^{}\[\],:<"]++(?=:))|"(?:[^"\\]|\\.)*"'
    r'|([^\s{}\[\],:<"]+)',
    re.DOTALL,
)
_JSON_WORD = re.compile(r"true|false|null|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def _gemma(text: str, schemas: _Schemas) -> list[ToolCall]:
    """`call:name{key:<|"|>text<|"|>,number:5}`. Keys aren't quoted, and a token of its own quotes texts."""

    def as_json(part: re.Match[str]) -> str:
        quoted, key, word = part.groups()
        if word is not None and _JSON_WORD.fullmatch(word):
            return word
        found = next((each for each in (quoted, key, word) if each is not None), None)
        return part[0] if found is None else to_json(found if found == quoted else found.strip())

    before, mark, rest = text.partition("<|tool_call>")
    closing = r"(?:<tool_call\|>|(?=<\|tool_)|$)"
    opening = r'<\|tool_call>\s*"call"\s*:\s*"([^"]+)"\s*(?=\{)'
    return _after_marks(
        before + mark + _GEMMA_PART.sub(as_json, rest), schemas, opening=opening, closing=closing
    )


# --- a tag per parameter --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ByParameter:
    """Tags around each parameter, whose value is plain text.

    A closing tag inside a value is text, unless another parameter or the end of the call follows it.
    """

    opening: str
    """Pattern of the beginning of a call, with its name."""
    key: str
    """Pattern of the beginning of a parameter, with its name."""
    closing: str
    end: str
    trims: bool = False
    """Whether a line break on each side of a value isn't part of it."""

    def __call__(self, text: str, schemas: _Schemas) -> list[ToolCall]:
        calls: list[ToolCall] = []
        heads = re.compile(self.opening)
        followed = re.compile(rf"{self.closing}(?=\s*(?:{self.key}|{self.end}))")
        ends = [match.start() for match in followed.finditer(text)] if heads.search(text) else []
        pos = 0
        while head := heads.search(text, pos):
            name = head[1].strip()
            arguments, pos, problem = self._arguments(text, head.end(), ends, schemas.get(name, ""))
            tail = re.compile(rf"\s*{self.end}").match(text, pos)
            if tail is None:
                problem = problem or f"it has no end at character {pos - head.start()}"
                tail = re.compile(self.end).search(text, pos)
            pos = tail.end() if tail else len(text)
            broken = ToolCall(problem=f"the call of {name!r} is not valid: {problem}") if problem else None
            calls.append(read_call(broken or {"name": name, "arguments": arguments}, head.start(), pos))
        return calls

    def _arguments(
        self, text: str, pos: int, ends: Sequence[int], schema: str
    ) -> tuple[dict[str, object], int, str]:
        """The arguments that begin at `pos`, the position after them, and why one can't be read."""
        arguments: dict[str, object] = {}
        keys = re.compile(rf"\s*{self.key}")
        while head := keys.match(text, pos):
            name = head[1].strip()
            stop = self._value_end(text, head.end(), ends)
            if stop < 0:
                return arguments, pos, f"the parameter {name!r} never ends"
            value = text[head.end() : stop]
            if self.trims:
                value = value.removeprefix("\n").removesuffix("\n")
            read = as_argument(value, schema, name, head.groupdict().get("is_text"))
            pos = stop + len(self.closing)
            if arguments.setdefault(name, read) != read:
                return arguments, pos, f"the parameter {name!r} has two values"
        return arguments, pos, ""

    def _value_end(self, text: str, start: int, ends: Sequence[int]) -> int:
        """The end of the value that begins at `start`; -1 if it has none. A value may hold a whole call."""
        first = bisect_left(ends, start)
        for end in ends[first : first + _MAX_ENDS]:
            inside = text[start:end]
            if len(re.findall(self.key, inside)) == inside.count(self.closing):
                return end
        return ends[first] if first < len(ends) else -1


# --- Python's syntax ------------------------------------------------------------------------------

_PYTHON_START = re.compile(r"\s*+(?:<\|python_(?:tag|start)\|>\s*+)?(?=\[?\s*+[A-Za-z_][\w.]*+\()")
_WORDS = {"true": True, "false": False, "null": None}


def _pythonic(
    text: str, schemas: _Schemas, *, opening: str = "", closing: str = "<|python_end|>"
) -> list[ToolCall]:
    """Calls in Python's syntax, alone or in a list. Without `opening`, the whole reply is the call."""
    del schemas
    head = re.search(re.escape(opening), text) if opening else _PYTHON_START.match(text)
    if head is None:
        return []
    end = text.rfind(closing)
    body = text[head.end() : end if end >= head.end() else len(text)]
    if opening:  # there may be several lists
        body = re.sub(rf"{re.escape(closing)}\s*{re.escape(opening)}", "\n", body)
    end = end + len(closing) if end >= head.end() else len(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes like \d in a string
            tree = ast.parse(body.strip())
        values = [node.value for node in tree.body if isinstance(node, ast.Expr)]
        nodes = [each for node in values for each in (node.elts if isinstance(node, ast.List) else [node])]
        if not nodes or len(values) < len(tree.body):
            raise ValueError("it is not a call")
        calls = [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        reason = err.msg if isinstance(err, SyntaxError) else str(err) or type(err).__name__
        calls = [ToolCall(problem=f"the call is not valid: {reason}; expected [name(argument=value)]")]
    return [call.at(head.start(), end) for call in calls]


def _python_call(node: ast.expr) -> ToolCall:
    """Raises: ValueError if an argument has no name, or is not a literal."""
    if isinstance(node, ast.Dict):  # some models write JSON between these tags
        return read_call(_literal(node))
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("expected a call whose arguments all have names")
    arguments = {str(word.arg): _literal(word.value) for word in node.keywords}
    check_json(arguments)
    return read_call({"name": ast.unparse(node.func), "arguments": arguments})


def _literal(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            names = [_literal(key) for key in keys if key is not None]
            return {str(name): _literal(value) for name, value in zip(names, values, strict=True)}
        case _:
            raise ValueError(f"{ast.unparse(node)[:40]} is not a literal")


# --- the formats ----------------------------------------------------------------------------------


def _json(opening: str, closing: str, mark: str, hint: str = "") -> Format:
    return Format(partial(_after_marks, opening=opening, closing=closing), mark, hint)


def _json_in_tags(opening: str, closing: str, hint: str = "") -> Format:
    first = re.escape(opening)
    ends = rf"(?:{re.escape(closing)}|(?={first})|$)" if closing else rf"(?:(?={first})|$)"
    return _json(first, ends, opening, hint)


def _python_in_tags(opening: str, closing: str, hint: str = "") -> Format:
    return Format(partial(_pythonic, opening=opening, closing=closing), opening, hint)


def _mistral(text: str, schemas: _Schemas) -> Sequence[ToolCall]:
    """Newer models write a name and its arguments, older ones a list of calls."""
    is_list = re.search(r"\[TOOL_CALLS\]\s*[\[{]", text) is not None
    return (_MISTRAL_LIST if is_list else _MISTRAL_NAMED).read(text, schemas)


_MISTRAL_LIST = _json_in_tags("[TOOL_CALLS]", "")
_MISTRAL_NAMED = _json(
    r"\[TOOL_CALLS\]\s*([^\[{\s]{1,256})\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?", r"(?=\[TOOL_CALLS\])|$", ""
)
_CHANNEL = r"<\|channel\|>\s*+(?:commentary|analysis)"
_TO = r"to=(?:functions\.)?([^\s<]++)"
_TAG_NAME = r'"?([^<>\n"]{0,256})"?'

FORMATS: Mapping[str, Format] = {
    "tagged": _json_in_tags("<tool_call>", "</tool_call>"),
    "bare_json": Format(_bare_json),
    "qwen_xml": Format(
        _ByParameter(
            rf"(?:<(?:seed:)?tool_call>\s*)?<function={_TAG_NAME}>",
            rf"<parameter={_TAG_NAME}>",
            "</parameter>",
            r"</function>(?:\s*</(?:seed:)?tool_call>)?",
            trims=True,
        ),
        "<function=",
    ),
    "glm": Format(
        _ByParameter(
            r"<tool_call>\s*([^\s<>{}\[\]]{1,256})\s*(?=<arg_key>|</tool_call>|<tool_sep>)(?:<tool_sep>)?",
            r"<arg_key>(.{0,256}?)</arg_key>\s*<arg_value>",
            "</arg_value>",
            "</tool_call>",
        ),
        "<arg_key>",
    ),
    "minimax": Format(
        _ByParameter(
            rf"(?:<minimax:tool_call>\s*)?<invoke name={_TAG_NAME}>",
            rf"<parameter name={_TAG_NAME}>",
            "</parameter>",
            r"</invoke>(?:\s*</minimax:tool_call>)?",
        ),
        "<invoke name=",
    ),
    "deepseek_dsml": Format(
        _ByParameter(
            rf"(?:<｜DSML｜(?:function|tool)_calls>\s*)?<｜DSML｜invoke name={_TAG_NAME}>",
            rf'<｜DSML｜parameter name={_TAG_NAME}(?: string="(?P<is_text>true|false)")?>',
            "</｜DSML｜parameter>",
            r"</｜DSML｜invoke>(?:\s*</｜DSML｜(?:function|tool)_calls>)?",
        ),
        "<｜DSML｜",
    ),
    "kimi": _json(
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?"
        r"([^<\s]*?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
        r"(?:<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?|$)",
        "<|tool_call_begin|>",
    ),
    "deepseek": _json(
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
        r"([^<\n`]*+)(?:<｜tool▁sep｜>|\s*+```json)",
        r"(?:```\s*)?(?:<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?|$)",
        "<｜tool▁call▁begin｜>",
    ),
    "mistral": Format(_mistral, "[TOOL_CALLS]"),
    "gpt_oss": _json(
        rf"(?:<\|start\|>assistant\s*+)?(?:{_TO}\s*+{_CHANNEL}|{_CHANNEL}\s++{_TO})"
        r"[^<]{0,64}(?:<\|constrain\|>[^<]{0,64})?<\|message\|>",
        r"(?:<\|(?:call|end)\|>|(?=<\|(?:start|channel)\|>)|$)",
        "to=functions.",
    ),
    "pythonic": Format(_pythonic),
    "lfm2": _python_in_tags("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>"),
    "olmo3": _python_in_tags("<function_calls>", "</function_calls>"),
    "gemma": Format(_gemma, "<|tool_call>"),
    "granite": _json_in_tags("<|tool_call|>", "<|/tool_call|>", "<|tool|>"),
    "phi": _json_in_tags("functools", ""),
    "nemotron": _json_in_tags("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan": _json_in_tags("<tool_calls>", "</tool_calls>"),
    "command": _json_in_tags("<|START_ACTION|>", "<|END_ACTION|>"),
}
"""The formats by their names in recipes. If several read a text, the first one counts."""
