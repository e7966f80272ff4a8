"""Plays a row of messages with the workflow `supervised`, and converts what it trains to traces and back."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow.addons.supervised.chats import chat_of_row
from astraflow.addons.supervised.supervised import Supervised
from astraflow.addons.view.chat_rows import chat_of
from astraflow.addons.view.trace_formats import atif_of, rows_of, trace_of
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode, Task, Trajectory
from drivers.rollout_fakes import ScriptedEngine, exact, make_policy
from drivers.template_driver import Model

WRITERS: dict[str, Any] = {"atif": lambda row: atif_of([row]), "trace": trace_of, "messages": dict}
"""What makes a document of one row, per format."""


class Engine(ScriptedEngine):
    """Serves version 3, and gives each token the logprob of its place: -1/8, -2/8, ..."""

    def __init__(self, max_context: int = 9999) -> None:
        super().__init__(max_context=max_context)
        self.slots["live"] = 3
        self.num_scored = 0

    async def score(self, token_ids: Any) -> NDArray[np.float32]:
        self.num_scored += 1
        return -np.arange(1, len(token_ids), dtype=np.float32) / 8


def play(model: Model, folder: Path, row: dict[str, Any], engine: Engine, workflow: Supervised) -> Episode:
    hosted = HostedPolicy(make_policy("actor"), engine, model.renderer, folder)
    spec = msgspec.json.encode(chat_of_row(row)).decode()
    task = Task(id="chats/4", source="chats", prompt="", spec=spec)
    return asyncio.run(EpisodeRunner({"actor": hosted}, workflow, exact).episode(task, seed=1))


def row_of(model: Model, trajectory: Trajectory, **more: Any) -> dict[str, Any]:
    """A trajectory as `astraflow episodes --export` writes it."""
    decode = partial(model.tokenizer.decode, skip_special_tokens=False)
    place = {"id": "run/train/4.0.0/0", "part": 0, "policy": trajectory.policy, "role": trajectory.role}
    return {**place, "reward": 0.5, "metrics": {"turns": 2.0}, **chat_of(trajectory, decode), **more}


def there_and_back(row: dict[str, Any], form: str) -> list[dict[str, Any]]:
    """A row after it was written in a format, as JSON, and read again."""
    return rows_of(json.loads(json.dumps(WRITERS[form](row))))
