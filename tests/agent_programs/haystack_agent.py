"""Haystack: OpenAIChatGenerator, and its Agent for tools."""

import json
import os
import sys

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from pydantic import BaseModel

MODEL = os.environ["ASTRAFLOW_MODEL"]
BASE = os.environ["OPENAI_BASE_URL"]


class Answer(BaseModel):
    sum: int


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"total:{a + b}"


def main(form: str, prompt: str) -> None:
    messages = [ChatMessage.from_user(prompt)]
    if form == "plain":
        print(OpenAIChatGenerator(model=MODEL, api_base_url=BASE).run(messages)["replies"][0].text)
    elif form == "structured":
        settings = {"response_format": Answer}
        chat = OpenAIChatGenerator(model=MODEL, api_base_url=BASE, generation_kwargs=settings)
        print(json.loads(chat.run(messages)["replies"][0].text)["sum"])
    elif form == "streaming":
        chat = OpenAIChatGenerator(
            model=MODEL,
            api_base_url=BASE,
            streaming_callback=lambda chunk: print(chunk.content, end=""),
        )
        chat.run(messages)
    else:
        agent = Agent(chat_generator=OpenAIChatGenerator(model=MODEL, api_base_url=BASE), tools=[add])
        print(agent.run(messages=messages)["last_message"].text)


main(sys.argv[1], json.load(sys.stdin)["prompt"])
