"""Absurd and nearly right values in every field of what an agent program sends to its gateway end nothing.

The program is a stranger's: whatever it sends, nothing answers 500 or holds up the event loop, and what is
refused is not recorded. Afterwards the episode goes on.
"""

import io
import time

import aiohttp
import msgspec
import pytest

from astraflow import wire
from astraflow.addons.agents.gateway.anthropic_messages import MessagesRequest
from astraflow.addons.agents.gateway.chat_wire import ChatRequest
from astraflow.addons.agents.gateway.openai_responses import ResponsesRequest
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.workflows.conversation import AgentReport
from drivers.absurd_driver import NAMES, bodies
from drivers.gateway_driver import OpenEpisode, episode
from drivers.rollout_fakes import ScriptedEngine, make_policy
from drivers.workflow_driver import letter_renderer

pytestmark = pytest.mark.timeout(180)
MAX_BLOCK_S = 1.0
"""Longest block of the event loop, in CPU time, because a busy machine is not the gateway's fault."""
CHAT = {"model": "actor", "messages": [{"role": "user", "content": "2+3"}]}
KNOWN = {
    "model": "actor", "role": "user", "content": "2+3", "n": 1, "max_tokens": 4, "type": "function",
    "tool_choice": None, "tool_calls": None, "response_format": None, "stream": None, "stop": None,
    "top_logprobs": 0, "temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "max_completion_tokens": 4, "logit_bias": None, "tools": None, "top_k": None, "min_p": None,
    "repetition_penalty": None, "chat_template_kwargs": None,
}  # fmt: skip
RESPONSES = {
    "type": "message", "input": "2+3", "text": None, "background": None, "previous_response_id": None,
    "include": None, "max_output_tokens": 4,
}  # fmt: skip

TOO_LONG = (b"context_length_exceeded", b"prompt is too long")
"""How the dialects say that a prompt leaves no room."""
MESSAGES = {
    "type": "custom", "tool_choice": None, "context_management": None, "output_config": None,
    "output_format": None, "stop_sequences": None, "system": None,
}  # fmt: skip


class Fight:
    """Sends what it is given to an open episode, and looks at what is recorded."""

    def __init__(self, open_: OpenEpisode) -> None:
        self.open = open_
        self.url = open_.endpoint.base_url.removesuffix("/v1")
        self.session = aiohttp.ClientSession()
        self.num_accepted = 0

    async def send(self, method: str, path: str, about: str, body: bytes = b"") -> int:
        headers = {"authorization": f"Bearer {self.open.endpoint.api_key}", "content-type": wire.JSON}
        recorder, started_s = self.open.dialogue.recorder, time.thread_time()
        before = (recorder.num_completions, self.open.endpoint.report)
        async with self.session.request(
            method, self.url + path, headers=headers, data=io.BytesIO(body)
        ) as reply:
            answer = await reply.read()
        assert reply.status < 500, f"{about}: {answer[:300]!r}"
        assert time.thread_time() - started_s < MAX_BLOCK_S, about
        if reply.status >= 400:
            if not any(words in answer for words in TOO_LONG):  # that its conversation ended is recorded
                assert (recorder.num_completions, self.open.endpoint.report) == before, about
            assert len(answer) < 10_000, about
        self.num_accepted += reply.status < 400
        return reply.status


def policies() -> dict[str, HostedPolicy]:
    """One that is trained, and one whose sampling a caller may choose."""
    return {
        name: HostedPolicy(
            make_policy(name, max_tokens=20, is_trained=name == "actor"),
            ScriptedEngine("5"),
            letter_renderer("agentic"),
        )
        for name in ("actor", "judge")
    }


async def test_no_field_of_a_chat_ends_an_episode() -> None:
    async with episode(policies()) as open_:
        fight = Fight(open_)
        for about, media_type, body in bodies(ChatRequest, KNOWN):
            if media_type == wire.JSON:
                await fight.send("POST", "/v1/chat/completions", about, body)
        assert fight.num_accepted > 100
        sound = msgspec.json.encode(CHAT)
        assert await fight.send("POST", "/v1/chat/completions", "sound", sound) == 200
        await fight.session.close()


