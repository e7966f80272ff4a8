"""AutoGen: an AssistantAgent over its client for OpenAI-compatible servers."""

import asyncio
import json
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel

MODEL = os.environ["ASTRAFLOW_MODEL"]
ABILITIES = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
}


class Answer(BaseModel):
    sum: int


async def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"total:{a + b}"


async def main(form: str, prompt: str) -> None:
    client = OpenAIChatCompletionClient(
        model=MODEL, base_url=os.environ["OPENAI_BASE_URL"], model_info=ABILITIES
    )
    if form == "plain":
        print((await AssistantAgent("adder", client).run(task=prompt)).messages[-1].content)
    elif form == "structured":
        agent = AssistantAgent("adder", client, output_content_type=Answer)
        print((await agent.run(task=prompt)).messages[-1].content.sum)
    elif form == "streaming":
        agent = AssistantAgent("adder", client, model_client_stream=True)
        async for event in agent.run_stream(task=prompt):
            if isinstance(event, ModelClientStreamingChunkEvent):
                print(event.content, end="")
    else:
        agent = AssistantAgent("adder", client, tools=[add], reflect_on_tool_use=True)
        print((await agent.run(task=prompt)).messages[-1].content)


asyncio.run(main(sys.argv[1], json.load(sys.stdin)["prompt"]))
