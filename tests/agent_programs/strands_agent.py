"""Strands Agents: an Agent over its OpenAI model, which always streams."""

import asyncio
import json
import os
import sys

from pydantic import BaseModel
from strands import Agent, tool
from strands.models.openai import OpenAIModel

MODEL = os.environ["ASTRAFLOW_MODEL"]


class Answer(BaseModel):
    """The sum."""

    sum: int


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return f"total:{a + b}"


async def stream(agent: Agent, prompt: str) -> None:
    async for event in agent.stream_async(prompt):
        print(event.get("data", ""), end="")


def main(form: str, prompt: str) -> None:
    model = OpenAIModel(model_id=MODEL)
    agent = Agent(model=model, tools=[add] if form == "tools" else [], callback_handler=None)
    if form == "structured":
        print(agent(prompt, structured_output_model=Answer).structured_output.sum)
    elif form == "streaming":
        asyncio.run(stream(agent, prompt))
    else:
        print(agent(prompt))


main(sys.argv[1], json.load(sys.stdin)["prompt"])
