"""The OpenAI Agents SDK with its defaults: it speaks the Responses API."""

import asyncio
import json
import os
import sys

from agents import Agent, Runner, function_tool
from agents.items import ItemHelpers, MessageOutputItem
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

MODEL = os.environ["ASTRAFLOW_MODEL"]


class Answer(BaseModel):
    sum: int


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"total:{a + b}"


async def main(form: str, prompt: str) -> None:
    if form == "plain":
        agent = Agent(name="Adder", instructions="Be brief.", model=MODEL)
        print((await Runner.run(agent, prompt)).final_output)
    elif form == "structured":
        agent = Agent(name="Adder", instructions="Be brief.", model=MODEL, output_type=Answer)
        print((await Runner.run(agent, prompt)).final_output.sum)
    elif form == "streaming":
        agent = Agent(name="Adder", instructions="Be brief.", model=MODEL)
        streamed = Runner.run_streamed(agent, prompt)
        async for event in streamed.stream_events():
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
                print(event.data.delta, end="")
    else:
        agent = Agent(name="Adder", instructions="Use the tool.", model=MODEL, tools=[add])
        result = await Runner.run(agent, prompt)
        messages = [item for item in result.new_items if isinstance(item, MessageOutputItem)]
        print(ItemHelpers.text_message_outputs(messages))


asyncio.run(main(sys.argv[1], json.load(sys.stdin)["prompt"]))
