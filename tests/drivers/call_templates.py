"""How the chat template of each family prints tool calls, in the family's exact form.

The templates are written anew: only what they print for tools, calls, and past replies is that of the family.
"""

# ruff: noqa: RUF001 - DeepSeek's own bars

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from astraflow.addons.formats.readers import FORMATS
from astraflow.addons.formats.unread import is_unread
from astraflow.models.chat_template import template_environment
from astraflow.types.model_text import without_reasoning
from astraflow.workflows.calls import CALL_PARSERS, offered_calls

__all__ = [
    "CALL_TEMPLATES",
    "SCHEMA",
    "CallTemplate",
    "make_messages",
    "mutated_call_problems",
    "print_calls",
]

Message: TypeAlias = tuple[list[tuple[str, dict[str, object]]], str]


class CallTemplate(NamedTuple):
    """One family."""

    format: str
    call: str
    """Jinja for one call `c` with its JSON `args`."""
    around: tuple[str, str] = ("", "")
    """What is around all calls of a reply."""
    between: str = ""
    turn: tuple[str, str] = ("<|im_start|>assistant\n", "<|im_end|>\n")
    """What is around a reply."""
    most: int = 9
    """Largest number of calls in one reply."""
    prompt: str = ""
    """What the template prints in front of the tools."""

    @property
    def template(self) -> str:
        """The whole chat template."""
        parts = (*self.turn, *self.around, self.between)
        opening, closing, before, after, between = (
            f"{{{{ {json.dumps(part, ensure_ascii=False)} }}}}" for part in parts
        )
        calls = (
            f"{before}{{% for c in m.tool_calls %}}{{% set given = c.function.arguments %}}"
            "{% set args = given if given is string else given | tojson %}"
            f"{self.call}{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}{after}"
        )
        return (
            f"{{% if tools %}}{self.prompt}{{{{ tools | tojson }}}}{{% endif %}}"
            "{% for m in messages %}{% if m.role == 'assistant' %}"
            f"{opening}{{{{ m.content }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}{closing}"
            "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
            f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
        )


