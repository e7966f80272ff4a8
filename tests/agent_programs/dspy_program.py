"""DSPy: Predict for plain and typed output, streamify, and ReAct for tools."""

import asyncio
import json
import os
import sys

import dspy

MODEL = f"openai/{os.environ['ASTRAFLOW_MODEL']}"


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"total:{a + b}"


async def stream(prompt: str) -> None:
    listeners = [dspy.streaming.StreamListener(signature_field_name="answer")]
    program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=listeners)
    async for piece in program(question=prompt):
        if isinstance(piece, dspy.streaming.StreamResponse):
            print(piece.chunk, end="")


def main(form: str, prompt: str) -> None:
    dspy.configure(lm=dspy.LM(MODEL, cache=False))
    if form == "plain":
        print(dspy.Predict("question -> answer")(question=prompt).answer)
    elif form == "structured":
        dspy.configure(adapter=dspy.JSONAdapter())
        print(dspy.Predict("question -> sum: int")(question=prompt).sum)
    elif form == "streaming":
        asyncio.run(stream(prompt))
    else:
        print(dspy.ReAct("question -> answer", tools=[add])(question=prompt).answer)


main(sys.argv[1], json.load(sys.stdin)["prompt"])