async def test_no_field_of_a_responses_request_ends_an_episode() -> None:
    known = {**KNOWN, **RESPONSES}
    async with episode(policies()) as open_:
        fight = Fight(open_)
        for about, media_type, body in bodies(ResponsesRequest, known):
            if media_type == wire.JSON:
                await fight.send("POST", "/v1/responses", about, body)
        assert fight.num_accepted > 50
        sound = msgspec.json.encode({"model": "actor", "input": "2+3"})
        assert await fight.send("POST", "/v1/responses", "sound", sound) == 200
        await fight.session.close()


async def test_no_field_of_a_messages_request_ends_an_episode() -> None:
    known = {**KNOWN, **MESSAGES}
    async with episode(policies()) as open_:
        fight = Fight(open_)
        for number, (about, media_type, body) in enumerate(bodies(MessagesRequest, known)):
            if media_type == wire.JSON:
                await fight.send("POST", "/v1/messages", about, body)
            if media_type == wire.JSON and number % 20 == 0:  # it is read as the other is
                await fight.send("POST", "/v1/messages/count_tokens", about, body)
        assert fight.num_accepted > 50
        sound = msgspec.json.encode({**CHAT, "max_tokens": 4})
        assert await fight.send("POST", "/v1/messages", "sound", sound) == 200
        await fight.session.close()


@pytest.mark.parametrize("part", ["tools", "tool_choice", "content", "system", "output_config"])
async def test_no_optional_part_of_a_message_ends_an_episode(part: str) -> None:
    known = {key: value for key, value in {**KNOWN, **MESSAGES}.items() if key != part}
    async with episode(policies()) as open_:
        fight = Fight(open_)
        for about, media_type, body in bodies(MessagesRequest, known):
            if media_type == wire.JSON and f".{part}" in about:
                await fight.send("POST", "/v1/messages", about, body)
        sound = msgspec.json.encode({**CHAT, "max_tokens": 4})
        assert await fight.send("POST", "/v1/messages", "sound", sound) == 200
        await fight.session.close()


async def test_no_sampling_that_a_caller_may_choose_ends_an_episode() -> None:
    async with episode(policies()) as open_:
        fight = Fight(open_)
        for about, media_type, body in bodies(ChatRequest, {**KNOWN, "model": "judge"}):
            if media_type == wire.JSON and any(
                f".{name}" in about for name in ("temperature", "top_p", "max_")
            ):
                await fight.send("POST", "/v1/chat/completions", about, body)
        assert fight.num_accepted > 10
        await fight.session.close()


@pytest.mark.parametrize("part", ["tools", "tool_calls", "content", "response_format", "tool_choice"])
async def test_no_optional_part_of_a_chat_ends_an_episode(part: str) -> None:
    known = {key: value for key, value in KNOWN.items() if key != part}
    async with episode(policies()) as open_:
        fight = Fight(open_)
        for about, media_type, body in bodies(ChatRequest, known):
            if media_type == wire.JSON and f".{part}" in about:
                await fight.send("POST", "/v1/chat/completions", about, body)
        sound = msgspec.json.encode(CHAT)
        assert await fight.send("POST", "/v1/chat/completions", "sound", sound) == 200
        await fight.session.close()


async def test_no_report_ends_an_episode() -> None:
    async with episode(policies()) as open_:
        fight = Fight(open_)
        for about, media_type, body in bodies(AgentReport, {}):
            if media_type == wire.JSON:
                await fight.send("POST", "/result", about, body)
        assert await fight.send("POST", "/result", "too large", b'{"reward": 1e200}') == 400
        assert await fight.send("POST", "/result", "sound", b'{"reward": 1.0}') == 204
        assert open_.endpoint.report == AgentReport(reward=1.0)
        await fight.session.close()


async def test_no_name_in_a_path_ends_a_gateway() -> None:
    async with episode(policies()) as open_:
        fight = Fight(open_)
        for name in NAMES:
            path = "".join(c if c.isalnum() and c.isascii() else f"%{c.encode()[0]:02x}" for c in name)
            await fight.send("GET", f"/v1/models/{path}", name[:20])
        assert await fight.send("GET", "/v1/models/actor", "sound") == 200
        await fight.session.close()
