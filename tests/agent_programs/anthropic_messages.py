"""Anthropic's client, Messages API: plain, structured by `parse`, streamed, with a loop over tool calls."""

import json
import os
import sys

from anthropic import Anthropic
from pydantic import BaseModel

MODEL = os.environ["ASTRAFLOW_MODEL"]


class Answer(BaseModel):
    sum: int


def add(a: int, b: int) -> str:
    return f"total:{a + b}"


TOOLS = [
    {
        "name": "add",
        "description": "Adds two numbers.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
]


def main(form: str, prompt: str) -> None:
    client = Anthropic()
    messages = [{"role": "user", "content": prompt}]
    asked = {"model": MODEL, "max_tokens": 1000, "messages": messages}
    if form == "plain":
        assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens > 0
        print(client.messages.create(system="Be brief.", **asked).content[0].text)
    elif form == "structured":
        print(client.messages.parse(output_format=Answer, **asked).parsed_output.sum)
    elif form == "streaming":
        with client.messages.stream(**asked) as stream:
            for text in stream.text_stream:
                print(text, end="")
            assert stream.get_final_message().usage.output_tokens > 0
    else:
        choice = {"type": "any"}
        while True:
            done = client.messages.create(tools=TOOLS, tool_choice=choice, **asked)
            calls = [block for block in done.content if block.type == "tool_use"]
            if not calls:
                print(done.content[0].text)
                return
            messages.append({"role": "assistant", "content": done.content})
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": add(**call.input)}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
            choice = {"type": "auto"}


main(sys.argv[1], json.load(sys.stdin)["prompt"])
