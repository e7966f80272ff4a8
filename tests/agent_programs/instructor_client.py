"""Instructor: `from_provider`; typed output by a named tool_choice (its default), and by JSON."""

import json
import os
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

MODEL = os.environ["ASTRAFLOW_MODEL"]


class Answer(BaseModel):
    sum: int


def main(form: str, prompt: str) -> None:
    messages = [{"role": "user", "content": prompt}]
    if form == "structured":
        client = instructor.from_openai(OpenAI())
        print(client.chat.completions.create(model=MODEL, messages=messages, response_model=Answer).sum)
    elif form == "streaming":
        client = instructor.from_openai(OpenAI(), mode=instructor.Mode.JSON_SCHEMA)
        *_, last = client.chat.completions.create_partial(
            model=MODEL, messages=messages, response_model=Answer
        )
        print(f"It is {last.sum}.")
    else:
        sys.exit(f"instructor has no form {form}")


main(sys.argv[1], json.load(sys.stdin)["prompt"])
