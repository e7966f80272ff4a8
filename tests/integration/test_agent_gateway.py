"""OpenAI's own client against the agent gateway: what it gets, what is recorded, what it is refused."""

# ruff: noqa: RUF001 - DeepSeek's own bars

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import openai
import psutil
import pytest

from astraflow.addons.agents.gateway.chat_wire import ChatRequest
from astraflow.errors import ConfigError
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.renderer import ChatRenderer
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import GenerateRequest, Message
from astraflow.wire import array
from astraflow.workflows.single_turn import single_turn
from drivers.call_templates import CALL_TEMPLATES
from drivers.gateway_driver import episode
from drivers.rollout_fakes import ScriptedEngine, exact, make_hosted, make_policy, make_task
from drivers.workflow_driver import END, TEMPLATES, LetterTokenizer, letter_renderer

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def letters(
    engine: ScriptedEngine, *, max_tokens: int = 100, is_trained: bool = True
) -> dict[str, HostedPolicy]:
    info = make_policy("actor", max_tokens=max_tokens, is_trained=is_trained)
    return {"actor": HostedPolicy(info, engine, letter_renderer("agentic"))}


async def test_a_history_that_goes_on_extends_one_trajectory() -> None:
    engine = ScriptedEngine(" So 5. ")
    async with episode(letters(engine)) as open_:
        chat = open_.client.chat.completions
        first = await chat.create(model="actor", messages=[user("2+3")])
        said = first.choices[0].message.content
        assert said == " So 5. "
        assert first.choices[0].finish_reason == "stop"
        # a client that strips what it was told still goes on
        history = [user("2+3"), {"role": "assistant", "content": "So 5."}, user("sure?")]
        second = await chat.create(model="actor", messages=history)
        assert second.usage is not None
        assert second.usage.prompt_tokens == len(engine.requests[1].token_ids)
        (trajectory,) = open_.trajectories(0.5)
    assert engine.requests[1].token_ids[: len(engine.requests[0].token_ids)] == engine.requests[0].token_ids
    assert (len(trajectory.turns), trajectory.reward, trajectory.is_fork) == (2, 0.5, False)


async def test_half_a_surrogate_pair_in_a_request_becomes_a_replacement_character() -> None:
    engine = ScriptedEngine("5")
    async with episode(letters(engine)) as open_:
        body = json.dumps(
            {"model": "actor", "messages": [user("name\udce9")]}
        )  # as Python's clients write it
        headers = {"Authorization": f"Bearer {open_.endpoint.api_key}", "Content-Type": "application/json"}
        url = f"{open_.endpoint.base_url}/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as client, client.post(url, data=body) as reply:
            assert reply.status == 200, await reply.text()
        assert [message.content for message in open_.dialogue.messages] == ["name\ufffd", "5"]


async def test_an_edited_history_forks_and_a_new_one_is_a_conversation_of_its_own() -> None:
    async with episode(letters(ScriptedEngine("So 5."))) as open_:
        chat = open_.client.chat.completions
        await chat.create(model="actor", messages=[user("2+3")])
        told = {"role": "assistant", "content": "So 5, I think."}
        await chat.create(model="actor", messages=[user("2+3"), told, user("sure?")])
        await chat.create(model="actor", messages=[user("7+1")])
        forks = [t.is_fork for t in open_.trajectories()]
    assert forks == [False, True, False]


async def test_a_reply_sent_back_without_its_reasoning_is_a_fork_and_counted() -> None:
    async with episode(letters(ScriptedEngine("<think>hm</think>5"))) as open_:
        chat = open_.client.chat.completions
        await chat.create(model="actor", messages=[user("2+3")])
        history = [user("2+3"), {"role": "assistant", "content": "5"}, user("sure?")]
        await chat.create(model="actor", messages=history)
        await chat.create(model="actor", messages=[user("2+3"), user("sure?")])
        assert [t.is_fork for t in open_.trajectories()] == [False, True, False]
        assert open_.dialogue.recorder.num_forks == 1


