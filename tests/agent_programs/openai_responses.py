"""OpenAI's client, Responses API: plain, structured by `parse`, streamed, tools by `previous_response_id`."""

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
        "name": "add",
        "description": "Adds two numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    }
]


def main(form: str, prompt: str) -> None:
    client = OpenAI()
    if form == "plain":
        print(client.responses.create(model=MODEL, input=prompt, instructions="Be brief.").output_text)
    elif form == "structured":
        print(client.responses.parse(model=MODEL, input=prompt, text_format=Answer).output_parsed.sum)
    elif form == "streaming":
        with client.responses.stream(model=MODEL, input=prompt) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    print(event.delta, end="")
            assert stream.get_final_response().usage.output_tokens > 0
    else:
        choice = {"type": "function", "name": "add"}
        response = client.responses.create(model=MODEL, input=prompt, tools=TOOLS, tool_choice=choice)
        while calls := [item for item in response.output if item.type == "function_call"]:
            results = [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": add(**json.loads(call.arguments)),
                }
                for call in calls
            ]
            response = client.responses.create(
                model=MODEL, input=results, tools=TOOLS, previous_response_id=response.id
            )
        print(response.output_text)


main(sys.argv[1], json.load(sys.stdin)["prompt"])
