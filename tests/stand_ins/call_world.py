"""A tiny model that calls a tool with any numbers, and an agent that wants large ones."""

# ruff: noqa: RUF001 - DeepSeek's own bars

import json
import random
from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI

from astraflow.addons.agents.agent import AgentTask
from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.types import Message, ToolSpec
from astraflow.workflows.conversation import Endpoint

__all__ = ["PIECES", "demonstrations", "solve"]

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
PIECES = {
    "qwen3_5": (
        "<tool_call>\n<function=add>\n<parameter=a>\n",
        "\n</parameter>\n<parameter=b>\n",
        "\n</parameter>\n</function>\n</tool_call>",
        "",
    ),
    "gpt_oss": (
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": ',
        ', "b": ',
        "}",
        "<|channel|>final<|message|>",
    ),
    "deepseek_v3_1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": ',
        ', "b": ',
        "}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
    ),
}
"""What is around the numbers of a call, and before an answer. Each is one token of the model."""


def demonstrations(num: int, seed: int, family: str) -> Sequence[Demonstration]:
    """Calls of the tool in the format of a family, with numbers drawn at random."""
    rng = random.Random(seed)
    opening, between, closing, final = PIECES[family]
    tool = ToolSpec(name="add", description="Adds.", parameters=json.dumps(SCHEMA))
    made: list[Demonstration] = []
    for _ in range(num):
        first = rng.randint(0, 9)
        second = rng.randint(0, 9)
        messages = (
            Message(role="user", content=f"Calculate {rng.randint(0, 9)} + {rng.randint(0, 9)}."),
            Message(role="assistant", content=f"{opening}{first}{between}{second}{closing}"),
            Message(role="tool", content=f"={first + second}"),
            Message(role="assistant", content=f"{final}="),
        )
        made.append(Demonstration(messages=messages, tools=[tool]))
    return made


async def solve(task: AgentTask, endpoint: Endpoint) -> float:
    """Lets the model call the tool once, and rewards large numbers, if it then says the result.

    It doesn't know how the model writes calls.
    """
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
    tools: Any = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    total = 0
    answer = ""
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for _ in range(2):
            reply = await client.chat.completions.create(model="actor", messages=messages, tools=tools)
            said = reply.choices[0].message
            messages.append(said)
            answer = "" if said.tool_calls else said.content or ""
            for call in said.tool_calls or ():
                given = json.loads(call.function.arguments)  # type: ignore[union-attr]
                numbers = [given.get("a"), given.get("b")]
                if all(isinstance(number, int) and number <= 9 for number in numbers):
                    total = max(total, sum(numbers))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"={total}"})
    return total / 18 if answer.startswith("=") else 0.0