async def test_a_client_reads_the_tag_that_the_template_opened_and_its_history_goes_on() -> None:
    opening = TEMPLATES["agentic"].replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}")
    renderer = ChatRenderer(LetterTokenizer(opening), frozenset({END}))
    info = make_policy("actor", max_tokens=100)
    hosted = HostedPolicy(info, ScriptedEngine(f"hm</think>{CALL}"), renderer)
    async with episode({"actor": hosted}) as open_:
        chat = open_.client.chat.completions
        first = (await chat.create(model="actor", messages=[user("2+3")], tools=[ADD])).choices[0].message
        assert first.content == "<think>\nhm</think>"
        (call,) = first.tool_calls or []
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        history: Any = [user("2+3"), first, result]
        await chat.create(model="actor", messages=history, tools=[ADD])
        assert open_.endpoint.last_text == f"<think>\nhm</think>{CALL}"
        assert [(len(t.turns), t.is_fork) for t in open_.trajectories()] == [(2, False)]


@pytest.mark.parametrize(
    ("said", "bare"),
    [
        (CALL.replace("add", "drop"), False),
        ('<tool_call>{"name": "add", "args": {"a": 2}}</tool_call>', False),
        ('{"name": "Alice", "parameters": {"age": 5}}', True),
        ('[{"name": "add", "parameters": {"a": 2}}, {"name": "Bob"}]', True),
        ('{"name": "add", "parameters": "cats"}', True),
    ],
)
async def test_a_client_gets_only_calls_of_its_own_tools(said: str, bare: bool) -> None:
    async with episode(letters(ScriptedEngine(said)), bare=bare) as open_:
        chat = open_.client.chat.completions
        asked: Any = {"model": "actor", "messages": [user("2+3")]}
        for tools in ([], [ADD]):
            message = (await chat.create(**asked, **({"tools": tools} if tools else {}))).choices[0].message
            assert (message.content, message.tool_calls) == (said, None)
            seen = None if not tools else float("Alice" not in said)
            assert open_.endpoint.num_unread_calls == seen


@pytest.mark.parametrize(
    ("family", "said", "content"),
    [
        (
            "qwen3_5",
            "<think>\nhm</think>\nI add.\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
            "<think>\nhm</think>\nI add.",
        ),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I add."
            "<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
            '{"a": 2}',
            "I add.",
        ),
        (
            "deepseek_v3_1",
            'I add.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 2}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>",
            "I add.",
        ),
    ],
)
async def test_calls_are_read_in_the_format_that_the_chat_template_prints(
    family: str, said: str, content: str, tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_text(CALL_TEMPLATES[family].template, encoding="utf-8")
    hosted = replace(letters(ScriptedEngine(said), max_tokens=500)["actor"], model_dir=tmp_path)
    for parser, unread in (("auto", 0), ("tagged", 1)):
        async with episode({"actor": hosted}, parser=parser) as open_:
            chat = open_.client.chat.completions
            message = (
                (await chat.create(model="actor", messages=[user("2+3")], tools=[ADD])).choices[0].message
            )
            assert open_.endpoint.num_unread_calls == unread
            if parser == "auto":
                (call,) = message.tool_calls or []
                assert (message.content, call.function.arguments) == (content, '{"a": 2}')
                history: Any = [
                    user("2+3"),
                    message,
                    {"role": "tool", "tool_call_id": call.id, "content": "5"},
                ]
                await chat.create(model="actor", messages=history, tools=[ADD])
                assert [(len(t.turns), t.is_fork) for t in open_.trajectories()] == [(2, False)]


async def test_a_request_that_is_sent_again_is_a_conversation_of_its_own() -> None:
    async with episode(letters(ScriptedEngine("5"))) as open_:
        for _ in range(2):
            await open_.client.chat.completions.create(model="actor", messages=[user("2+3")])
        assert [t.is_fork for t in open_.trajectories()] == [False, False]


async def test_several_choices_share_a_prompt_and_only_one_trains_each_token() -> None:
    engine = ScriptedEngine("yes")
    async with episode(letters(engine)) as open_:
        chat = open_.client.chat.completions
        first = await chat.create(model="actor", messages=[user("2+3")], n=3)
        assert [choice.index for choice in first.choices] == [0, 1, 2]
        history = [user("2+3"), {"role": "assistant", "content": "yes"}, user("and?")]
        await chat.create(model="actor", messages=history, n=2)
        trajectories = open_.trajectories(1.0)
    assert sum(sum(array(t.mask, "uint8")) for t in trajectories) == 5 * 4
    assert {t.reward for t in trajectories} == {1.0}


async def test_a_call_in_reasoning_is_shown_as_text_and_not_made() -> None:
    thought = '<think>Or <tool_call>{"name": "drop", "arguments": {}}</tool_call></think>'
    replies = iter([f'{thought}I. <tool_call>{{"name": "add", "arguments": {{}}}}', f"{thought}5"])
    async with episode(letters(ScriptedEngine(lambda _: next(replies)), max_tokens=200)) as open_:
        chat = open_.client.chat.completions
        asked: Any = {"model": "actor", "messages": [user("2+3")], "tools": [ADD]}
        said = [(await chat.create(**asked)).choices[0].message for _ in range(2)]
    assert [message.content for message in said] == [f"{thought}I.", f"{thought}5"]
    (call,) = said[0].tool_calls or []
    assert call.type == "function"
    assert call.function.name == "add"
    assert not said[1].tool_calls


async def test_an_earlier_call_without_arguments_is_shown_as_json() -> None:
    engine = ScriptedEngine("5")
    made = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}}
    history: Any = [user("2+3"), {"role": "assistant", "content": None, "tool_calls": [made]}]
    async with episode(letters(engine)) as open_:
        await open_.client.chat.completions.create(model="actor", messages=[*history, user("?")])
    shown = "".join(chr(i) for i in engine.requests[0].token_ids)
    assert '<tool_call>{"name": "add", "arguments": {}}</tool_call>' in shown


