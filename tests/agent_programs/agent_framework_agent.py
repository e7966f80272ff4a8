"""Microsoft's Agent Framework: an Agent over its OpenAIChatClient, which speaks the Responses API."""

import asyncio
import json
import os
import sys
from typing import Annotated

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatClient
from pydantic import BaseModel

MODEL = os.environ["ASTRAFLOW_MODEL"]


class Answer(BaseModel):
    sum: int


@tool(approval_mode="never_require")
def add(a: Annotated[int, "first"], b: Annotated[int, "second"]) -> str:
    """Adds two numbers."""
    return f"total:{a + b}"


async def main(form: str, prompt: str) -> None:
    client = OpenAIChatClient(model=MODEL)
    agent = Agent(client=client, instructions="Be brief.", tools=[add] if form == "tools" else None)
    if form == "structured":
        print((await agent.run(prompt, options={"response_format": Answer})).value.sum)
    elif form == "streaming":
        stream = agent.run(prompt, stream=True)
        num_updates = len([update async for update in stream])
        assert num_updates > 1
        print((await stream.get_final_response()).text)
    else:
        print((await agent.run(prompt)).text)


asyncio.run(main(sys.argv[1], json.load(sys.stdin)["prompt"]))
