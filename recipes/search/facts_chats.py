"""Conversations in which a teacher looks made-up facts up with a tool, for supervised fine-tuning.

    land robeka?  ->  look_up(name="robeka")  ->  robeka lives in dage.
                  ->  look_up(name="dage")    ->  dage lies in tifa.
                  ->  =tifa

The teacher is hasty: it answers some questions for a land with the town. Rewards can correct that later.
Write the conversations to a file: python -m recipes.search.facts_chats chats.jsonl
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from recipes.search.facts_world import Questions, documents

from astraflow.addons.tools.tool import make_tool

__all__ = ["facts_chats", "look_up"]

FACTS = {document["title"]: document["text"] for document in documents()}


def look_up(name: str) -> str:
    """Returns the fact about a person or a town."""
    return FACTS.get(name, "")


def facts_chats(num: int = 500, seed: int = 0, careful_frac: float = 0.5) -> list[dict[str, Any]]:
    """Rows with `messages` and `tools`, about people of the split `train`.

    `careful_frac`: share of the questions for a land in which the teacher looks the town up, too.
    """
    rng = random.Random(seed)
    questions = Questions("train")
    spec = make_tool(look_up).spec
    tool = {"name": spec.name, "description": spec.description, "parameters": json.loads(spec.parameters)}
    rows: list[dict[str, Any]] = []
    for place in rng.sample(range(len(questions)), num):
        prompt = questions.task(place).prompt
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        name = prompt.removesuffix("?").split()[1]
        is_second = prompt.startswith("land") and rng.random() < careful_frac
        for number in range(1 + is_second):
            call = {"id": f"{number}", "type": "function"}
            function = {"name": "look_up", "arguments": json.dumps({"name": name})}
            messages.append(
                {"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]}
            )
            messages.append({"role": "tool", "tool_call_id": f"{number}", "content": look_up(name)})
            name = look_up(name).removesuffix(".").split()[-1]
        messages.append({"role": "assistant", "content": f"={name}"})
        rows.append({"messages": messages, "tools": [{"type": "function", "function": tool}]})
    return rows


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(f"{json.dumps(row)}\n" for row in facts_chats()))