async def test_tools_are_shown_called_and_answered() -> None:
    replies = iter([f"I add. {CALL}", "It is 5."])
    engine = ScriptedEngine(lambda _: next(replies))
    async with episode(letters(engine)) as open_:
        chat = open_.client.chat.completions
        first = await chat.create(model="actor", messages=[user("2+3")], tools=[ADD])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content == "I add."
        assert message.tool_calls is not None
        call: Any = message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2})
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        history: Any = [user("2+3"), message, result]
        second = await chat.create(model="actor", messages=history, tools=[ADD])
        assert second.choices[0].message.content == "It is 5."
        (trajectory,) = open_.trajectories()
    assert len(trajectory.turns) == 2
    shown = LetterTokenizer("agentic").decode(engine.requests[0].token_ids)
    assert "[add {" in shown
    assert CALL + "\n<response>5" in LetterTokenizer("agentic").decode(engine.requests[1].token_ids)


async def test_a_call_that_cannot_be_read_is_shown_as_text() -> None:
    async with episode(letters(ScriptedEngine("<tool_call>{</tool_call>"))) as open_:
        answer = await open_.client.chat.completions.create(model="actor", messages=[user("2")], tools=[ADD])
    assert answer.choices[0].message.content == "<tool_call>{</tool_call>"
    assert not answer.choices[0].message.tool_calls


async def test_a_stream_says_the_same_in_chunks() -> None:
    async with episode(letters(ScriptedEngine(f"I add. {CALL}"))) as open_:
        stream = await open_.client.chat.completions.create(
            model="actor",
            messages=[user("2+3")],
            tools=[ADD],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls if call.function] == [(0, "add")]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None, "tool_calls"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


async def test_a_stop_text_ends_a_completion_and_is_not_shown() -> None:
    engine = ScriptedEngine("5 END")
    async with episode(letters(engine)) as open_:
        chat = open_.client.chat.completions
        answer = await chat.create(model="actor", messages=[user("2+3")], stop=" END", max_tokens=9)
        assert answer.choices[0].message.content == "5"
    assert engine.requests[0].sampling.stop == (" END",)
    assert engine.requests[0].sampling.max_tokens == 9


async def test_a_frozen_policy_takes_any_temperature_and_a_trained_one_its_own() -> None:
    engine = ScriptedEngine()
    async with episode(letters(engine)) as open_:
        chat = open_.client.chat.completions
        await chat.create(model="actor", messages=[user("2")], temperature=1.0)
        with pytest.raises(openai.BadRequestError, match="trained with 1;"):
            await chat.create(model="actor", messages=[user("2")], temperature=0.7)
    frozen = ScriptedEngine()
    async with episode(letters(frozen, is_trained=False)) as open_:
        await open_.client.chat.completions.create(model="actor", messages=[user("2")], temperature=0.0)
    assert frozen.requests[0].sampling.temperature == 0.0


