"""Forms that requests ask for, addresses that are not served, and how both read for OpenAI's own client."""

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from drivers.gateway_driver import CALL, OpenEpisode, Scripted, episode, policies, posted
from drivers.workflow_driver import replayed

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
NAMED: Any = {"type": "function", "function": {"name": "add"}}
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"type": "object", "properties": {"sum": {}}}},
}
ASKED_CALL = "Reply with a call of one of the tools."


def user(text: str) -> Any:
    return {"role": "user", "content": text}


# --- tool_choice and response_format ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, ASKED_CALL),
        ({"tools": [TOOL], "tool_choice": NAMED}, "Reply with a call of the tool add."),
        ({"response_format": {"type": "json_object"}}, "Reply with one JSON object, and with nothing else."),
        (
            {"response_format": SCHEMA},
            'Reply with JSON that fits this JSON schema, and with nothing else: {"ty',
        ),
        ({"response_format": SCHEMA, "tools": [TOOL]}, "Unless you call a tool, reply with JSON that fits"),
    ],
)
async def test_a_form_is_told_to_the_policy_once_and_never_forced(asked: dict[str, Any], line: str) -> None:
    engine = Scripted("I would rather not.", "Still not.")
    async with episode(policies(engine)) as open_:
        chat = open_.client.chat.completions
        first = await chat.create(model="actor", messages=[user("2+3")], **asked)
        said = first.choices[0].message.content
        assert said == "I would rather not."
        history = [user("2+3"), {"role": "assistant", "content": said}, user("Please.")]
        await chat.create(model="actor", messages=history, **asked)
        (trajectory,) = open_.trajectories()
        assert open_.endpoint.unmet_frac == 1.0
    assert engine.shown(0).count(line) == engine.shown(1).count(line) == 1
    assert "2+3\n\n" + line in engine.shown(0)
    assert (len(trajectory.turns), replayed(trajectory)) == (2, engine.sampled)


async def test_a_form_that_is_asked_for_later_stands_behind_the_newest_message() -> None:
    engine = Scripted(CALL, '{"sum": 5}')
    async with episode(policies(engine)) as open_:
        chat = open_.client.chat.completions
        first = await chat.create(model="actor", messages=[user("2+3")], tools=[TOOL], tool_choice="required")
        message: Any = first.choices[0].message
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
        await chat.create(
            model="actor", messages=[user("2+3"), message, result], tools=[TOOL], response_format=SCHEMA
        )
        assert open_.endpoint.unmet_frac == 0.0
        (trajectory,) = open_.trajectories()
    assert "<response>5\n\nUnless you call a tool" in engine.shown()
    assert replayed(trajectory) == engine.sampled


@pytest.mark.parametrize(
    ("asked", "reply", "unmet"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, CALL, 0.0),
        ({"tools": [TOOL], "tool_choice": "required"}, CALL.replace("add", "sub"), 1.0),
        ({"response_format": {"type": "json_object"}}, "[5]", 1.0),
        ({"response_format": SCHEMA}, "[5]", 0.0),
        ({"response_format": SCHEMA}, "5.", 1.0),
        ({"response_format": SCHEMA, "tools": [TOOL]}, CALL, 0.0),
        ({"response_format": {"type": "text"}, "tools": [TOOL], "tool_choice": "auto"}, "hm", None),
    ],
)
async def test_replies_without_the_form_are_counted(
    asked: dict[str, Any], reply: str, unmet: float | None
) -> None:
    async with episode(policies(Scripted(reply))) as open_:
        await open_.client.chat.completions.create(model="actor", messages=[user("2+3")], **asked)
        assert open_.endpoint.unmet_frac == unmet


async def test_a_client_that_asked_for_json_reads_no_reasoning_and_its_history_still_goes_on() -> None:
    engine = Scripted('<think>2 and 3</think>\n{"sum": 5}', "Yes.")
    async with episode(policies(engine)) as open_:
        chat = open_.client.chat.completions
        first = await chat.create(model="actor", messages=[user("2+3")], response_format=SCHEMA)
        said = first.choices[0].message.content
        assert json.loads(said or "") == {"sum": 5}
        history = [user("2+3"), {"role": "assistant", "content": said}, {"role": "tool", "content": "ok"}]
        await chat.create(model="actor", messages=history)
        (trajectory,) = open_.trajectories()
    assert (len(trajectory.turns), replayed(trajectory)) == (2, engine.sampled)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tool_choice": "required"}, "the request has no tools"),
        ({"tool_choice": NAMED}, "names the tool 'add', but the request has no tools"),
        ({"tool_choice": "any", "tools": [TOOL]}, "auto, none, required or"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "auto, none, required or"),
        ({"response_format": {"type": "grammar"}}, "'grammar' is not a format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema with a json_schema"),
    ],
)
async def test_a_form_that_means_nothing_is_refused(asked: dict[str, Any], message: str) -> None:
    engine = Scripted()
    async with episode(policies(engine)) as open_:
        with pytest.raises(openai.BadRequestError, match=message):
            await open_.client.chat.completions.create(model="actor", messages=[user("2")], **asked)
    assert engine.requests == []


