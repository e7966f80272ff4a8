"""Scores answers to reasoning-gym tasks, in a sandbox if the data set's scorer runs an answer as Python.

In the sandbox, the answer can't access this machine. However, it runs in the process of its scorer, so an
answer that is designed to cheat can print a score itself.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from astraflow.addons.reasoning_gym.gym import check_entry, runs_answers, score_gym
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.pool import Sandbox
from astraflow.addons.sandbox.verdict import BoxLimits
from astraflow.errors import RolloutError, SandboxError
from astraflow.protocols import Score, Scorer, ScoringCall
from astraflow.types import Task

__all__ = ["GymScorer"]

_LIBRARY = "reasoning_gym.factory"
_LIMITS = BoxLimits(cpu_s=5.0, wall_s=45.0, memory_bytes=2 << 30)
"""The library and its imports take about 500 MB of addresses. The scoring process ends calls after 60 s."""
_SCORER = """
import json, os, sys
from reasoning_gym.factory import DATASETS
asked = json.load(sys.stdin)
spec = asked["spec"]
made, config = DATASETS[spec["dataset"]]
dataset = made(config(**spec["args"], seed=spec["seed"], size=spec["size"]))
entry = dataset[spec["idx"]]
print(json.dumps(str(entry["question"])), flush=True)
answers = os.dup(1)
os.dup2(2, 1)
score = float(dataset.score_answer(asked["answer"], entry))
os.write(answers, json.dumps(score).encode())
"""


class GymScorer(Scorer):
    """Scores answers. Example: `GymScorer(("countdown",))(call)` is a number, or an awaitable of one."""

    def __init__(self, allow: Collection[str]) -> None:
        self._allow = allow
        self._sandbox = Sandbox(SandboxConfig(packages=True), preloaded=(_LIBRARY,))

    async def open(self) -> None:
        """Opens the sandbox. Raises: ConfigError if sandboxes don't work on this machine."""
        await self._sandbox.open()

    async def close(self) -> None:
        """Ends the sandbox."""
        await self._sandbox.close()

    def __call__(self, call: ScoringCall) -> object:
        """Returns the score, or an awaitable if the answer runs in the sandbox. Raises: DataError."""
        spec = json.loads(call.task.spec)
        if runs_answers(str(spec["dataset"]), self._allow):
            return self._boxed(call.task, call.text, spec)
        return score_gym(call.task, call.text, spec)

    async def _boxed(self, task: Task, text: str, spec: Mapping[str, Any]) -> Score:
        """Returns the score of an answer that runs as a program, and whether it was broken.

        An answer is broken, and its score is 0, if it broke its scorer, took too long, or used too much
        memory.

        Raises: DataError if this machine generates another task; LateScoreError if the machine was too busy;
        RolloutError if the library fails, or if the machine had no memory.
        """
        try:
            verdict = await self._sandbox.run(
                _SCORER, stdin=json.dumps({"spec": dict(spec), "answer": text}), limits=_LIMITS
            )
        except SandboxError as err:
            raise RolloutError(f"task {task.id} could not be scored: {err}") from err
        question, _, score = verdict.stdout.partition("\n")
        verdict.raise_fault(f"task {task.id}: its scorer")
        if not question:
            raise RolloutError(
                f"task {task.id}: reasoning-gym made no entry in its box: {verdict.reason}: "
                f"{verdict.stderr[-500:]}"
            )
        check_entry(task, json.loads(question))
        try:
            value = float(json.loads(score)) if verdict.has_passed else None
        except (TypeError, ValueError):
            value = None  # the answer itself printed something that isn't a score
        return Score(value or 0.0, {"broken": float(value is None)})