async def test_a_frozen_policy_takes_a_callers_top_k() -> None:
    frozen = ScriptedEngine()
    async with episode(letters(frozen, is_trained=False)) as open_:
        for top_k in (5, -1):
            await open_.client.chat.completions.create(
                model="actor", messages=[user("2")], extra_body={"top_k": top_k}
            )
    assert [request.sampling.top_k for request in frozen.requests] == [5, 0]


async def test_a_refused_temperature_names_the_setting_that_ignores_it() -> None:
    async with episode(letters(ScriptedEngine())) as open_:
        with pytest.raises(
            openai.BadRequestError, match=r"policies\.actor\.sampling\.agent_overrides: ignore"
        ):
            await open_.client.chat.completions.create(model="actor", messages=[user("2")], temperature=0)
        assert open_.endpoint.ignored_overrides_frac is None


OVERRIDES: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_p": 0.5},
    {"extra_body": {"top_k": 5}},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -1},
    {"logit_bias": {"5": 1}},
    {"extra_body": {"min_p": 0.1}},
    {"extra_body": {"repetition_penalty": 1.1}},
]


@pytest.mark.parametrize("is_trained", [True, False])
async def test_a_policy_that_ignores_overrides_samples_as_the_recipe_says_and_counts_them(
    is_trained: bool,
) -> None:
    engine = ScriptedEngine()
    info = msgspec.structs.replace(make_policy("actor", is_trained=is_trained), agent_overrides="ignore")
    async with episode({"actor": HostedPolicy(info, engine, letter_renderer("agentic"))}) as open_:
        chat = open_.client.chat.completions
        for override in OVERRIDES:
            await chat.create(model="actor", messages=[user("2")], **override)
        await chat.create(model="actor", messages=[user("2")], temperature=1.0, top_p=1.0)
        counted = open_.endpoint.ignored_overrides_frac
    sampled = {(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in engine.requests}
    if is_trained:
        assert sampled == {(1.0, 1.0, 0)}
        assert counted == 8 / 9
    else:  # it follows what an engine can do, and ignores the rest
        assert sampled == {(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.5, 0), (1.0, 1.0, 5)}
        assert counted == 5 / 9


async def test_an_agents_template_arguments_are_accepted_only_if_they_are_the_policys() -> None:
    info = msgspec.structs.replace(make_policy("actor"), template_args='{"enable_thinking": false, "a": 1}')
    hosted = HostedPolicy(info, ScriptedEngine(), letter_renderer("agentic"))
    async with episode({"actor": hosted}) as open_:

        async def ask(args: object) -> None:
            body = {"chat_template_kwargs": args}
            await open_.client.chat.completions.create(model="actor", messages=[user("2")], extra_body=body)

        await ask({"enable_thinking": False})
        await ask({})
        for other in ({"enable_thinking": True}, {"effort": "low"}):
            with pytest.raises(
                openai.BadRequestError, match=r"set policies\.actor\.template_args in the recipe"
            ):
                await ask(other)


async def test_neutral_values_of_sampling_parameters_are_no_overrides() -> None:
    neutral: dict[str, Any] = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    engine = ScriptedEngine()
    async with episode(letters(engine)) as open_:
        await open_.client.chat.completions.create(
            model="actor", messages=[user("2")], presence_penalty=0, logit_bias={}, extra_body=neutral
        )
    assert len(engine.requests) == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n = 0"),
    ({"extra_body": {"top_k": 5}}, "top_k"),
    ({"messages": []}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "image_url",
    ),
]


@pytest.mark.parametrize(("changed", "named"), REFUSED, ids=[named for _, named in REFUSED])
async def test_what_no_policy_can_do_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    engine = ScriptedEngine()
    async with episode(letters(engine)) as open_:
        asked: dict[str, Any] = {"model": "actor", "messages": [user("2")], **changed}
        with pytest.raises(openai.BadRequestError, match=named):
            await open_.client.chat.completions.create(**asked)
        assert named in open_.endpoint.problem
        assert open_.endpoint.num_completions == 0
        await open_.client.chat.completions.create(model="actor", messages=[user("2")])
        assert (open_.endpoint.problem, open_.endpoint.num_completions) == ("", 1)
    assert len(engine.requests) == 1


