"""The workflow `distill`: one prompt, one completion, one score, and a teacher that scores each token.

    prompt -> policy -> answer -> the recipe's reward -> feedback in words
                          |                                   |
                          +--> teacher, which reads the same prompt or `context` --> streams

Teachers are policies of the run, or endpoints, chosen by the source of the task.
"""

import inspect
import time

import numpy as np

from astraflow.addons.distillation.config import TOP_IDS, TOP_LOGPROBS, DistillConfig
from astraflow.addons.distillation.endpoint import EndpointTeacher
from astraflow.errors import RolloutError
from astraflow.trainer.columns import TEACHER_STREAM
from astraflow.trajectory_rules import MIN_LOGPROB
from astraflow.types import Message
from astraflow.workflows.conversation import Completion, Policies, Rewards, ScoredTask
from astraflow.workflows.roles import in_parallel, policy_at
from astraflow.workflows.variant import load_function

__all__ = ["Distill"]


class Distill:
    """Runs the episodes of a service. Implements `OpenWorkflow`.

    Example: `rewards = await workflow(task, policies)`, after `await workflow.open()`.
    """

    def __init__(self, config: DistillConfig) -> None:
        """Raises: ConfigError if the function `feedback` can't be loaded."""
        self._config = config
        self._feedback = load_function(config.feedback, "workflow.feedback") if config.feedback else None
        self._endpoints: dict[str, EndpointTeacher] = {}

    async def open(self) -> None:
        """Connects to the endpoints. Raises: UnavailableError; ConfigError if one can't score tokens."""
        teachers = self._config.teachers.items()
        self._endpoints = {source: EndpointTeacher(own) for source, own in teachers if own.url}
        await in_parallel(each.check_scores(self._config.top) for each in self._endpoints.values())

    async def close(self) -> None:
        """Closes the connections."""
        for endpoint in self._endpoints.values():
            await endpoint.close()

    async def __call__(self, task: ScoredTask, policies: Policies) -> Rewards:
        """Rewards the answer with the task's score, and records what the teacher makes of each token.

        Metrics: `teacher_s_p50` and `teacher_s_p95`, seconds that the teacher took.
        """
        config = self._config
        actor = policy_at(policies, config.policy, 0)
        chat = actor.conversation(context=task.context)
        answer = await chat.say(task.prompt)
        score = await task.score(answer.text)
        rewards = Rewards()
        rewards.add(chat, score)
        source = config.teacher_of(task.source)
        endpoint = self._endpoints.get(source)
        teacher = actor if endpoint is not None else policies[config.teachers[source].policy]
        context = await self._context(task, answer, score)
        started = time.perf_counter()
        found = await teacher.scores(answer, config.top, context=context, by=endpoint)
        if config.top:
            rewards.add_stream(answer, TOP_IDS, found.top_ids, "int32")
            rewards.add_stream(answer, TOP_LOGPROBS, np.maximum(found.top_logprobs, MIN_LOGPROB))
        else:
            rewards.add_stream(answer, TEACHER_STREAM, np.maximum(found.logprobs, MIN_LOGPROB))
        rewards.add_time("teacher_s", time.perf_counter() - started)
        return rewards

    async def _context(self, task: ScoredTask, answer: Completion, score: float) -> list[Message] | None:
        """What the teacher reads instead of the prompt; None: the same."""
        if not self._config.context:
            return None
        words = ""
        if self._feedback is not None:
            given = self._feedback(task.task, answer.text, score)
            words = await given if inspect.isawaitable(given) else given
            if not isinstance(words, str):
                raise RolloutError(
                    f"workflow.feedback returned {words!r:.80} for task {task.id}; expected a text",
                    is_retryable=False,
                )
        text = self._config.context.format(
            prompt=task.prompt, answer=task.answer, text=answer.text, score=f"{score:g}", feedback=words
        )
        return [*task.context, Message(role="user", content=text)]
