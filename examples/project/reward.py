"""The reward, which scores an answer. `recipe.yaml` names it under `tasks.reward`."""

from astraflow.types import Task

__all__ = ["share_of_digits"]


def share_of_digits(task: Task, text: str, *, bonus: float) -> float:
    """Returns 1 for the correct answer, else (1 - `bonus`) times the share of correct digits from the end.

    `text` is the part of the completion that `tasks.extract` names.
    """
    answer = task.answer[::-1]
    given = text.strip()[::-1]
    if given == answer:
        return 1.0
    num_right = sum(a == b for a, b in zip(answer, given, strict=False))
    return (1.0 - bonus) * num_right / max(len(answer), len(given))
