"""An agent from a library, trained without changes: `pip install "pydantic-ai-slim[openai]"`.

Its model: astraflow model init recipes/models/agent.yaml --out models/agent
Try it:    astraflow try examples/sum_agent.yaml --task 1
"""

from openai import DefaultAsyncHttpxClient
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from astraflow.addons.agents.agent import AgentTask
from astraflow.workflows.conversation import Endpoint

__all__ = ["solve"]

adder = Agent(instructions="You add numbers, column by column.")  # nothing in it is specific to AstraFlow
connections = DefaultAsyncHttpxClient()  # shared by all episodes


async def solve(task: AgentTask, endpoint: Endpoint) -> str:
    """Runs the agent with the episode's own endpoint. The recipe's reward scores the returned text."""
    url = endpoint.base_url
    key = endpoint.api_key
    provider = OpenAIProvider(base_url=url, api_key=key, http_client=connections)
    result = await adder.run(task.prompt, model=OpenAIChatModel("actor", provider=provider))
    return result.output