_ITEMS = "{% for k, v in c.function.arguments.items() %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_NINE = "{% if c.id | length != 9 %}{{ raise_exception('a call has an id of 9 characters') }}{% endif %}"
_PYTHON = (
    "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
_GEMMA = (
    '{% macro g(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}'
    "{ {%- for k, x in v.items() %}{{ k }}:{{ g(x) }}{% if not loop.last %},{% endif %}{% endfor -%} }"
    "{% elif v is iterable %}[{% for x in v %}{{ g(x) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
_HERMES = '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ args }}}\n</tool_call>'
_XML = (
    "<function={{ c.function.name }}>\n" + _ITEMS + "<parameter={{ k }}>\n" + _VALUE + "\n</parameter>\n"
    "{% endfor %}</function>\n"
)
_DSML = (
    '<｜DSML｜invoke name="{{ c.function.name }}">\n' + _ITEMS + '<｜DSML｜parameter name="{{ k }}" '
    "string=\"{{ 'true' if v is string else 'false' }}\">" + _VALUE + "</｜DSML｜parameter>\n{% endfor %}"
    "</｜DSML｜invoke>\n"
)
_LISTED = '{"name": "{{ c.function.name }}", "arguments": {{ args }}}'
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_TURN = ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")

CALL_TEMPLATES: Mapping[str, CallTemplate] = {
    "qwen3": CallTemplate("tagged", _HERMES, between="\n"),
    "granite4": CallTemplate(
        "tagged", _HERMES, turn=("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>")
    ),
    "qwen3_5": CallTemplate("qwen_xml", f"<tool_call>\n{_XML}</tool_call>", between="\n"),
    "seed_oss": CallTemplate("qwen_xml", f"<seed:tool_call>\n{_XML}</seed:tool_call>", between="\n"),
    "glm4_5": CallTemplate(
        "glm",
        "<tool_call>{{ c.function.name }}\n" + _ITEMS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + _VALUE
        + "</arg_value>\n{% endfor %}</tool_call>",
        between="\n", turn=("<|assistant|>\n", ""),
    ),
    "glm4_7": CallTemplate(
        "glm",
        "<tool_call>{{ c.function.name }}" + _ITEMS + "<arg_key>{{ k }}</arg_key><arg_value>" + _VALUE
        + "</arg_value>{% endfor %}</tool_call>",
        turn=("<|assistant|>", ""),
    ),
    "minimax_m2": CallTemplate(
        "minimax",
        '<invoke name="{{ c.function.name }}">\n' + _ITEMS + '<parameter name="{{ k }}">' + _VALUE
        + "</parameter>\n{% endfor %}</invoke>\n",
        ("<minimax:tool_call>\n", "</minimax:tool_call>"), turn=("]~b]ai\n", "[e~[\n"),
    ),
    "deepseek_v3_2": CallTemplate(
        "deepseek_dsml", _DSML, ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        turn=_DEEPSEEK_TURN,
    ),
    "deepseek_v4": CallTemplate(
        "deepseek_dsml", _DSML, ("\n\n<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"), turn=_DEEPSEEK_TURN
    ),
    "kimi_k2": CallTemplate(
        "kimi",
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ args }}<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        turn=("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
    ),
    "deepseek_v3": CallTemplate(
        "deepseek",
        "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' }}"
        "{{ c.function.arguments + '\n```<｜tool▁call▁end｜>' }}",
        _DEEPSEEK, "\n", _DEEPSEEK_TURN,
    ),
    "deepseek_v3_1": CallTemplate(
        "deepseek",
        "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ args }}<｜tool▁call▁end｜>", _DEEPSEEK,
        turn=_DEEPSEEK_TURN,
    ),
    "mistral_v3": CallTemplate(
        "mistral",
        _NINE + '{"name": "{{ c.function.name }}", "arguments": {{ args }}, "id": "{{ c.id }}"}',
        ("[TOOL_CALLS] [", "]"), ", ", ("", "</s>"),
    ),
    "mistral3": CallTemplate(
        "mistral", _NINE + "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ args }}", turn=("", "</s>")
    ),
    "magistral": CallTemplate(
        "mistral", _NINE + "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ args }}",
        turn=("", "</s>"),
    ),
    "gpt_oss": CallTemplate(
        "gpt_oss",
        " to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>{{ args }}<|call|>",
        turn=("<|start|>assistant", ""), most=1,
    ),
    "gpt_oss_sampled": CallTemplate(
        "gpt_oss",
        "<|channel|>commentary to=functions.{{ c.function.name }} <|constrain|>json<|message|>{{ args }}"
        "<|call|>",
        turn=("<|start|>assistant", ""), most=1,
    ),
    "llama3": CallTemplate(
        "bare_json", '{"name": "{{ c.function.name }}", "parameters": {{ args }}}',
        turn=("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"), between="; ",
    ),
    "llama4": CallTemplate(
        "bare_json",
        '<|python_start|><|python_end|>{"name": "{{ c.function.name }}", "parameters": {{ args }}}',
        turn=("<|header_start|>assistant<|header_end|>\n\n", "<|eom|>"), most=1,
    ),
    "llama4_pythonic": CallTemplate(
        "pythonic", _PYTHON, ("[", "]"), ", ", ("<|header_start|>assistant<|header_end|>\n\n", "<|eot|>")
    ),
    "lfm2": CallTemplate("lfm2", _PYTHON, ("<|tool_call_start|>[", "]<|tool_call_end|>"), ", "),
    "olmo3": CallTemplate("olmo3", _PYTHON, ("<function_calls>", "</function_calls>"), "\n"),
    "gemma4": CallTemplate(
        "gemma", _GEMMA + "<|tool_call>call:{{ c.function.name }}{{ g(c.function.arguments) }}<tool_call|>",
        turn=("<|turn>model\n", "<turn|>\n"),
    ),
    "granite3": CallTemplate("granite", _LISTED, ("<|tool_call|>[", "]"), ", "),
    "phi4_mini": CallTemplate(
        "granite", _LISTED, ("<|tool_call|>[", "]<|/tool_call|>"), ", ", ("<|assistant|>", "<|end|>")
    ),
    "phi_functools": CallTemplate("phi", _LISTED, ("functools[", "]"), ", ", ("<|assistant|>", "<|end|>")),
    "nemotron_nano2": CallTemplate("nemotron", _LISTED, ("<TOOLCALL>[", "]</TOOLCALL>"), ", "),
    "hunyuan": CallTemplate("hunyuan", _LISTED, ("<tool_calls>[", "]</tool_calls>"), ", "),
    "command_r7b": CallTemplate(
        "command",
        '{"tool_call_id": "0", "tool_name": "{{ c.function.name }}", "parameters": {{ args }}}',
        ("<|START_ACTION|>[\n", "\n]<|END_ACTION|>"), ",\n",
        ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    ),
}  # fmt: skip

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "code": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "is_exact": {"type": "boolean"},
            "items": {"type": "array", "items": {}},
            "place": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        },
        "$defs": {"Place": {"type": "object"}},
    }
)
_TEXTS = (
    *(
        "moon",
        "5",
        "true",
        "null",
        "",
        "-0",
        "[1, 2]",
        '{"a": 1}',
        "größer 多い 🙂",
        'a "quoted" text',
        "it's",
    ),
    *(
        "two\nlines",
        "tab\there",
        "back\\slash \\n",
        '<a href="x">b</a>',
        "</parameter>",
        "<think>x</think>",
        "{{}}",
    ),
    *(
        "</tool_call>",
        "<tool_call>",
        "</think>",
        "x = [i for i in 'ab']",
        "'''",
        '"""',
        "</function> ",
        "a, b: c",
    ),
)


