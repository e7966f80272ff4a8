"""Tool calls in the formats of the families: what a template prints is read back, and nothing else is run."""

# ruff: noqa: RUF001 - DeepSeek's own bars

import json
from pathlib import Path

import pytest

from astraflow.addons.formats.derive import TemplateReport, call_format, examine_template
from astraflow.addons.formats.readers import FORMATS, calls_in_any_format
from astraflow.addons.formats.unread import is_unread
from astraflow.types.model_text import without_reasoning
from astraflow.workflows.calls import CALL_PARSERS, ToolCall, offered_calls
from drivers.call_templates import CALL_TEMPLATES, SCHEMA, make_messages, mutated_call_problems

TOOLS = {"search": SCHEMA, "look_up": SCHEMA}


def folder_with(template: str, folder: Path) -> Path:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def read(form: str, text: str) -> list[tuple[str, object, str]]:
    calls = offered_calls(CALL_PARSERS[form], without_reasoning(text), TOOLS)
    return [(call.name, call.arguments, call.problem) for call in calls]


def test_each_format_has_a_parser_and_a_family_that_prints_it() -> None:
    assert list(FORMATS) == list(CALL_PARSERS)
    assert {family.format for family in CALL_TEMPLATES.values()} == set(FORMATS)


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_the_format_is_the_one_that_reads_what_the_template_prints(name: str, tmp_path: Path) -> None:
    family = CALL_TEMPLATES[name]
    report = examine_template(folder_with(family.template, tmp_path), {})
    assert (report.format, report.error, report.hides_tools, report.unread) == (family.format, "", "", "")
    assert call_format(tmp_path, "{}") == family.format


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_sixty_messages_of_each_family_are_read_back_exactly(name: str) -> None:
    family = CALL_TEMPLATES[name]
    for calls, text in make_messages(family, num=60, seed=1):
        assert read(family.format, text) == [(tool, arguments, "") for tool, arguments in calls], text


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_no_mutated_text_raises_or_calls_a_tool_that_was_not_offered(name: str) -> None:
    assert mutated_call_problems(CALL_TEMPLATES[name], num=60, seed=2) == []


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_a_call_that_is_cut_off_is_read_only_if_its_arguments_are_complete(name: str) -> None:
    family = CALL_TEMPLATES[name]
    for calls, text in make_messages(family, num=3, seed=3, most=1):
        expected = [(tool, arguments, "") for tool, arguments in calls]
        for end in range(len(text)):
            found = read(family.format, text[:end])
            assert found == expected or all(problem for _, _, problem in found), text[:end]


@pytest.mark.parametrize(
    "name", [name for name, family in CALL_TEMPLATES.items() if FORMATS[family.format].mark]
)
def test_the_text_before_a_call_ends_where_the_call_begins(name: str) -> None:
    family = CALL_TEMPLATES[name]
    ((_, text),) = make_messages(family, num=1, seed=4, most=1)
    calls = CALL_PARSERS[family.format].read(f"I look.\n{text}")
    assert f"I look.\n{text}"[: calls[0].start].strip() == "I look."
    assert [call.problem for call in calls_in_any_format(f"I look.\n{text}")] == [""]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '"moon"', '"moon"'),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "5", 5),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["integer", "string"]}, "true", "true"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"type": "integer"}, "five", "five"),
        ({}, "moon", "moon"),
        ({}, "5", 5),
        ({}, "[1, ", "[1, "),
        ({"type": "string"}, "", ""),
    ],
)
def test_plain_text_gets_the_type_of_the_tools_schema(schema: object, text: str, value: object) -> None:
    tools = {"f": json.dumps({"type": "object", "properties": {"x": schema}})}
    printed = {
        "qwen_xml": f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "minimax": f'<invoke name="f"><parameter name="x">{text}</parameter></invoke>',
    }
    for form, reply in printed.items():
        (call,) = offered_calls(CALL_PARSERS[form], reply, tools)
        assert (call.problem, repr(call.arguments)) == ("", repr({"x": value}))


def test_a_value_may_hold_a_whole_call() -> None:
    ((_, inner),) = make_messages(CALL_TEMPLATES["qwen3_5"], num=1, seed=5, most=1)
    text = f"<function=search>\n<parameter=text>\n{inner}\n</parameter>\n</function>"
    assert read("qwen_xml", text) == [("search", {"text": inner}, "")]


