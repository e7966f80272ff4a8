"""Rows of conversations: what is learned of them, and which are left out, by number and reason."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.supervised.chats import Function, UnfitRowError, chat_of_row, read_chats
from astraflow.addons.supervised.config import MessagesSourceConfig
from astraflow.errors import DataError

ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
Said = dict[str, Any]


def said(role: str, content: object = "So.", **keys: object) -> Said:
    return {"role": role, "content": content, **keys}


def called(*names: str, arguments: object = '{"a": 2}') -> Said:
    calls = [{"id": f"id{i}", "function": {"name": n, "arguments": arguments}} for i, n in enumerate(names)]
    return said("assistant", None, tool_calls=calls)


def row(*messages: Said, tools: object = (ADD,)) -> dict[str, Any]:
    return {"messages": list(messages), "tools": list(tools) if isinstance(tools, tuple) else tools}


ASKED = said("user", "2?")
TWICE = (ASKED, said("assistant", "A"), ASKED, said("assistant", "B"))


@pytest.mark.parametrize(
    ("messages", "only_last", "trained"),
    [
        (TWICE, False, [1, 3]),
        (TWICE, True, [3]),
        ((ASKED, said("assistant", "A", train=True), *TWICE[2:]), True, [1, 3]),
        ((*TWICE[:3], said("assistant", "B", weight=0)), False, [1]),
        ((ASKED, said("assistant", "A", weight=0.0), ASKED, said("assistant", "B", weight=1)), False, [3]),
    ],
)
def test_the_rule_and_the_flags_of_messages_choose_the_trained_turns(
    messages: tuple[Said, ...], only_last: bool, trained: list[int]
) -> None:
    turns = chat_of_row(row(*messages), only_last=only_last).turns
    assert [idx for idx, turn in enumerate(turns) if turn.train] == trained


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "content"])
def test_reasoning_is_read_from_its_key_or_from_the_content(key: str) -> None:
    keys = {"content": "<think>\nTwo.\n</think>\n\nA"} if key == "content" else {"content": "A", key: "Two."}
    turn = chat_of_row(row(ASKED, {"role": "assistant", **keys})).turns[1]
    assert (turn.reasoning_content, turn.text) == ("Two.", "A")


def test_results_get_the_name_of_their_call_and_tools_may_be_json_text() -> None:
    tools = json.dumps([{"type": "function", "function": ADD}, {**ADD, "name": "sub"}])
    results = [said("tool", "4", tool_call_id="id1"), said("tool", "3", tool_call_id="id0")]
    parts = [{"type": "text", "text": "2"}, {"type": "text", "text": "?"}]
    chat = chat_of_row(row(said("system"), said("user", parts), called("add", "sub"), *results, tools=tools))
    assert [turn.role for turn in chat.turns] == ["system", "user", "assistant", "tool", "tool"]
    assert [turn.name for turn in chat.turns[3:]] == ["sub", "add"]
    assert chat.turns[1].text == "2?"
    assert chat.turns[2].calls == [Function("add", {"a": 2}), Function("sub", {"a": 2})]
    assert [tool.name for tool in chat.tools] == ["add", "sub"]


UNFIT = {
    "no messages": ({}, "bad_message", "can't be read"),
    "an unknown role": (row(said("bot")), "bad_message", "bot"),
    "an image": (row(said("user", [{"type": "image"}])), "bad_message", "of type 'image'"),
    "a weight": (row(ASKED, said("assistant", weight=0.5)), "bad_message", "the weight 0.5"),
    "a trained user": (row(said("user", train=True), said("assistant")), "bad_message", "weight True"),
    "an empty turn": (row(ASKED, said("assistant", " \n")), "empty_turn", "message 2 .* is empty"),
    "nothing to train": (row(ASKED, said("assistant", weight=0)), "nothing_trained", "no turn of"),
    "only questions": (row(ASKED), "nothing_trained", "no turn of"),
    "an unknown tool": (row(ASKED, called("find")), "bad_calls", "calls 'find', which isn't"),
    "calls without tools": (row(ASKED, called("add"), tools=None), "bad_calls", "calls 'add', which isn't"),
    "arguments that aren't JSON": (row(ASKED, called("add", arguments="{")), "bad_calls", "aren't JSON:"),
    "a list of arguments": (row(ASKED, called("add", arguments="[1]")), "bad_calls", "a JSON object"),
    "a result without a call": (row(ASKED, said("tool"), said("assistant")), "bad_calls", "message 2"),
    "a second result": (row(ASKED, called("add"), said("tool"), said("tool")), "bad_calls", "message 4"),
    "a strange id": (row(ASKED, called("add"), said("tool", tool_call_id="x")), "bad_calls", "message 3"),
    "a call without a result": (row(ASKED, called("add"), ASKED, said("assistant")), "bad_calls", "no res"),
    "an old call": (row(ASKED, said("assistant", function_call={"name": "add"})), "bad_calls", "tool_calls"),
    "a user who calls": (row(called("add") | {"role": "user"}), "bad_calls", "tool_calls"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_a_row_that_cannot_be_learned_says_why(name: str) -> None:
    given, kind, text = UNFIT[name]
    with pytest.raises(UnfitRowError, match=text) as caught:
        chat_of_row(given)
    assert caught.value.kind == kind


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    return str(path)


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet"])
def test_rows_that_are_left_out_are_counted_and_named(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit = row(ASKED, called("add"), said("tool", "5"), said("assistant", "=5"))
    rows = [fit, UNFIT["an empty turn"][0], fit, UNFIT["an unknown tool"][0], UNFIT["a second result"][0]]
    with caplog.at_level(logging.WARNING):
        source = read_chats(MessagesSourceConfig(path=write(tmp_path / name, rows)), name="chats")
    assert [source.task(idx).id for idx in range(len(source))] == ["chats/0", "chats/2"]
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        "1 of 5 rows are left out (empty_turn): row 2: message 2 (assistant) is empty",
        "2 of 5 rows are left out (bad_calls): row 4: message 2 (assistant) calls 'find', which isn't one of "
        "the row's tools; row 5: message 4 (tool) is a result without a call",
    ]


def test_a_file_without_a_fit_row_is_refused_with_the_first_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", [UNFIT["only questions"][0]])
    with pytest.raises(DataError, match="no conversation that can be learned: row 1: no turn"):
        read_chats(MessagesSourceConfig(path=path), name="chats")
