"""Agno: an Agent over OpenAIChat."""

import json
import os
import sys

from agno.agent import Agent
from agno.models.openai import OpenAIChat
from pydantic import BaseModel

MODEL = os.environ["ASTRAFLOW_MODEL"]


class Answer(BaseModel):
    sum: int


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"total:{a + b}"


def main(form: str, prompt: str) -> None:
    model = OpenAIChat(id=MODEL, base_url=os.environ["OPENAI_BASE_URL"])
    if form == "plain":
        print(Agent(model=model).run(prompt).content)
    elif form == "structured":
        print(Agent(model=model, output_schema=Answer).run(prompt).content.sum)
    elif form == "streaming":
        for event in Agent(model=model).run(prompt, stream=True):
            print(event.content or "", end="")
    else:
        print(Agent(model=model, tools=[add]).run(prompt).content)


main(sys.argv[1], json.load(sys.stdin)["prompt"])
