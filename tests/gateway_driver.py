"""An episode with its gateway, as agent programs meet it: policies, endpoint, OpenAI's own client."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from astraflow.rollout.dialogue import Dialogue, HostedPolicy
from astraflow.rollout.gateway import EpisodeEndpoint, Gateway
from astraflow.types import Trajectory
from astraflow.workflows.agent import AgentTask
from astraflow.workflows.calls import tagged_calls
from astraflow.workflows.conversation import Endpoint

__all__ = ["OpenEpisode", "episode", "two_turns"]


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
async def episode(policies: Mapping[str, HostedPolicy], *, seed: int = 7) -> AsyncIterator[OpenEpisode]:
    """An open episode; the client does not retry."""
    gateway = Gateway()
    dialogue = Dialogue(policies, seed=seed, opens=gateway.endpoint)
    try:
        async with gateway.endpoint(dialogue, tagged_calls) as endpoint:
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
