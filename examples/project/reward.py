"""The reward: what counts as a good answer. `recipe.yaml` names it under `tasks.reward`."""

from astraflow.types import Task

__all__ = ["share_of_digits"]


def share_of_digits(task: Task, text: str, *, bonus: float) -> float:
    """1 for the right answer; else the share of right digits, counted from the last one, times (1 - `bonus`).

    `text` is the part of the completion that `tasks.extract` names.
    """
    answer = task.answer[::-1]
    given = text.strip()[::-1]
    if given == answer:
        return 1.0
    num_right = sum(a == b for a, b in zip(answer, given, strict=False))
    return (1.0 - bonus) * num_right / max(len(answer), len(given))
