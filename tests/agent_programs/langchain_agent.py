"""LangChain: `create_agent` (a LangGraph graph inside) over ChatOpenAI."""

import json
import os
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

MODEL = os.environ["ASTRAFLOW_MODEL"]


class Answer(BaseModel):
    sum: int


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"total:{a + b}"


def main(form: str, prompt: str) -> None:
    model = ChatOpenAI(model=MODEL)
    asked = {"messages": [{"role": "user", "content": prompt}]}
    if form == "plain":
        print(create_agent(model, tools=[]).invoke(asked)["messages"][-1].content)
    elif form == "structured":
        print(create_agent(model, tools=[], response_format=Answer).invoke(asked)["structured_response"].sum)
    elif form == "streaming":
        for token, _ in create_agent(model, tools=[]).stream(asked, stream_mode="messages"):
            print(token.content, end="")
    else:
        print(create_agent(model, tools=[add]).invoke(asked)["messages"][-1].content)


main(sys.argv[1], json.load(sys.stdin)["prompt"])