@pytest.mark.parametrize(
    ("form", "reply"),
    [
        ("qwen_xml", "<tool_call>\n<function=search>\n<parameter=text>\nmoon"),
        (
            "qwen_xml",
            "<function=search>\n<parameter=text>\na\n</parameter>\n<parameter=text>\nb\n</parameter>\n</function>",
        ),
        ("kimi", "<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"),
        ("kimi", "<|tool_call_begin|>functions.sea"),
        ("deepseek", "<｜tool▁call▁begin｜>search<｜tool▁sep｜>{} or so<｜tool▁call▁end｜>"),
        ("gpt_oss", "<|channel|>commentary to=functions.search <|constrain|>json<|message|>moon"),
        ("mistral", "[TOOL_CALLS]search[ARGS]"),
        ("lfm2", "<|tool_call_start|>[search(open('x'))]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[search('moon')]<|tool_call_end|>"),
        ("gemma", '<|tool_call>call:search{text:<|"|>moon'),
        ("glm", "<tool_call>search\n<arg_key>text</arg_key>\n<arg_value>moon"),
    ],
)
def test_a_broken_call_has_a_problem_that_the_model_is_told(form: str, reply: str) -> None:
    calls = offered_calls(CALL_PARSERS[form], reply, TOOLS)
    assert calls
    assert all(call.problem and not call.name for call in calls)


def test_a_reply_that_another_format_reads_is_unread() -> None:
    for family in CALL_TEMPLATES.values():
        for _, text in make_messages(family, num=1, seed=6, most=1):
            for form, parser in CALL_PARSERS.items():
                calls = offered_calls(parser, without_reasoning(text), TOOLS)
                is_read = any(not call.problem for call in calls)
                assert is_unread(calls, text, TOOLS) is not is_read, (form, text)


def test_a_call_of_another_tool_is_read_and_told() -> None:
    (call,) = offered_calls(
        CALL_PARSERS["kimi"], make_messages(CALL_TEMPLATES["kimi_k2"], 1, 7, 1)[0][1], ["f"]
    )
    assert (call.name in {"search", "look_up"}, call.problem) == (True, f"no tool {call.name!r}; there are f")
    assert not is_unread([ToolCall("f")], "<tool_call>", ["f"])


# --- what a template can't do ---------------------------------------------------------------------

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SHOWS = "{% if tools %}{{ tools | tojson }}{% endif %}"


def test_a_template_that_needs_an_argument_names_it(tmp_path: Path) -> None:
    needs = "{% if effort is not defined %}{{ raise_exception('set effort') }}{% endif %}" + CHATML
    assert examine_template(folder_with(needs, tmp_path), {"effort": "low"}).error == ""
    error = examine_template(tmp_path, {}).error
    assert error == "TemplateError: set effort; it reads effort, which template_args could set"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (CHATML, "it doesn't show them, so the model wouldn't know about them"),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + CHATML, "TemplateError: no tools"),
    ],
)
def test_a_template_that_cannot_show_tools_is_reported(template: str, problem: str, tmp_path: Path) -> None:
    assert examine_template(folder_with(template, tmp_path), {}).hides_tools == problem


def test_the_template_for_tools_is_examined_where_a_folder_has_one(tmp_path: Path) -> None:
    others = folder_with(CHATML, tmp_path) / "additional_chat_templates"
    others.mkdir()
    (others / "tool_use.jinja").write_text(CALL_TEMPLATES["qwen3_5"].template, encoding="utf-8")
    (others / "rag.jinja").write_text("{{ raise_exception('not this one') }}", encoding="utf-8")
    assert examine_template(tmp_path, {}) == TemplateReport(format="qwen_xml")
    (tmp_path / "chat_template.jinja").unlink()
    assert examine_template(tmp_path, {}).error.endswith("named rag, tool_use, but none named default")
    named = [{"name": name, "template": text} for name, text in (("tool_use", SHOWS), ("default", CHATML))]
    (others / "tool_use.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    assert examine_template(tmp_path, {}).hides_tools == ""


def test_a_call_that_no_format_reads_is_shown(tmp_path: Path) -> None:
    prints = SHOWS + CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}!{{ m.tool_calls }}{% endif %}"
    )
    report = examine_template(folder_with(prints, tmp_path), {})
    assert report.format is None
    assert report.unread.startswith("!")
    assert "of mice & men, 5" in report.unread


@pytest.mark.parametrize(
    ("words", "form"),
    [
        ("Write <tool_call>JSON</tool_call>", "tagged"),
        ("Write <tool_call>\n<function=name>", "qwen_xml"),
        ("List of tools: <|tool_list_start|>", "lfm2"),
        ("", None),
    ],
)
def test_a_template_that_prints_no_calls_may_describe_them(
    words: str, form: str | None, tmp_path: Path
) -> None:
    template = SHOWS.replace("{% if tools %}", "{% if tools %}" + words) + CHATML
    assert examine_template(folder_with(template, tmp_path), {}).format == form


def test_a_template_that_drops_past_reasoning_is_noticed(tmp_path: Path) -> None:
    drops = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    assert examine_template(folder_with(drops, tmp_path), {}).drops_reasoning
    assert not examine_template(folder_with(CHATML, tmp_path), {}).drops_reasoning
