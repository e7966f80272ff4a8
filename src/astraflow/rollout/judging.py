"""Rewards of judges, which ask a model: a policy of the run, or one behind an endpoint.

    JudgedScoring.score -> ScoringPool (all other parts of the reward) and Judge (its part) -> Score

A judge generates, so it is asked in the rollout service and not in the processes that score. Its completions
belong to no episode: they are neither recorded nor trained. A judge that cannot be asked fails the episode; a
reply without a verdict has the value that the judge says, and counts in the metric `judge_unclear`.
"""

import math
from collections.abc import Mapping

from astraflow.protocols import HostedModel, Score
from astraflow.rollout.open_calls import OpenCalls
from astraflow.rollout.scoring import ScoringPool
from astraflow.tasks.answers import extract_answer
from astraflow.tasks.config import TasksConfig, WeightedReward
from astraflow.tasks.variants import JudgeVariant
from astraflow.types import Task

__all__ = ["JudgedScoring", "judges_of", "make_scoring"]


def make_scoring(tasks: TasksConfig, *, num_workers: int = 1) -> "ScoringPool | JudgedScoring":
    """What scores for a `tasks` section: processes, and a judge if its reward has one."""
    pool = ScoringPool(tasks, num_workers=num_workers)
    return JudgedScoring(tasks, pool) if judges_of(tasks) else pool


def judges_of(tasks: TasksConfig) -> dict[str, JudgeVariant]:
    """The judges in a reward by their names; the name of the only reward is empty."""
    reward = tasks.reward
    parts = reward.rewards if isinstance(reward, WeightedReward) else {"": reward}
    return {name: part for name, part in parts.items() if isinstance(part, JudgeVariant)}


class JudgedScoring:
    """Scores as a `ScoringPool` does, and adds what judges say.

    Example: `scoring = JudgedScoring(tasks, pool)`; `scoring.host({"judge": hosted})`;
    `await scoring.start()`; `await scoring.score(task, "5")`.
    """

    def __init__(self, tasks: TasksConfig, pool: ScoringPool) -> None:
        self._tasks = tasks
        self._pool = pool
        self._calls = OpenCalls()
        self._judges = {name: config.make_judge() for name, config in judges_of(tasks).items()}
        self._policies: Mapping[str, HostedModel] = {}

    def host(self, policies: Mapping[str, HostedModel]) -> None:
        """Names the policies that judges may ask; the mapping may be filled later."""
        self._policies = policies

    async def start(self) -> None:
        """As `ScoringPool.start`. Raises also: UnavailableError if an endpoint does not answer."""
        await self._pool.start()
        for judge in self._judges.values():
            await judge.start()

    async def score(self, task: Task, text: str) -> Score:
        """The reward of a completion. Raises: as `ScoringPool.score`; RolloutError if a judge cannot be
        asked."""
        with self._calls.one():
            return await self._score(task, text)

    @property
    def num_calls(self) -> int:
        """Calls that run or wait."""
        return self._calls.num

    @property
    def oldest_call_s(self) -> float:
        """For how long the oldest of them has run or waited; 0 if there is none."""
        return self._calls.oldest_s

    @property
    def queue(self) -> str:
        """What most calls wait for, in words."""
        if 2 * self._pool.num_calls > self._calls.num:
            return self._pool.queue
        return f"the judge: {self._calls.num - self._pool.num_calls} calls wait for its replies"

    async def _score(self, task: Task, text: str) -> Score:
        scored = await self._pool.score(task, text)
        answer = extract_answer(text, mode=self._tasks.extract)
        total = 0.0
        parts = dict(scored.parts)
        for name, judge in self._judges.items():
            value = judge.unclear
            if answer is not None:
                value, is_clear = await judge.value(task, answer, self._policies)
                parts["judge_unclear"] = max(parts.get("judge_unclear", 0.0), float(not is_clear))
            parts[f"reward/{name}" if name else "reward/judge"] = value
            total += self._weight(name) * value
        return Score(float(scored) + total * self._scale(parts), parts)

    async def close(self) -> None:
        """Ends the processes, and the connections to endpoints."""
        await self._pool.close()
        for judge in self._judges.values():
            await judge.close()

    def _weight(self, name: str) -> float:
        reward = self._tasks.reward
        return reward.weight(name) if isinstance(reward, WeightedReward) else 1.0

    def _scale(self, parts: Mapping[str, float]) -> float:
        """What the sum of the rewards is multiplied by: the factors, and the share that `format` leaves."""
        reward = self._tasks.reward
        factors = reward.factors if isinstance(reward, WeightedReward) else ()
        product = math.prod(parts.get(f"reward/{name}", 1.0) for name in factors)
        return product * (1 - self._tasks.format_weight if self._tasks.format else 1.0)
