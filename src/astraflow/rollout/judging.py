"""Rewards that a model gives: a frozen policy of the run, or a model behind an OpenAI-compatible endpoint.

    JudgedScoring.score -> ScoringPool (all other parts of the reward) and Judge (its part) -> Score

A judge generates, so it is asked in the rollout service and not in the processes that score. Its completions
belong to no episode: they are neither recorded nor trained. A judge that cannot be asked fails the episode; a
reply without a verdict has the value that the recipe says, and counts in the metric `judge_unclear`.
"""

import hashlib
import math
import os
import re
from collections.abc import Mapping

from astraflow.errors import ConfigError, RolloutError
from astraflow.protocols import Engine, ReasoningRenderer, Renderer, Score
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.engines.openai_engine import OpenAiEngine, TextRenderer
from astraflow.rollout.open_calls import OpenCalls
from astraflow.rollout.scoring import ScoringPool
from astraflow.tasks.answers import extract_answer
from astraflow.tasks.config import JudgeReward, TasksConfig, WeightedReward
from astraflow.types import GenerateRequest, Message, Sampling, Task
from astraflow.workflows.calls import without_reasoning
from astraflow.workflows.roles import last_choice

__all__ = ["Judge", "JudgedScoring", "judges_of", "make_scoring"]

_MARK = re.compile(r"\{(prompt|answer|text)\}")
"""All marks are replaced in one pass: what is shown may hold marks itself."""


def make_scoring(tasks: TasksConfig, *, num_workers: int = 1) -> "ScoringPool | JudgedScoring":
    """What scores for a `tasks` section: processes, and a judge if its reward has one."""
    pool = ScoringPool(tasks, num_workers=num_workers)
    return JudgedScoring(tasks, pool) if judges_of(tasks) else pool


def judges_of(tasks: TasksConfig) -> dict[str, JudgeReward]:
    """The judges in a reward by their names; the name of the only reward is empty."""
    reward = tasks.reward
    parts = reward.rewards if isinstance(reward, WeightedReward) else {"": reward}
    return {name: part for name, part in parts.items() if isinstance(part, JudgeReward)}


class JudgedScoring:
    """Scores as a `ScoringPool` does, and adds what judges say.

    Example: `scoring = JudgedScoring(tasks, pool)`; `scoring.host({"judge": hosted})`;
    `await scoring.start()`; `await scoring.score(task, "5")`.
    """

    def __init__(self, tasks: TasksConfig, pool: ScoringPool) -> None:
        self._tasks = tasks
        self._pool = pool
        self._calls = OpenCalls()
        self._judges = {name: Judge(config) for name, config in judges_of(tasks).items()}

    def host(self, policies: Mapping[str, HostedPolicy]) -> None:
        """Names the policies that judges may be; the mapping may be filled later."""
        for judge in self._judges.values():
            judge.policies = policies

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
            value = judge.config.unclear
            if answer is not None:
                value, is_clear = await judge.value(task, answer)
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


class Judge:
    """Asks a model what a text is worth."""

    def __init__(self, config: JudgeReward) -> None:
        self.config = config
        self.policies: Mapping[str, HostedPolicy] = {}
        """Those of the run that this process serves."""
        self._endpoint: OpenAiEngine | None = None

    async def start(self) -> None:
        """Finds the endpoint, if the judge is one. Raises: UnavailableError; ConfigError if it refuses."""
        config = self.config
        if not config.url:
            return
        key = os.environ.get(config.key_variable, "") if config.key_variable else ""
        if config.key_variable and not key:
            raise ConfigError(
                f"the judge's key_variable = {config.key_variable!r} is not set in this service's environment"
            )
        self._endpoint = OpenAiEngine(config.url, model=config.model, api_key=key)
        await self._endpoint.check()

    async def value(self, task: Task, text: str) -> tuple[float, bool]:
        """The value of a text, and whether the judge said it. Raises: RolloutError."""
        config = self.config
        shown = {"prompt": task.prompt, "answer": task.answer, "text": text}
        question = _MARK.sub(lambda mark: shown[mark[1]], config.prompt)
        engine, renderer = self._model()
        prompt = renderer.render([Message(role="user", content=question)])
        max_context = engine.capacity().max_context
        if len(prompt) >= max_context:
            raise RolloutError(
                f"task {task.id}: the judge's prompt has {len(prompt)} tokens, its context {max_context}: "
                "raise rollout.engine.max_context",
                is_retryable=False,
            )
        sampling = Sampling(
            temperature=0.0,
            max_tokens=min(max_context - len(prompt), config.max_tokens),
            seed=_seed(question),
        )
        generation = await engine.generate(GenerateRequest(token_ids=prompt, sampling=sampling, version=-1))
        if generation.finish_reason == "abort":
            raise RolloutError(f"task {task.id}: the judge's engine aborted its reply")
        is_thinking = isinstance(renderer, ReasoningRenderer) and renderer.opens_reasoning(prompt)
        text = renderer.parse(generation.token_ids).content
        reply = without_reasoning(text, begins_inside=is_thinking)
        verdict = last_choice(reply, tuple(config.verdicts))
        return config.verdicts.get(verdict, config.unclear), bool(verdict)

    async def close(self) -> None:
        """Ends the connections to the endpoint."""
        if self._endpoint is not None:
            await self._endpoint.close()

    def _model(self) -> tuple[Engine, Renderer]:
        if self._endpoint is not None:
            return self._endpoint, TextRenderer()
        hosted = self.policies.get(self.config.policy)
        if hosted is None:
            raise RolloutError(
                f"the judge, policy {self.config.policy!r}, is not served here "
                f"({', '.join(self.policies) or 'none is'}); a service that scores must host it",
                is_retryable=False,
            )
        return hosted.engine, hosted.renderer


def _seed(question: str) -> int:
    """The same question has the same answer, also in another attempt."""
    return int.from_bytes(hashlib.blake2b(question.encode(), digest_size=4).digest()) >> 1
