"""LangGraph: a graph of one's own with a model node and a tool node."""

import json
import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel

MODEL = os.environ["ASTRAFLOW_MODEL"]


class Answer(BaseModel):
    sum: int


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"total:{a + b}"


def main(form: str, prompt: str) -> None:
    model = ChatOpenAI(model=MODEL)
    bound = model.bind_tools([add]) if form == "tools" else model

    def chat(state: MessagesState) -> dict:
        return {"messages": [bound.invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("chat", chat)
    builder.add_node("tools", ToolNode([add]))
    builder.add_edge(START, "chat")
    builder.add_conditional_edges("chat", tools_condition)
    builder.add_edge("tools", "chat")
    graph = builder.compile()
    asked = {"messages": [("user", prompt)]}
    if form == "structured":
        print(model.with_structured_output(Answer, method="function_calling").invoke(prompt).sum)
    elif form == "streaming":
        for token, _ in graph.stream(asked, stream_mode="messages"):
            print(token.content, end="")
    else:
        print(graph.invoke(asked)["messages"][-1].content)


main(sys.argv[1], json.load(sys.stdin)["prompt"])
