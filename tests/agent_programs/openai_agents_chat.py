"""The OpenAI Agents SDK, set to chat completions, with tool_choice in its model settings."""

import asyncio
import json
import os
import sys

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

MODEL = os.environ["ASTRAFLOW_MODEL"]
set_default_openai_api("chat_completions")
set_tracing_disabled(True)


class Answer(BaseModel):
    sum: int


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"total:{a + b}"


async def main(form: str, prompt: str) -> None:
    agent = Agent(name="Adder", instructions="Be brief.", model=MODEL)
    if form == "plain":
        print((await Runner.run(agent, prompt)).final_output)
    elif form == "structured":
        print((await Runner.run(agent.clone(output_type=Answer), prompt)).final_output.sum)
    elif form == "streaming":
        streamed = Runner.run_streamed(agent, prompt)
        async for event in streamed.stream_events():
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
                print(event.data.delta, end="")
    else:
        settings = ModelSettings(tool_choice="required")
        print((await Runner.run(agent.clone(tools=[add], model_settings=settings), prompt)).final_output)


asyncio.run(main(sys.argv[1], json.load(sys.stdin)["prompt"]))
