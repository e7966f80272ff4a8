"""LiteLLM: `completion` with the provider `openai`."""

import json
import os
import sys

import litellm
from pydantic import BaseModel

MODEL = f"openai/{os.environ['ASTRAFLOW_MODEL']}"


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
    messages = [{"role": "user", "content": prompt}]
    if form == "plain":
        print(litellm.completion(MODEL, messages).choices[0].message.content)
    elif form == "structured":
        done = litellm.completion(MODEL, messages, response_format=Answer)
        print(Answer.model_validate_json(done.choices[0].message.content).sum)
    elif form == "streaming":
        for chunk in litellm.completion(MODEL, messages, stream=True):
            print(chunk.choices[0].delta.content or "", end="")
    else:
        while True:
            message = litellm.completion(MODEL, messages, tools=TOOLS).choices[0].message
            if not message.tool_calls:
                print(message.content)
                return
            messages.append(message)
            for call in message.tool_calls:
                result = add(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


main(sys.argv[1], json.load(sys.stdin)["prompt"])
