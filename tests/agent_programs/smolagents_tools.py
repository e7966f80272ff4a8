"""smolagents: the ToolCallingAgent, which asks for a tool call in each step (tool_choice=required)."""

import json
import os
import sys
from contextlib import redirect_stdout

from smolagents import ChatMessageStreamDelta, LogLevel, OpenAIModel, ToolCallingAgent, tool

MODEL = os.environ["ASTRAFLOW_MODEL"]


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return f"total:{a + b}"


def main(form: str, prompt: str) -> None:
    model = OpenAIModel(MODEL, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = ToolCallingAgent(
        tools=[add] if form == "tools" else [],
        model=model,
        verbosity_level=LogLevel.OFF,
        stream_outputs=form == "streaming",
    )
    if form == "streaming":
        with redirect_stdout(sys.stderr):  # the library shows what is streamed
            events = list(agent.run(prompt, stream=True))
        assert any(isinstance(event, ChatMessageStreamDelta) for event in events)
        print(events[-1].output)
    else:
        print(agent.run(prompt))


main(sys.argv[1], json.load(sys.stdin)["prompt"])
