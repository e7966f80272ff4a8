"""smolagents: the CodeAgent, which writes Python."""

import json
import os
import sys
from contextlib import redirect_stdout

from smolagents import ChatMessageStreamDelta, CodeAgent, LogLevel, OpenAIModel, tool

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
    agent = CodeAgent(
        tools=[add] if form == "tools" else [],
        model=model,
        verbosity_level=LogLevel.OFF,
        stream_outputs=form == "streaming",
        use_structured_outputs_internally=form == "structured",
    )
    if form == "streaming":
        with redirect_stdout(sys.stderr):  # the library shows what is streamed
            events = list(agent.run(prompt, stream=True))
        assert any(isinstance(event, ChatMessageStreamDelta) for event in events)
        print(events[-1].output)
    else:
        print(agent.run(prompt))


main(sys.argv[1], json.load(sys.stdin)["prompt"])
