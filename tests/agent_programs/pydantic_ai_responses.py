"""Pydantic AI over the Responses API; structured output by the schema that it sends (`NativeOutput`)."""

import asyncio
import json
import os
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIResponsesModel

MODEL = os.environ["ASTRAFLOW_MODEL"]


class Answer(BaseModel):
    sum: int


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"total:{a + b}"


async def main(form: str, prompt: str) -> None:
    model = OpenAIResponsesModel(MODEL)
    if form == "plain":
        print((await Agent(model).run(prompt)).output)
    elif form == "structured":
        print((await Agent(model, output_type=NativeOutput(Answer)).run(prompt)).output.sum)
    elif form == "streaming":
        async with Agent(model).run_stream(prompt) as streamed:
            async for piece in streamed.stream_text(delta=True):
                print(piece, end="")
    else:
        print((await Agent(model, tools=[add]).run(prompt)).output)


asyncio.run(main(sys.argv[1], json.load(sys.stdin)["prompt"]))
