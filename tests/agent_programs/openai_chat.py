"""OpenAI's client, chat completions: plain, structured by `parse`, streamed, with a loop over tool calls."""

import json
import os
import sys

from openai import OpenAI
from pydantic import BaseModel

MODEL = os.environ["ASTRAFLOW_MODEL"]


class Answer(BaseModel):
    sum: int


def add(a: int, b: int) -> str:
    return f"total:{a + b}"


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def main(form: str, prompt: str) -> None:
    client = OpenAI()
    messages = [{"role": "user", "content": prompt}]
    if form == "plain":
        print(client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content)
    elif form == "structured":
        done = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Answer)
        print(done.choices[0].message.parsed.sum)
    elif form == "streaming":
        with client.chat.completions.stream(
            model=MODEL, messages=messages, stream_options={"include_usage": True}
        ) as stream:
            for event in stream:
                if event.type == "content.delta":
                    print(event.delta, end="")
            assert stream.get_final_completion().usage.completion_tokens > 0
    else:
        choice = "required"
        while True:
            done = client.chat.completions.create(
                model=MODEL, messages=messages, tools=TOOLS, tool_choice=choice
            )
            message = done.choices[0].message
            if not message.tool_calls:
                print(message.content)
                return
            messages.append(message)
            for call in message.tool_calls:
                result = add(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            choice = "auto"


main(sys.argv[1], json.load(sys.stdin)["prompt"])
