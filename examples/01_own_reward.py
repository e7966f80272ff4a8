"""A reward with partial credit: the share of correct digits.

Try it: astraflow try examples/01_own_reward.yaml --task 1
"""

from astraflow.types import Task

__all__ = ["digits_right"]


def digits_right(task: Task, text: str, *, exact_bonus: float = 0.5) -> float:
    """Share of correct digits, from the last one; a fully correct answer earns `exact_bonus` more."""
    answer = task.answer[::-1]
    given = text.strip()[::-1]
    if given == answer:
        return 1.0
    num_right = sum(a == b for a, b in zip(answer, given, strict=False))
    return (1.0 - exact_bonus) * num_right / max(len(answer), len(given))
