"""Calls in a model's text: what is one, what is reasoning, and what the model is told about one that is
broken."""

import json

import pytest

from astraflow.tasks.answers import extract_answer
from astraflow.types.model_text import find_reasoning, with_opening
from astraflow.workflows.calls import (
    CALL_PARSERS,
    bare_json_calls,
    looks_like_call,
    offered_calls,
    tagged_calls,
    without_reasoning,
)
from astraflow.workflows.conversation import Completion


def tagged(name: str = "find", arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def bare(name: str = "find", arguments: str = "{}") -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def names(parser: str, text: str) -> list[str]:
    return [call.name or call.problem for call in CALL_PARSERS[parser](text)]


# --- reasoning ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "called"),
    [
        (f"<think>Maybe {tagged('drop')} but no.</think>It is 4.", []),
        (f"<think>Try {tagged('drop')}</think>{tagged()}", ["find"]),
        (f"Maybe {tagged('drop')} but no.</think>It is 4.", []),
        (f"<think>Maybe {tagged('drop')}", []),
        (f"{tagged()}<think>And {tagged('drop')}", ["find"]),
        (f"<think>a {tagged('drop')}</think>{tagged()}<think>b</think>{tagged('look')}", ["find", "look"]),
        (f"<think>a</think>{tagged()} oh</think>{tagged('look')}", ["find", "look"]),
        (f"<think>\n\n</think>\n\n{tagged()}", ["find"]),
        (tagged(arguments='{"text": "</think>"}'), ["find"]),
        (tagged(arguments='{"text": "<think>"}') + tagged("look"), ["find", "look"]),
        ("<think>a</think>" + tagged(arguments='{"text": "<think>b</think>"}'), ["find"]),
        ("Maybe " + tagged("drop", '{"text": "</think>"}') + "</think>" + tagged(), ["find"]),
    ],
)
def test_a_call_in_reasoning_is_not_a_call(text: str, called: list[str]) -> None:
    assert names("tagged", text) == called


@pytest.mark.parametrize(
    ("text", "called"),
    [
        (f"<think>{bare('drop')}</think>{bare()}", ["find"]),
        (f"<think>{bare('drop')}</think>It is 4.", []),
        (f"{bare('drop')} hm.</think>\n{bare()}", ["find"]),
        (f"<think>{bare('drop')}", []),
        (bare(arguments='{"text": "</think>"}'), ["find"]),
        (bare(arguments='{"text": "<think>"}'), ["find"]),
    ],
)
def test_a_bare_call_in_reasoning_is_not_a_call(text: str, called: list[str]) -> None:
    assert names("bare_json", text) == called


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5", "5"),
        ("<think>hm</think> 5 ", "5"),
        ("hm</think>5", "5"),
        ("5<think>hm", "5"),
        ("<think>hm", ""),
        ("5 <think>hm</think>or 6", "5 or 6"),
        (
            "<think>a</think>It is 5. The tag </think> ends thoughts.",
            "It is 5. The tag </think> ends thoughts.",
        ),
        ("a</think>It is 5; see </think>.", "It is 5; see </think>."),
        (
            "<think>a</think>Open with <think>, close with </think>: 5",
            "Open with <think>, close with </think>: 5",
        ),
        ("<think>a</think>\n<think>b</think>5", "<think>b</think>5"),
        ("<think>\nWrite `</think>` then?\n</think>\n\n5", "5"),
        ("Use the <think> tag. It is 5.", "Use the <think> tag. It is 5."),
        ("The tag </think> ends thoughts: 5", "The tag </think> ends thoughts: 5"),
        ("Write <think> before and </think> after it: 5", "Write <think> before and </think> after it: 5"),
        ("Sure. <think>4?</think> It is 5.", "Sure.  It is 5."),
        ("Sure. <think> It may be 4.\n</think>\n5", "Sure. \n5"),
        ("So 4?\n</think>\n5", "5"),
        ("So 4?</think> 5", "5"),
        ("Thoughts go between `<think>` and `</think>`.", "Thoughts go between `<think>` and `</think>`."),
        ('print("</think>")', 'print("</think>")'),
        ("Let me see.\n<think>\nSo 5", "Let me see."),
        ("<thinking>4?</thinking>5", "5"),
        ("[THINK]4?[/THINK]5", "5"),
        ('{"text": "</think>"}', '{"text": "</think>"}'),
        (tagged(arguments='{"text": "</think>"}'), tagged(arguments='{"text": "</think>"}')),
    ],
)
def test_what_a_model_says_is_its_text_without_its_reasoning(text: str, said: str) -> None:
    assert without_reasoning(text) == said
    assert Completion("actor", text, "stop", 1, 0).reply == said


