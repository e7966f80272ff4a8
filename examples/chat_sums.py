"""Chat data with two weighted rewards: a TRL reward function and an async one.

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
    """Returns 1 for each completion that ends with the answer. TRL passes lists, and chats as messages."""
    texts = [messages[0]["content"] for messages in completions]
    return [float(text.endswith(f"={value}")) for text, value in zip(texts, answer, strict=True)]


async def brief(task: Task, text: str, *, digits: int) -> float:
    """Returns 1 for a short completion. `digits` is a column of the data."""
    await asyncio.sleep(0)  # a real reward would call a judge here; many calls wait concurrently
    return float(len(text) <= 6 * digits)


def rows(num_rows: int) -> list[dict[str, Any]]:
    """Returns rows whose prompt is a chat and whose answer is nested."""
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
