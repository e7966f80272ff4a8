"""Chat data with two weighted rewards: one in the form of TRL, and one that is async.

Make the data: python examples/chat_sums.py
Try it:        astraflow try examples/chat_sums.yaml --task 1
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from astraflow.types import Task

__all__ = ["brief", "right"]


def right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 for each completion that ends with the answer. TRL's rewards get lists, and chats as messages."""
    texts = [messages[0]["content"] for messages in completions]
    return [float(text.endswith(f"={value}")) for text, value in zip(texts, answer, strict=True)]


async def brief(task: Task, text: str, *, digits: int) -> float:
    """1 for a completion without a detour. `digits` is a column of the data."""
    await asyncio.sleep(0)  # where a reward would ask a judge: many calls of it wait at the same time
    return float(len(text) <= 6 * digits)


def rows(num_rows: int) -> list[dict[str, Any]]:
    """Each prompt is a chat, and the answer lies one level down."""
    pairs = [(10 + idx % 90, 10 + 7 * idx % 90) for idx in range(num_rows)]
    return [
        {
            "messages": [
                {"role": "system", "content": "+"},
                {"role": "user", "content": f"Calculate {a} + {b}."},
            ],
            "solution": {"value": a + b},
            "digits": 2,
        }
        for a, b in pairs
    ]


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "chat_sums.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(512)), encoding="utf-8")
