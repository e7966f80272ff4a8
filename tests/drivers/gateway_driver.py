"""An episode with its gateway, as agent programs meet it: policies, endpoint, OpenAI's own client."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from astraflow.addons.agents.agent import AgentTask
from astraflow.addons.agents.gateway.endpoint import EpisodeEndpoint
from astraflow.addons.agents.gateway.gateway import Gateway
from astraflow.rollout.dialogue import Dialogue, HostedPolicy
from astraflow.types import GenerateRequest, Trajectory
from astraflow.workflows.calls import ParserOrName, bare_json_calls, tagged_calls
from astraflow.workflows.conversation import Endpoint
from drivers.rollout_fakes import ScriptedEngine, make_policy
from drivers.workflow_driver import DiceEngine, LetterTokenizer, letter_renderer

pytest.importorskip("openai", reason="needs openai (extra `test`)")

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

__all__ = ["CALL", "OpenEpisode", "Scripted", "episode", "policies", "posted", "two_turns"]

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
"""A call as Qwen's chat template has it."""


@dataclass
class OpenEpisode:
    """What a test talks to, and what was recorded of it."""

    gateway: Gateway
    dialogue: Dialogue
    endpoint: EpisodeEndpoint
    client: AsyncOpenAI

    def trajectories(self, reward: float = 0.0) -> tuple[Trajectory, ...]:
        return self.dialogue.recorder.trajectories({}, {}, dict.fromkeys(self.dialogue.hosted, reward))


@asynccontextmanager
async def episode(
    policies: Mapping[str, HostedPolicy],
    *,
    seed: int = 7,
    bare: bool = False,
    parser: ParserOrName = tagged_calls,
) -> AsyncIterator[OpenEpisode]:
    """An open episode; the client does not retry. `bare`: the model writes calls as bare JSON."""
    gateway = Gateway()
    dialogue = Dialogue(policies, seed=seed, open_endpoint=gateway.endpoint)
    try:
        async with gateway.endpoint(dialogue, bare_json_calls if bare else parser) as endpoint:
            key = endpoint.api_key
            async with AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0) as client:
                yield OpenEpisode(gateway, dialogue, endpoint, client)
    finally:
        await gateway.close()


async def two_turns(task: AgentTask, endpoint: Endpoint) -> str:
    """An agent that asks every policy twice, in one conversation each, and answers with the last text."""
    text = ""
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
        for model in [model.id async for model in client.models.list()]:
            history: list[ChatCompletionMessageParam] = [{"role": "user", "content": task.prompt}]
            for _ in range(2):
                answer = await client.chat.completions.create(model=model, messages=history)
                text = answer.choices[0].message.content or ""
                history += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]
    return text


class Scripted(DiceEngine):
    """Says its replies one after the other; each token's logprob can be recomputed."""

    def __init__(self, *replies: str) -> None:
        super().__init__("actor")
        self._replies: Iterator[str] = iter(replies)

    def says(self, request: GenerateRequest) -> str:
        return next(self._replies)

    def shown(self, idx: int = -1) -> str:
        """What a request showed to the policy."""
        return LetterTokenizer("agentic").decode(self.requests[idx].token_ids)


def policies(engine: ScriptedEngine) -> dict[str, HostedPolicy]:
    return {"actor": HostedPolicy(make_policy("actor", max_tokens=500), engine, letter_renderer("agentic"))}


async def posted(open_: OpenEpisode, path: str, body: Any) -> list[str]:
    """Lines of the answer, without empty ones."""
    headers = {"Authorization": f"Bearer {open_.endpoint.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        reply = await client.post(open_.endpoint.base_url + path, json=body)
        assert reply.status == 200, await reply.text()
        return [line for line in (await reply.text()).split("\n") if line]