async def test_wrong_keys_unknown_models_and_ended_episodes_are_refused() -> None:
    async with episode(letters(ScriptedEngine())) as open_:
        assert [model.id async for model in open_.client.models.list()] == ["actor"]
        assert (await open_.client.models.retrieve("actor")).id == "actor"
        with pytest.raises(openai.NotFoundError, match="policies: actor") as unknown:
            await open_.client.chat.completions.create(model="gpt", messages=[user("2")])
        assert unknown.value.body == {
            "message": "model 'gpt' is not a policy of this run (policies: actor)",
            "type": "invalid_request_error",
            "code": "model_not_found",
            "param": None,
        }
        thief = open_.client.with_options(api_key="guess")
        with pytest.raises(openai.AuthenticationError) as refused:
            await thief.chat.completions.create(model="actor", messages=[user("2")])
        assert (refused.value.code, refused.value.type) == ("invalid_api_key", "authentication_error")
        async with open_.gateway.endpoint(open_.dialogue, tuple) as other:
            gone = open_.client.with_options(base_url=other.base_url, api_key=other.api_key)
        with pytest.raises(openai.NotFoundError, match="it is over"):
            await gone.models.list()
        assert open_.trajectories() == ()


async def test_roles_are_models_and_their_sessions_stay_apart() -> None:
    engine = ScriptedEngine("ok")
    async with episode(letters(engine)) as open_:
        roles = {"solver": "actor", "critic": "actor"}
        async with open_.dialogue.policies.endpoint(parser=tuple, roles=roles) as endpoint:
            client = open_.client.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
            assert [model.id async for model in client.models.list()] == ["solver", "critic"]
            with pytest.raises(openai.NotFoundError, match="roles: solver, critic"):
                await client.chat.completions.create(model="actor", messages=[user("2")])
            for role, session in (("solver", "a"), ("solver", "b"), ("critic", "b")):
                history = [user("2")]
                for _ in range(2):
                    answer = await client.chat.completions.create(
                        model=role, messages=history, extra_headers={"X-Session-ID": session}
                    )
                    said = answer.choices[0].message.content or ""
                    history += [{"role": "assistant", "content": said}, user("3")]
            heard = [(each.role, each.session) for each in endpoint.conversations]
    assert heard == [("solver", "a"), ("solver", "b"), ("critic", "b")]
    found = [(t.role, len(t.turns), t.is_fork) for t in open_.trajectories()]
    assert found == [("solver", 2, False), ("solver", 2, False), ("critic", 2, False)]


async def test_a_role_of_a_policy_that_the_run_does_not_have_is_refused() -> None:
    async with episode(letters(ScriptedEngine())) as open_:
        with pytest.raises(ConfigError, match="policy 'ghost'; the run has actor"):
            open_.dialogue.policies.endpoint(parser=tuple, roles={"solver": "ghost"})


async def test_a_prompt_that_does_not_fit_is_refused_and_ends_its_conversation() -> None:
    async with episode(letters(ScriptedEngine("ok", max_context=40))) as open_:
        chat = open_.client.chat.completions
        with pytest.raises(openai.BadRequestError) as refused:
            await chat.create(model="actor", messages=[user("2" * 50)])
        assert refused.value.code == "context_length_exceeded"
        assert not open_.endpoint.is_full
        await chat.create(model="actor", messages=[user("2")])
        history = [user("2"), {"role": "assistant", "content": "ok"}, user("3" * 50)]
        with pytest.raises(openai.BadRequestError):
            await chat.create(model="actor", messages=history)
        assert open_.endpoint.is_full
        (trajectory,) = open_.trajectories()
    assert trajectory.finish_reason == "length"
    assert open_.dialogue.recorder.num_overflows == 1


async def test_an_engine_that_fails_is_a_server_error() -> None:
    engine = ScriptedEngine()
    engine.error = OSError("gone")
    async with episode({"actor": make_hosted("actor", engine)}) as open_:
        with pytest.raises(openai.InternalServerError, match="OSError: gone"):
            await open_.client.chat.completions.create(model="actor", messages=[user("2")])
        assert open_.endpoint.problem == "OSError: gone"