JSON = '{"q": "</think> <|end|>"}'
TO_FIND = "<|start|>assistant to=functions.find<|channel|>commentary json<|message|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "reply"),
    [
        ("<seed:think>hm</seed:think>5", "hm", "5"),
        ("<mm:think>hm</mm:think>5", "hm", "5"),
        ("<longcat_think>\nhm\n</longcat_think>\n5", "\nhm\n", "5"),
        ("<|channel>thought\nhm\n<channel|>5", "\nhm\n", "5"),
        ("hm<channel|>5", "hm", "5"),
        ("<|START_THINKING|>hm<|END_THINKING|>5", "hm", "5"),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>5", "hm", "5"),
        ("<|channel|>analysis<|message|>hm", "hm", ""),
        ("<|channel|>final<|message|>5<|return|>", None, "5"),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis"
            f"<|message|>hm<|end|>{TO_FIND}{JSON}<|call|>",
            "hm",
            f"I look.\n{TO_FIND}{JSON}<|call|>",
        ),
        ("Headers such as <|channel|>final<|message|> are text.", None, None),
        (
            "<think>a</think><parameter=q>\n</think>\n</parameter>",
            "a",
            "<parameter=q>\n</think>\n</parameter>",
        ),
        (f"hm</think><|tool_call_argument_begin|>{JSON}", "hm", f"<|tool_call_argument_begin|>{JSON}"),
        ("[find(q='</think>')]", None, None),
    ],
)
def test_each_family_marks_its_reasoning(text: str, reasoning: str | None, reply: str | None) -> None:
    found = find_reasoning(text)
    assert (found and found.text_in(text)) == reasoning
    said = text if reply is None else reply
    assert without_reasoning(text) == Completion("actor", text, "stop", 1, 0).reply == said
    assert extract_answer(text, mode="whole") == (said or None)


def test_a_reply_is_not_searched_for_reasoning_again() -> None:
    reply = without_reasoning("<think>a</think>It is 5; see </think>. " + tagged())
    assert reply.startswith("It is 5; see </think>. ")
    (call,) = offered_calls(tagged_calls, f"{tagged()} See </think>.", ["find"])
    assert call.name == "find"


def test_the_opening_tag_of_reasoning_is_added_where_the_prompt_had_it() -> None:
    assert with_opening("hm</think>5") == "<think>\nhm</think>5"
    for text in ("<think>hm</think>5", "hm", "<think>a</think>b</think>"):
        assert with_opening(text) == text


def test_reasoning_that_began_in_the_prompt_and_did_not_end_is_not_said() -> None:
    text = f"Maybe {tagged('drop')}"
    assert Completion("actor", text, "length", 1, 0).reply == text
    assert Completion("actor", text, "length", 1, 0, begins_in_reasoning=True).reply == ""
    ended = Completion("actor", f"{text}</think>{tagged()}", "stop", 1, 0, begins_in_reasoning=True)
    assert ended.reply == tagged()
    for opening in ("[THINK]", "<|channel>thought"):
        assert Completion("actor", f"{opening}\n5", "length", 1, 0, begins_in_reasoning=True).reply == ""


# --- how calls are written ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("null", {}),
        ('""', {}),
        ('" "', {}),
        ('"null"', {}),
        (json.dumps('{"q": "cats"}'), {"q": "cats"}),
        (json.dumps(' {"q": {"a": [1, {}]}}\n'), {"q": {"a": [1, {}]}}),
        (json.dumps(json.dumps({"q": 1})), {"q": 1}),
        ('{"q": "</tool_call>"}', {"q": "</tool_call>"}),
        ('{"q": "<tool_call>{}</tool_call> {{}}}"}', {"q": "<tool_call>{}</tool_call> {{}}}"}),
        (r'{"q": "\"}</tool_call>\\"}', {"q": '"}</tool_call>\\'}),
        (r'{"q": "gr\u00f6\u00dfer \ud83d\ude42"}', {"q": "größer 🙂"}),
        ('{"q": "a\nb\tc"}', {"q": "a\nb\tc"}),
        ('{"q": 1, "q": 1}', {"q": 1}),
    ],
)
def test_arguments_are_an_object_or_json_text_of_one_or_nothing(arguments: str, read: object) -> None:
    for call in (*tagged_calls(tagged(arguments=arguments)), *bare_json_calls(bare(arguments=arguments))):
        assert (call.name, call.arguments, call.problem) == ("find", read, "")


def test_arguments_have_either_name() -> None:
    both = '{"name": "find", "arguments": null, "parameters": {"q": 1}}'
    assert bare_json_calls(both)[0].arguments == {"q": 1}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("[1, 2]", "the arguments of 'find' are [1, 2], not an object"),
        ("3", "are 3, not an object"),
        ("true", "are true, not an object"),
        ('"[1]"', "are [1], not an object"),
        ('"cats"', "are text that is not JSON"),
        (json.dumps('{"q": 1} or so'), "are text that is not JSON: text follows the JSON, at character 8"),
        ('{"q": 1, "q": 2}', "the key 'q' has two values"),
        ('{"q": 1e999}', "not valid JSON"),
        (r'{"q": "\ud83d"}', "not valid JSON"),
        ("{'q': 1}", "enclosed in double quotes, at character 31"),
    ],
)
def test_what_is_wrong_with_arguments_is_told(arguments: str, problem: str) -> None:
    for parser, text in (("tagged", tagged(arguments=arguments)), ("bare_json", bare(arguments=arguments))):
        (call,) = CALL_PARSERS[parser](text)
        told = problem if parser == "tagged" else problem.replace("31", "32")
        assert told in call.problem
        assert call.name == ""


