"""LlamaIndex: OpenAILike, and its FunctionAgent for tools. Its own default temperature is 0.1."""

import asyncio
import json
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

MODEL = os.environ["ASTRAFLOW_MODEL"]


class Answer(BaseModel):
    """The sum."""

    sum: int


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"total:{a + b}"


async def main(form: str, prompt: str) -> None:
    llm = OpenAILike(
        model=MODEL,
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=1.0,
    )
    if form == "plain":
        print((await llm.acomplete(prompt)).text)
    elif form == "structured":
        print((await llm.as_structured_llm(Answer).acomplete(prompt)).raw.sum)
    elif form == "streaming":
        async for piece in await llm.astream_complete(prompt):
            print(piece.delta, end="")
    else:
        print(await FunctionAgent(tools=[add], llm=llm, system_prompt="Use the tool.").run(prompt))


asyncio.run(main(sys.argv[1], json.load(sys.stdin)["prompt"]))
