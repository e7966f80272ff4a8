"""Calls users' functions that score a whole group of answers at a time.

A function `score_group(task, texts, ...)` gets the task, all completions, and columns by name. One in the
form `trl` gets lists with an entry per answer: `prompts`, `completions`, `answer`, and columns. `replies` are
the completions without their reasoning. The functions run in a scoring process, under a deadline.
"""

import base64
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, cast

from astraflow.config import Use
from astraflow.errors import DataError
from astraflow.protocols import ScoringCall
from astraflow.rollout.scoring import ScoringPool
from astraflow.tasks.config import JsonlSourceConfig, TasksConfig, TrlReward
from astraflow.tasks.own_rewards import RewardForm, TrlForm, make_own_reward
from astraflow.types import Task
from astraflow.types.bounds import as_number
from astraflow.types.model_text import without_reasoning
from astraflow.types.row_columns import Row

__all__ = ["GroupFunction", "encode_texts", "make_group_pool"]


def make_group_pool(config: Use) -> ScoringPool:
    """Makes the pool that calls a function with `encode_texts(texts)`. Part `reward/i` is text i's value."""
    form = "trl" if isinstance(config, TrlReward) else "use"
    function = f"{GroupFunction.__module__}:{GroupFunction.__name__}"
    reward = Use(use=function, args={"use": config.use, "form": form, "args": config.args})
    # The pool needs a source, but it reads no tasks.
    return ScoringPool(TasksConfig(sources={"none": JsonlSourceConfig(path="")}, reward=reward))


class GroupFunction:
    """A user's function as a reward. Its text encodes the texts of a group, and its metrics are their values.

    Example: `GroupFunction("my_rewards:rank", "use", {})(task, encoded)` is `{"score": 0.5, "0": 1, "1": 0}`.
    """

    def __init__(self, use: str, form: str, args: Mapping[str, Any]) -> None:
        made = _TrlGroupForm() if form == "trl" else _GroupForm()
        self._function = make_own_reward(Use(use=use, args=dict(args)), where="workflow.compare", form=made)

    def __call__(self, task: Task, text: str) -> object:
        """The values, or an awaitable of them. Raises: DataError if there isn't one number per text."""
        num = len(_decode(text))
        returned = self._function(ScoringCall(task, text, text))
        return _await_values(returned, num) if inspect.isawaitable(returned) else _named(returned, num)


class _GroupForm(RewardForm):
    """AstraFlow's form: `score_group(task, texts)`."""

    def positional(self, call: ScoringCall) -> tuple[object, ...]:
        return (call.task, _decode(call.text))

    def values(self, call: ScoringCall, row: Row) -> Mapping[str, Any]:
        return {**row.columns, "replies": [*map(without_reasoning, _decode(call.text))]}


class _TrlGroupForm(TrlForm):
    """TRL's form: lists with an entry per answer."""

    def values(self, call: ScoringCall, row: Row) -> Mapping[str, Any]:
        texts = _decode(call.text)
        lists = [TrlForm.values(self, replace(call, completion=text), row) for text in texts]
        merged = {name: [one[name][0] for one in lists] for name in lists[0]}
        return {**merged, "replies": [*map(without_reasoning, texts)]}

    def result(self, returned: object) -> object:
        return returned


def encode_texts(texts: Sequence[str]) -> str:
    """The texts as one without tags, because scoring looks for reasoning in what it gets."""
    return base64.b64encode(json.dumps([*texts]).encode()).decode()


def _decode(text: str) -> list[str]:
    return json.loads(base64.b64decode(text))


async def _await_values(returned: Any, num: int) -> object:
    return _named(await returned, num)


def _named(returned: object, num: int) -> dict[str, float]:
    """The values by position, and their mean as the score. Raises: DataError."""
    shown = str(returned)[:200]
    is_list = isinstance(returned, Iterable) and not isinstance(returned, str | Mapping)
    given = [as_number(value) for value in cast("Any", returned)] if is_list else []
    values = [value for value in given if value is not None]
    if len(values) != num or len(given) != num:
        raise DataError(f"it returned {shown!r} for {num} answers; expected a list of {num} numbers")
    return {"score": fmean(values), **{str(i): value for i, value in enumerate(values)}}