@pytest.mark.parametrize(
    "text",
    [
        tagged() + tagged("look"),
        f"First\n{tagged()}\n\nand then\n{tagged('look')}\nthat is all.",
        tagged().replace("</tool_call>", "\n") + tagged("look"),
        tagged().removesuffix("</tool_call>") + "\n" + tagged("look").removeprefix("<tool_call>"),
        f"<tool_call>\n[{bare()}, {bare('look')}]\n</tool_call>",
        tagged() + tagged("look").removesuffix("</tool_call>"),
    ],
)
def test_tagged_calls_may_follow_one_another(text: str) -> None:
    assert names("tagged", text) == ["find", "look"]


@pytest.mark.parametrize("between", ["; ", "\n", " ", "", ",", ";\n\n", "<|python_tag|>"])
def test_bare_calls_may_follow_one_another(between: str) -> None:
    assert names("bare_json", f"<|python_tag|>{bare()}{between}{bare('look')}") == ["find", "look"]
    assert names("bare_json", f" [{bare()}, {bare('look')}]\n") == ["find", "look"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call></tool_call>", "no JSON follows the tag"),
        ("<tool_call>find(1)</tool_call>", "no JSON follows the tag, at character 0"),
        (tagged().replace("</tool_call>", " please</tool_call>"), "text follows the JSON, at character 34"),
        (tagged().replace("}}", "}}}"), "text follows the JSON, at character 33"),
        ("<tool_call>{</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": " "}</tool_call>', "the call has no name"),
        ('<tool_call>{"name": "find"}</tool_call>', "the call of 'find' has no arguments"),
        ('<tool_call>{"name": "rm", "args": {"path": "x"}}</tool_call>', "the call of 'rm' has no arguments"),
    ],
)
def test_a_broken_tag_is_told_and_the_next_one_is_read(text: str, problem: str) -> None:
    broken, good = tagged_calls(text + tagged())
    assert problem in broken.problem
    assert (broken.name, good.name) == ("", "find")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Alice", "age": 5}',
        '[{"name": "Alice"}, {"name": "Bob"}]',
        '{"name": "rm", "args": {"path": "x"}}',
        '{"name": ["find"], "arguments": {}}',
        f'[{bare()}, {{"name": "Bob"}}]',
        f'{bare()} {{"name": "Bob"}}',
        '{"name": "Alice", "age": 5} is the record.',
        '{"person": {"name": "Alice"}}',
        '{"name": "Alice"',
    ],
)
def test_json_without_a_name_and_arguments_is_an_answer(text: str) -> None:
    assert bare_json_calls(text) == ()


@pytest.mark.parametrize(
    ("text", "called"),
    [
        (bare(), 1),
        (bare("Alice", '{"age": 5}'), 0),
        (f"[{bare()}, {bare('Alice')}]", 0),
        (bare("Alice", '"none"'), 0),
        (f"{bare()} I wait.", 1),
        (f"{bare('Alice')} is the record.", 0),
        (bare(arguments=json.dumps('{"q": 1}')), 1),
    ],
)
def test_json_is_a_call_only_of_a_tool_that_was_offered(text: str, called: int) -> None:
    assert len(offered_calls(bare_json_calls, text, ["find", "look"])) == called
    assert offered_calls(bare_json_calls, text, []) == ()


def test_a_call_in_tags_stays_even_if_nothing_offers_its_tool() -> None:
    (call,) = offered_calls(tagged_calls, tagged("drop"), ["find"])
    assert call.name == "drop"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 5.", False),
        ("I would use find.", False),
        ('{"name": "Alice", "age": 5}', False),
        (tagged(), True),
        ("<tool_call>\n<function=find>\n</function>\n</tool_call>", True),
        ("[TOOL_CALLS][]", True),
        ('{"name": "find", "args": {}}', True),
        ('```json\n{"tool": "find"}\n```', True),
        ('find(q="cats")', True),
        ('[find(q="cats")]', True),
    ],
)
def test_a_text_that_looks_like_a_call_is_recognized_in_any_style(text: str, expected: bool) -> None:
    assert looks_like_call(text, ["find", "look"]) is expected
    assert not looks_like_call(text, [])


def test_bare_json_with_text_behind_it_is_told() -> None:
    (call,) = bare_json_calls(f"{bare()} I wait.")
    assert call.problem == (
        "the call is not valid JSON: text follows the JSON, at character 35; write the call alone"
    )


def test_a_long_text_of_broken_tags_is_read() -> None:
    assert len(tagged_calls('<tool_call>{"a": ["' * 5_000)) == 1
    assert tagged_calls("<think>" * 100_000) == ()
    assert tagged_calls("a <think> " * 50_000) == ()
    assert tagged_calls("a <think> or </think> " * 20_000) == ()
    assert tagged_calls("`</think>` a <think> " * 50_000) == ()
    assert names("tagged", "</think><tool_call>[" * 5_000)[0].endswith("at character 1")