async def test_completions_of_one_request_have_all_ended_when_one_of_them_fails() -> None:
    engine = FailsFirst()
    request = {"model": "actor", "messages": [user("2")], "n": 2}
    async with episode(letters(engine)) as open_:
        with pytest.raises(OSError, match="gone"):
            await open_.endpoint.chat(msgspec.convert(request, ChatRequest))
        assert engine.has_ended


async def test_a_client_that_leaves_cancels_its_request_and_nothing_is_recorded() -> None:
    engine = Noticing()
    async with episode(letters(engine)) as open_:
        asked = asyncio.create_task(open_.client.chat.completions.create(model="actor", messages=[user("2")]))
        await engine.asked.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        async with asyncio.timeout(5):
            await engine.cancelled.wait()
        assert open_.trajectories() == ()


async def test_the_end_of_the_episode_cancels_what_still_runs() -> None:
    engine = Noticing()
    async with episode(letters(engine)) as open_:
        async with open_.gateway.endpoint(open_.dialogue, tuple) as inner:
            client = open_.client.with_options(base_url=inner.base_url, api_key=inner.api_key)
            asked = asyncio.create_task(client.chat.completions.create(model="actor", messages=[user("2")]))
            await engine.asked.wait()
        assert engine.cancelled.is_set()
        with pytest.raises(openai.APIStatusError, match="the episode is over"):
            await asked


class FailsFirst(ScriptedEngine):
    """Fails the first request. The others don't end before they are cancelled, and then take a moment."""

    has_ended = False

    async def generate(self, request: GenerateRequest) -> Any:
        self.requests.append(request)
        await asyncio.sleep(0)
        if request is self.requests[0]:
            raise OSError("gone")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.has_ended = True


class Noticing(ScriptedEngine):
    """Never answers, and says when it is no longer asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Any:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


def listening() -> set[int]:
    """Ports at which this process listens."""
    connections = psutil.Process().net_connections("inet")
    return {found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN}


async def test_a_gateway_that_was_never_used_opens_no_port() -> None:
    before = listening()
    async with EpisodeRunner(letters(ScriptedEngine("5")), single_turn, exact) as runner:
        assert (await runner.episode(make_task(), seed=1)).score == 1.0
        assert listening() == before
    async with episode(letters(ScriptedEngine())) as open_:
        assert listening() - before == {urlsplit(open_.endpoint.base_url).port}
    assert listening() == before


class Noting:
    """A renderer that notes in which thread it renders."""

    def __init__(self) -> None:
        self.inner = letter_renderer("agentic")
        self.threads: list[threading.Thread] = []

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.inner.stop_ids

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        self.threads.append(threading.current_thread())
        return self.inner.render(messages)

    def extend(
        self, prefix: Sequence[int], history: Sequence[Message], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        return self.inner.extend(prefix, history, messages)

    def parse(self, token_ids: Sequence[int]) -> Message:
        return self.inner.parse(token_ids)


async def test_a_long_prompt_is_rendered_beside_the_event_loop() -> None:
    renderer = Noting()
    hosted = HostedPolicy(make_policy("actor"), ScriptedEngine(max_context=1_000_000), renderer)
    async with episode({"actor": hosted}) as open_:
        for text in ("2", "2" * 100_000):
            await open_.client.chat.completions.create(model="actor", messages=[user(text)])
    assert [thread is threading.main_thread() for thread in renderer.threads] == [True, False]


async def test_a_deeply_nested_request_is_refused() -> None:
    body = '{"model": "actor", "messages": [], "metadata": ' + "[" * 20_000 + "]" * 20_000 + "}"
    async with episode(letters(ScriptedEngine())) as open_:
        headers = {"Authorization": f"Bearer {open_.endpoint.api_key}", "Content-Type": "application/json"}
        async with aiohttp.ClientSession(headers=headers) as client:
            reply = await client.post(f"{open_.endpoint.base_url}/chat/completions", data=body)
            assert (reply.status, (await reply.json())["error"]["code"]) == (400, "invalid_request")
