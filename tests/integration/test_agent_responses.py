"""The Responses API of the agent gateway, as OpenAI's own client meets it."""

import json
from typing import Any

import openai
import pytest

from drivers.gateway_driver import CALL, Scripted, episode, policies, posted
from drivers.workflow_driver import replayed

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}


async def test_a_text_is_answered_under_instructions_with_its_usage() -> None:
    engine = Scripted("It is 5.")
    async with episode(policies(engine)) as open_:
        done = await open_.client.responses.create(model="actor", input="2+3", instructions="Be brief.")
        (trajectory,) = open_.trajectories(1.0)
    assert (done.output_text, done.status, done.error) == ("It is 5.", "completed", None)
    assert "Be brief." in engine.shown()
    assert done.usage is not None
    assert done.usage.input_tokens == len(engine.requests[0].token_ids)
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    assert (trajectory.reward, replayed(trajectory)) == (1.0, engine.sampled)


async def test_calls_and_results_sent_back_as_items_go_on_in_one_trajectory() -> None:
    engine = Scripted(f"I add. {CALL}{CALL}", "It is 5.")
    async with episode(policies(engine)) as open_:
        ask: Any = open_.client.responses.create
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "2+3"}]}]
        first = await ask(model="actor", input=items, tools=[ADD], tool_choice="required")
        assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
        calls = first.output[1:]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 2})] * 2
        items += [item.model_dump() for item in first.output]
        items += [{"type": "function_call_output", "call_id": c.call_id, "output": "5"} for c in calls]
        second = await ask(model="actor", input=items, tools=[ADD])
        (trajectory,) = open_.trajectories()
        assert open_.endpoint.unmet_frac == 0.0
    assert second.output_text == "It is 5."
    assert engine.shown().count("<response>5</response>") == 2
    assert (len(trajectory.turns), replayed(trajectory)) == (2, engine.sampled)


async def test_tools_of_a_group_are_shown_called_and_sent_back_under_both_names() -> None:
    engine = Scripted(CALL.replace("add", "sums.add"), "It is 5.")
    group: Any = {"type": "namespace", "name": "sums", "description": "Sums.", "tools": [ADD]}
    async with episode(policies(engine)) as open_:
        ask: Any = open_.client.responses.create
        items: list[Any] = [{"role": "user", "content": "2+3"}]
        first = await ask(
            model="actor", input=items, tools=[group], extra_body={"client_metadata": {"a": "b"}}
        )
        (call,) = first.output
        assert (call.namespace, call.name, json.loads(call.arguments)) == ("sums", "add", {"a": 2})
        items += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
        await ask(model="actor", input=items, tools=[group])
        (trajectory,) = open_.trajectories()
    assert "[sums.add " in engine.shown()
    assert (len(trajectory.turns), replayed(trajectory)) == (2, engine.sampled)


async def test_a_response_is_continued_by_its_id_with_instructions_of_its_own() -> None:
    engine = Scripted("5.", "Yes.")
    async with episode(policies(engine)) as open_:
        ask: Any = open_.client.responses.create
        first = await ask(model="actor", input="2+3", instructions="Be brief.")
        second = await ask(
            model="actor", input="Sure?", instructions="Be brief.", previous_response_id=first.id
        )
        assert (second.output_text, second.previous_response_id) == ("Yes.", first.id)
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(model="actor", input="Sure?", previous_response_id="resp_other")
        assert refused.value.code == "previous_response_not_found"
        (trajectory,) = open_.trajectories()
    assert (len(trajectory.turns), replayed(trajectory)) == (2, engine.sampled)


async def test_a_schema_is_told_and_what_fits_it_is_parsed_by_the_client() -> None:
    engine = Scripted('<think>2 and 3</think>{"sum": 5}')
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    async with episode(policies(engine)) as open_:
        done = await open_.client.responses.create(model="actor", input="2+3", text=form)
    assert json.loads(done.output_text) == {"sum": 5}
    assert f"JSON schema, and with nothing else: {json.dumps(schema)}" in (engine.shown())


async def test_a_stream_tells_each_item_in_order_and_ends_with_the_whole_response() -> None:
    body = {"model": "actor", "input": "2+3", "tools": [ADD], "stream": True}
    async with episode(policies(Scripted(f"I add. {CALL}"))) as open_:
        lines = await posted(open_, "/responses", body)
    events: list[Any] = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert events[4]["delta"] == "I add."
    assert json.loads(events[9]["delta"]) == {"a": 2}
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message", "function_call"]
    assert (events[0]["response"]["output"], events[0]["response"]["status"]) == ([], "in_progress")


async def test_a_completion_that_is_cut_off_is_incomplete_and_shows_its_logprobs() -> None:
    engine = Scripted("It is 5.")
    async with episode(policies(engine)) as open_:
        done = await open_.client.responses.create(
            model="actor", input="2+3", max_output_tokens=3, include=["message.output_text.logprobs"]
        )
        (trajectory,) = open_.trajectories()
    assert (done.status, done.output_text) == ("incomplete", "It ")
    assert done.incomplete_details is not None
    assert done.incomplete_details.reason == "max_output_tokens"
    item: Any = done.output[0]
    assert [token.token for token in item.content[0].logprobs] == ["I", "t", " "]
    assert replayed(trajectory) == engine.sampled


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "custom", "name": "y"}]}]}, "x.y"),
        (
            {"tools": [{"type": "namespace", "name": "x" * 150, "tools": [{**ADD, "name": "y" * 150}]}]},
            "too long",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"type": "reasoning", "id": "x", "summary": []}]}, "reasoning"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input_image",
        ),
        ({"input": []}, "messages is empty"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "'sub'"),
        ({"temperature": 0.1}, "trained with 1;"),
    ],
)
async def test_what_no_policy_can_do_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    engine = Scripted()
    async with episode(policies(engine)) as open_:
        whole: dict[str, Any] = {"model": "actor", "input": "2", **asked}
        with pytest.raises(openai.BadRequestError, match=named):
            await open_.client.responses.create(**whole)
        assert named in open_.endpoint.problem
    assert engine.requests == []
