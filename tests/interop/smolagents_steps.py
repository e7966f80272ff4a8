"""An agent of smolagents, as its users write one: two steps at most, and then its last words."""

import json
import os
import sys

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

SYSTEM = "You answer with final_answer. Add numbers with add."


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a + b)


model = OpenAIModel(
    os.environ["ASTRAFLOW_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=2, verbosity_level=LogLevel.OFF)
agent.prompt_templates["system_prompt"] = SYSTEM
print(agent.run(json.load(sys.stdin)["prompt"]))
