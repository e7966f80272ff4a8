"""Rewards from judges. A judge is a model that rates answers: a policy of the run, or a model at an endpoint.

    JudgedScoring.score -> ScoringPool (all other parts of the reward) and Judge (its part) -> Score

A judge generates text, so it runs in the rollout service and not in the scoring processes. Its completions
don't belong to an episode: they are neither recorded nor trained on. If a judge is unavailable, the episode
fails. A completion without a clear verdict gets the value that the judge sets, and counts in `judge_unclear`.
"""

import math
from collections.abc import Mapping

from astraflow.protocols import HostedModel, Score
from astraflow.rollout.open_calls import OpenCalls
from astraflow.rollout.scoring import ScoringPool
from astraflow.tasks.answers import extract_answer
from astraflow.tasks.config import TasksConfig, WeightedReward, judges_of
from astraflow.types import Task

__all__ = ["JudgedScoring", "make_scoring"]


def make_scoring(tasks: TasksConfig, *, num_workers: int = 1) -> "ScoringPool | JudgedScoring":
    """Makes the scoring of a `tasks` section: a pool of processes, with judges if its reward has any."""
    pool = ScoringPool(tasks, num_workers=num_workers)
    return JudgedScoring(tasks, pool) if judges_of(tasks) else pool


class JudgedScoring:
    """Scores like a `ScoringPool`, and adds the rewards from judges.

    Example: `scoring = JudgedScoring(tasks, pool)`; `scoring.host({"judge": hosted})`;
    `await scoring.start()`; `await scoring.score(task, "5")`.
    """

    def __init__(self, tasks: TasksConfig, pool: ScoringPool) -> None:
        self._tasks = tasks
        self._pool = pool
        self.calls = OpenCalls()
        """Calls that run or wait."""
        self._judges = {name: config.make_judge() for name, config in judges_of(tasks).items()}
        self._policies: Mapping[str, HostedModel] = {}

    def host(self, policies: Mapping[str, HostedModel]) -> None:
        """Sets the policies that may serve as judges. The mapping may be filled later."""
        self._policies = policies

    async def start(self) -> None:
        """Starts the scoring. Raises: like `ScoringPool.start`; UnavailableError if an endpoint is down."""
        await self._pool.start()
        for judge in self._judges.values():
            await judge.start()

    async def score(self, task: Task, text: str) -> Score:
        """Scores a completion. Raises: like `ScoringPool.score`; RolloutError if a judge is unavailable."""
        with self.calls.one():
            return await self._score(task, text)

    @property
    def queue(self) -> str:
        """A description of what most calls wait for."""
        if 2 * self._pool.calls.num > self.calls.num:
            return self._pool.queue
        return f"the judge: {self.calls.num - self._pool.calls.num} calls wait for its replies"

    async def _score(self, task: Task, text: str) -> Score:
        pool_score = await self._pool.score(task, text)
        answer = extract_answer(text, mode=self._tasks.extract)
        total = 0.0
        parts = dict(pool_score.parts)
        for name, judge in self._judges.items():
            value = judge.unclear
            if answer is not None:
                value, is_clear = await judge.value(task, answer, self._policies)
                parts["judge_unclear"] = max(parts.get("judge_unclear", 0.0), float(not is_clear))
            parts[f"reward/{name}" if name else "reward/judge"] = value
            reward = self._tasks.reward
            total += reward.weight(name) * value if isinstance(reward, WeightedReward) else value
        return Score(float(pool_score) + total * self._scale(parts), parts)

    async def close(self) -> None:
        """Ends the scoring processes, and closes the connections to endpoints."""
        await self._pool.close()
        for judge in self._judges.values():
            await judge.close()

    def _scale(self, parts: Mapping[str, float]) -> float:
        """The factor of the judges' rewards: the product of all factors, times the share without `format`."""
        reward = self._tasks.reward
        factors = reward.factors if isinstance(reward, WeightedReward) else ()
        product = math.prod(parts.get(f"reward/{name}", 1.0) for name in factors)
        return product * (1 - self._tasks.format_weight if self._tasks.format else 1.0)
