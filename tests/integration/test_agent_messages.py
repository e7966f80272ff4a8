"""Anthropic's Messages API of the agent gateway, as its clients send and read it."""

import json
from typing import Any

import aiohttp
import pytest

from astraflow.errors import RolloutError
from drivers.gateway_driver import CALL, OpenEpisode, Scripted, episode, policies
from drivers.rollout_fakes import ScriptedEngine
from drivers.workflow_driver import replayed

ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
VERSION = {"anthropic-version": "2023-06-01"}
ASKED: dict[str, Any] = {
    "model": "actor",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "2+3"}],
}


async def sent(
    open_: OpenEpisode, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """Status and text of an answer; the key is in `x-api-key` unless there are headers."""
    shown = headers or {**VERSION, "x-api-key": open_.endpoint.api_key}
    method = "GET" if body is None else "POST"
    async with (
        aiohttp.ClientSession(headers=shown) as client,
        client.request(method, open_.endpoint.anthropic_url + path, json=body) as reply,
    ):
        return reply.status, await reply.text()


async def said(open_: OpenEpisode, **asked: Any) -> Any:
    status, text = await sent(open_, "/v1/messages", {**ASKED, **asked})
    assert status == 200, text
    return json.loads(text)


async def refused(open_: OpenEpisode, **asked: Any) -> Any:
    status, text = await sent(open_, "/v1/messages", {**ASKED, **asked})
    assert status == 400, text
    problem = json.loads(text)
    assert (problem["type"], problem["error"]["type"]) == ("error", "invalid_request_error")
    return problem["error"]["message"]


async def test_a_text_is_answered_under_a_system_prompt_with_its_usage() -> None:
    engine = Scripted("It is 5.")
    async with episode(policies(engine)) as open_:
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        answer = await said(open_, system=system)
        (trajectory,) = open_.trajectories(1.0)
    assert answer.pop("id").startswith("msg_")
    prompt = len(engine.requests[0].token_ids)
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "actor",
        "content": [{"type": "text", "text": "It is 5."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt,
            "output_tokens": len("It is 5.") + 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }
    assert "Be brief." in engine.shown()
    assert (trajectory.reward, replayed(trajectory)) == (1.0, engine.sampled)


async def test_calls_and_results_sent_back_as_blocks_go_on_in_one_trajectory() -> None:
    engine = Scripted(f"I add. {CALL}{CALL}", "It is 5.")
    async with episode(policies(engine)) as open_:
        first = await said(open_, tools=[ADD], tool_choice={"type": "any"})
        assert [block["type"] for block in first["content"]] == ["text", "tool_use", "tool_use"]
        assert (first["content"][0]["text"], first["stop_reason"]) == ("I add.", "tool_use")
        calls = first["content"][1:]
        assert [(call["name"], call["input"]) for call in calls] == [("add", {"a": 2})] * 2
        assert len({call["id"] for call in calls}) == 2
        results = [
            {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "5"},
            {
                "type": "tool_result",
                "tool_use_id": calls[1]["id"],
                "content": [{"type": "text", "text": "5"}],
            },
            {"type": "text", "text": "Thanks."},
        ]
        history = [
            *ASKED["messages"],
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": results},
        ]
        second = await said(open_, tools=[ADD], messages=history)
        (trajectory,) = open_.trajectories()
        assert open_.endpoint.unmet_frac == 0.0
    assert second["content"] == [{"type": "text", "text": "It is 5."}]
    assert engine.shown().count("<response>5</response>") == 2
    assert engine.shown().index("<response>") < engine.shown().index("Thanks.")
    assert (len(trajectory.turns), replayed(trajectory)) == (2, engine.sampled)


async def test_one_history_goes_on_in_another_dialect() -> None:
    engine = Scripted("5.", "Yes.")
    async with episode(policies(engine)) as open_:
        first = await said(open_)
        history: Any = [*ASKED["messages"], {"role": "assistant", "content": first["content"][0]["text"]}]
        await open_.client.chat.completions.create(
            model="actor", messages=[*history, {"role": "user", "content": "Sure?"}]
        )
        (trajectory,) = open_.trajectories()
    assert (len(trajectory.turns), replayed(trajectory)) == (2, engine.sampled)


async def test_a_stream_tells_each_block_in_order_and_ends_with_the_usage() -> None:
    async with episode(policies(Scripted(f"I add. {CALL}"))) as open_:
        status, text = await sent(open_, "/v1/messages", {**ASKED, "tools": [ADD], "stream": True})
        assert status == 200, text
    lines = [line for line in text.split("\n") if line]
    events: list[Any] = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == [
        "message_start", *block, *block, "message_delta", "message_stop"
    ]  # fmt: skip
    begun = events[0]["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 0)
    assert [event["index"] for event in events[1:7]] == [0, 0, 0, 1, 1, 1]
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert events[2]["delta"] == {"type": "text_delta", "text": "I add."}
    call = events[4]["content_block"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {})
    assert events[5]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 2}'}
    assert events[7]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[7]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize(
    ("asked", "reason", "sequence", "text"),
    [
        ({"max_tokens": 3}, "max_tokens", None, "It "),
        ({"stop_sequences": ["7", " 5."]}, "stop_sequence", " 5.", "It is"),
        ({"stop_sequences": ["7"]}, "end_turn", None, "It is 5."),
    ],
)
async def test_an_answer_says_why_it_ended(
    asked: dict[str, Any], reason: str, sequence: str | None, text: str
) -> None:
    async with episode(policies(Scripted("It is 5."))) as open_:
        answer = await said(open_, **asked)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert answer["content"][0]["text"] == text


async def test_a_schema_is_told_and_never_forced() -> None:
    engine = Scripted('<think>2 and 3</think>{"sum": 5}')
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    form = {"format": {"type": "json_schema", "schema": schema}, "effort": "high"}
    async with episode(policies(engine)) as open_:
        answer = await said(open_, output_config=form)
    assert json.loads(answer["content"][0]["text"]) == {"sum": 5}
    assert f"JSON schema, and with nothing else: {json.dumps(schema)}" in (engine.shown())


async def test_tokens_are_counted_without_an_answer() -> None:
    engine = Scripted("5.")
    async with episode(policies(engine)) as open_:
        asked = {key: value for key, value in ASKED.items() if key != "max_tokens"}
        status, text = await sent(open_, "/v1/messages/count_tokens", {**asked, "tools": [ADD]})
        assert open_.trajectories() == ()
        answer = await said(open_, tools=[ADD])
    assert (status, json.loads(text)) == (200, {"input_tokens": answer["usage"]["input_tokens"]})


async def test_an_answer_without_a_largest_number_of_tokens_is_refused() -> None:
    async with episode(policies(Scripted())) as open_:
        assert "max_tokens" in await refused(open_, max_tokens=None)


async def test_the_key_is_read_from_both_headers_and_a_wrong_one_is_refused() -> None:
    async with episode(policies(Scripted("5.", "5."))) as open_:
        key = open_.endpoint.api_key
        for headers in ({"x-api-key": key}, {"Authorization": f"Bearer {key}", "x-api-key": "other"}):
            status, _ = await sent(open_, "/v1/messages", ASKED, headers)
            assert status == 200
        for headers in ({"x-api-key": "guess"}, {"Authorization": "Bearer guess"}, {"x-other": ""}):
            status, text = await sent(open_, "/v1/messages", ASKED, headers)
            error = {"type": "authentication_error", "message": "wrong API key"}
            assert (status, json.loads(text)) == (401, {"type": "error", "error": error})


async def test_policies_are_listed_in_the_form_of_the_dialect() -> None:
    model = {
        "type": "model", "id": "actor", "display_name": "actor", "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
    }  # fmt: skip
    async with episode(policies(Scripted())) as open_:
        _, text = await sent(open_, "/v1/models")
        assert json.loads(text) == {
            "data": [model], "has_more": False, "first_id": "actor", "last_id": "actor",
        }  # fmt: skip
        assert json.loads((await sent(open_, "/v1/models/actor"))[1]) == model
        status, text = await sent(open_, "/v1/models/other")
        assert (status, json.loads(text)["error"]["type"]) == (404, "not_found_error")


def blocks(*given: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [*ASKED["messages"], {"role": role, "content": list(given)}]}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (blocks({"type": "image", "source": {"type": "url", "url": "x"}}), "image"),
        (blocks({"type": "document", "source": {}}), "document"),
        (
            blocks({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image", "source": {}}]}),
            "image",
        ),
        (
            {"messages": [*blocks({"type": "thinking", "thinking": "x"}, role="assistant")["messages"],
                          {"role": "user", "content": "so?"}]},
            "thinking",
        ),
        (blocks({"type": "text", "text": "It is"}, role="assistant"), "prefilled replies are not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "'sub'"),
        ({"tools": [ADD], "tool_choice": {"type": "some"}}, "auto, any, none or tool"),
        ({"top_k": 5}, "top_k"),
        ({"temperature": 0.5}, "trained with 1;"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"messages": []}, "messages is empty"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses"),
    ],
)  # fmt: skip
async def test_what_no_policy_can_do_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    engine = Scripted()
    async with episode(policies(engine)) as open_:
        assert named in await refused(open_, **asked)
        assert named in open_.endpoint.problem
    assert engine.requests == []


async def test_what_changes_no_token_has_no_effect() -> None:
    async with episode(policies(Scripted("5."))) as open_:
        answer = await said(
            open_,
            thinking={"type": "enabled", "budget_tokens": 2000},
            metadata={"user_id": "x"},
            service_tier="auto",
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        )
    assert answer["content"][0]["text"] == "5."


async def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_know() -> None:
    async with episode(policies(ScriptedEngine("ok", max_context=40))) as open_:
        message = await refused(open_, messages=[{"role": "user", "content": "3" * 50}])
    assert message.startswith("prompt is too long: the prompt has ")


async def test_an_engine_that_fails_is_an_error_of_the_server() -> None:
    engine = ScriptedEngine()
    engine.error = RolloutError("gone")
    async with episode(policies(engine)) as open_:
        status, text = await sent(open_, "/v1/messages", ASKED)
    assert (status, json.loads(text)["error"]["type"]) == (503, "api_error")


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/v1/messages/batches", "only these routes of Anthropic's API exist"),
        ("/v1/v1/messages", "without /v1"),
        ("/v1/files", "POST /v1/messages/count_tokens"),
    ],
)
async def test_an_address_that_is_not_served_says_what_is(path: str, named: str) -> None:
    async with episode(policies(Scripted())) as open_:
        status, text = await sent(open_, path, {})
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (404, "not_found_error")
    assert named in error["message"]


async def test_an_episode_that_is_over_is_not_found() -> None:
    async with episode(policies(Scripted())) as open_:
        async with open_.gateway.endpoint(open_.dialogue, tuple) as inner:
            url, key = inner.anthropic_url, inner.api_key
        headers = {**VERSION, "x-api-key": key}
        async with aiohttp.ClientSession(headers=headers) as client:
            reply = await client.post(f"{url}/v1/messages", json=ASKED)
            assert (reply.status, (await reply.json())["error"]["type"]) == (404, "not_found_error")


ODD = (
    '{"name": "\\ud83d", "arguments": {}}', '{"name": "add", "arguments": {"a": NaN}}',
    '{"name": "add", "arguments": {"a": 1e999}}', '{"name": "add", "arguments": {"a": "\\udc00"}}',
)  # fmt: skip


@pytest.mark.parametrize("call", ODD)
async def test_a_call_that_no_json_can_say_is_shown_as_text_in_each_dialect(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    async with episode(policies(Scripted(text, text, text))) as open_:
        answer = await said(open_, tools=[ADD])
        assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": text}], "end_turn")
        function: Any = {"name": "add", "parameters": {"type": "object"}}
        chat = await open_.client.chat.completions.create(
            model="actor",
            messages=[{"role": "user", "content": "2+3"}],
            tools=[{"type": "function", "function": function}],
        )
        assert chat.choices[0].message.content == text
        response = await open_.client.responses.create(
            model="actor", input="2+3", tools=[{"type": "function", "strict": False, **function}]
        )
        assert response.output_text == text