async def test_calls_of_requests_at_the_same_time_have_different_ids() -> None:
    async with episode(policies(Scripted(CALL, CALL))) as open_:
        chat = open_.client.chat.completions
        done = await asyncio.gather(
            *(chat.create(model="actor", messages=[user(text)], tools=[TOOL]) for text in "23")
        )
    calls: list[Any] = [call for answer in done for call in answer.choices[0].message.tool_calls or ()]
    assert len({call.id for call in calls}) == 2


async def test_bare_json_calls_are_not_shown_as_text_too() -> None:
    async with episode(policies(Scripted('{"name": "add", "parameters": {"a": 2}}')), bare=True) as open_:
        done = await open_.client.chat.completions.create(model="actor", messages=[user("2")], tools=[TOOL])
    message = done.choices[0].message
    assert (message.content, len(message.tool_calls or ())) == (None, 1)


# --- streams ----------------------------------------------------------------------------------------


async def test_a_stream_has_one_choice_a_chunk_its_usage_and_an_end() -> None:
    body = {
        "model": "actor", "messages": [user("2+3")], "tools": [TOOL], "n": 2, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with episode(policies(Scripted(f"I add. {CALL}", "No."))) as open_:
        lines = await posted(open_, "/chat/completions", body)
    assert lines.pop() == "data: [DONE]"
    chunks: list[Any] = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, 1, 0]
    assert [(c["index"], c["finish_reason"]) for c in choices] == [
        (0, None),
        (0, "tool_calls"),
        (1, None),
        (1, "stop"),
    ]
    delta = choices[0]["delta"]
    assert (delta["role"], delta["content"]) == ("assistant", "I add.")
    assert delta["tool_calls"][0]["index"] == 0
    assert delta["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert chunks[-1]["usage"]["completion_tokens"] > 0


# --- what is not served -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("POST", "/completions", "POST v1/completions is not served.*send messages to /v1/chat/completions"),
        ("POST", "/embeddings", "without embeddings"),
        ("GET", "/responses/resp_1", "answers are not stored: use the reply to the request"),
        ("POST", "/v1/chat/completions", "already ends in /v1"),
        ("GET", "/chat/completions", "GET v1/chat/completions is not served"),
        ("DELETE", "/models/actor", "is not served"),
        (
            "GET",
            "/files",
            "POST /v1/chat/completions, POST /v1/responses, POST /v1/messages, .* GET /v1/models",
        ),
    ],
)
async def test_an_address_that_is_not_served_says_what_is(method: str, path: str, message: str) -> None:
    async with episode(policies(Scripted())) as open_:
        with pytest.raises(openai.NotFoundError, match=message) as refused:
            await asked(open_, method, path)
        assert refused.value.code == "unknown_url"
        assert "is not served" in open_.endpoint.problem


async def asked(open_: OpenEpisode, method: str, path: str) -> object:
    """A request by OpenAI's client to an address of its own."""
    ask: Any = getattr(open_.client, method.lower())
    return await ask(path, cast_to=object, **({"body": {}} if method == "POST" else {}))


async def test_a_stranger_is_not_told_of_an_episode() -> None:
    async with episode(policies(Scripted())) as open_:
        with pytest.raises(openai.AuthenticationError):
            await asked(OpenEpisode(
                open_.gateway, open_.dialogue, open_.endpoint, open_.client.with_options(api_key="guess")
            ), "POST", "/completions")  # fmt: skip
        root = open_.endpoint.base_url.partition("/episodes/")[0]
        headers = {"Authorization": "Bearer guess"}
        async with aiohttp.ClientSession(headers=headers) as client:
            reply = await client.post(f"{root}/v1/chat/completions", json={})
            assert reply.status == 404
            error = (await reply.json())["error"]
    assert error["code"] == "unknown_url"
    assert "OPENAI_BASE_URL" in error["message"]
