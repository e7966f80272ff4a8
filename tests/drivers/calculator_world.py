"""Products that a tiny model can't work out, but a calculator at an MCP server can.

    37*48?  ->  calculate(expression="37*48")  ->  1776  ->  =1776

The demonstrations mostly guess. Rewards can teach the model to ask.
"""

import json
import random
from collections.abc import Sequence

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.types import Message, Task, ToolSpec
from astraflow.user_input.splits import is_heldout

CALCULATE = ToolSpec(
    name="calculate",
    description="Calculates/evaluates the given expression.",
    parameters='{"type": "object", "properties": {"expression": {"type": "string"}}}',
)


class Products:
    """Products of two numbers of two digits, of a split: `train` or `heldout`."""

    def __init__(self, split: str) -> None:
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        random.Random(0).shuffle(pairs)
        prompts = {f"{a}*{b}?": str(a * b) for a, b in pairs}
        self._tasks = [
            Task(id=f"products/{prompt}", source="products", prompt=prompt, answer=answer)
            for prompt, answer in prompts.items()
            if is_heldout(prompt, frac=0.2) == (split == "heldout")
        ]

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, idx: int) -> Task:
        return self._tasks[idx]


def demonstrations(num: int, seed: int, asking_frac: float = 0.15) -> Sequence[Demonstration]:
    """Conversations, of which a share of `asking_frac` calls the tool; the others guess."""
    rng = random.Random(seed)
    return [_shown(rng, is_asking=rng.random() < asking_frac) for _ in range(num)]


def _shown(rng: random.Random, *, is_asking: bool) -> Demonstration:
    product = f"{rng.randrange(10, 100)}*{rng.randrange(10, 100)}"
    value = str(rng.randrange(100, 10_000))  # what is copied need not be right
    messages = [Message(role="user", content=f"{product}?")]
    if is_asking:
        call = json.dumps({"name": "calculate", "arguments": {"expression": product}})
        messages.append(Message(role="assistant", content=f"<tool_call>{call}</tool_call>"))
        messages.append(Message(role="tool", content=value, name="calculate"))
    messages.append(Message(role="assistant", content=f"={value}"))
    return Demonstration(messages=messages, tools=[CALCULATE])