def _make_arguments(rng: random.Random) -> dict[str, object]:
    """Makes arguments that fit `SCHEMA`."""

    def text() -> str:
        return "".join(rng.choice(_TEXTS) for _ in range(rng.randint(0, 3)))

    values: dict[str, object] = {
        "text": text(),
        "code": f"def f():\n    return {text()!r}",
        "count": rng.randint(-(10**6), 10**6),
        "share": rng.randint(-999, 999) / 8,
        "is_exact": rng.random() < 0.5,
        "items": [rng.randint(0, 9), text(), [True, {"k": text()}]],
        "place": rng.choice([None, {"x": 1, "name": text()}]),
    }
    return {key: values[key] for key in rng.sample(sorted(values), rng.randint(0, len(values)))}


def make_messages(family: CallTemplate, num: int, seed: int, most: int = 3) -> "list[Message]":
    """Makes messages of up to `most` calls each: the calls, and what the template prints for them."""
    rng = random.Random(seed)
    messages: list[Message] = []
    for _ in range(num):
        size = rng.randint(1, min(most, family.most))
        calls = [(rng.choice(["search", "look_up"]), _make_arguments(rng)) for _ in range(size)]
        messages.append((calls, print_calls(family, calls)))
    return messages


def mutated_call_problems(family: CallTemplate, num: int, seed: int) -> list[str]:
    """What is wrong with how mutated texts are read: a tool that was not offered, or a call that was lost."""
    rng = random.Random(seed)
    texts = [text for _, text in make_messages(family, 20, seed)]
    tools = {"search": SCHEMA}
    mark = FORMATS[family.format].mark
    problems: list[str] = []
    for _ in range(num):
        text = _mutate(rng.choice(texts), rng.choice(texts), rng)
        reply = without_reasoning(text)
        for name, parser in CALL_PARSERS.items():
            calls = offered_calls(parser, reply, tools)
            if any(not call.problem and call.name not in tools for call in calls):
                problems.append(f"{name} calls another tool: {text!r}")
            is_lost = not calls and name == family.format and mark and mark in reply
            if is_lost and not is_unread(calls, reply, tools):
                problems.append(f"{name} loses a call: {text!r}")
    return problems


def _mutate(text: str, other: str, rng: random.Random) -> str:
    """Deletes, repeats, replaces, and swaps some parts of a text."""
    for _ in range(rng.randint(1, 6)):
        start = rng.randint(0, len(text))
        end = min(len(text), start + rng.choice([1, 1, 2, 5, 20, 100]))
        piece = rng.choice(
            ["", text[start:end] * 2, rng.choice(_NOISE), other[start:end], text[start:end][::-1]]
        )
        text = text[:start] + piece + text[end:]
    return text


_NOISE = (
    *'"{}[]()<>|=,:\\\n\0',
    "\ud800",
    "<think>",
    "</think>",
    "NaN",
    "1e999",
    "[" * 99,
    "((",
    "<|",
    "|>",
    "｜",
    "é",
)


def print_calls(
    family: CallTemplate, calls: Sequence[tuple[str, Mapping[str, Any]]], content: str = ""
) -> str:
    """What the family's template prints for calls, without the turn around them."""
    listed = [
        {
            "id": f"functions.{name}:{idx}" if family.format == "kimi" else f"call{idx:05}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for idx, (name, arguments) in enumerate(calls)
    ]
    if "c.function.arguments +" in family.call:  # the template wants text
        for call in listed:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    said = {"role": "assistant", "content": content, "tool_calls": listed}
    text = template_environment().from_string(family.template).render(messages=[said])
    opening, closing = family.turn
    return text.removeprefix(opening).removesuffix(closing)
