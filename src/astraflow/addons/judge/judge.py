"""Asks a model to judge a text, and reads the verdict in its reply."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from astraflow.addons.inference_servers.openai_engine import OpenAiEngine, TextRenderer
from astraflow.addons.judge.config import JudgeReward, JudgingModel
from astraflow.errors import RolloutError
from astraflow.protocols import Engine, HostedModel, Renderer
from astraflow.rollout.renderer import ChatRenderer
from astraflow.types import GenerateRequest, Message, Sampling, Task
from astraflow.types.model_text import without_reasoning
from astraflow.workflows.roles import last_choice

__all__ = ["JudgeConnection", "ModelJudge", "fill"]


def fill(template: str, texts: Mapping[str, str]) -> str:
    """Replaces each mark `{NAME}` with its text, in one pass, because the texts may contain marks too."""
    return re.sub(r"\{(\w+)\}", lambda mark: texts.get(mark[1], mark[0]), template)


_ModelT = TypeVar("_ModelT", bound=JudgingModel)


class JudgeConnection(Generic[_ModelT]):
    """Asks the model that a config names, and holds the connection to its endpoint, if it has one."""

    def __init__(self, config: _ModelT) -> None:
        self._config = config
        self._endpoint: OpenAiEngine | None = None
        """None before `start`, and for a judge that is a policy."""
        self._num_taken = 0

    async def start(self) -> None:
        """Connects to the endpoint, if there is one. Raises: UnavailableError; ConfigError if it refuses."""
        config = self._config
        if not config.url:
            return
        self._endpoint = OpenAiEngine(config.url, model=config.model, api_key=config.api_key())
        await self._endpoint.check()

    async def close(self) -> None:
        """Closes the connections to the endpoint."""
        if self._endpoint is not None:
            await self._endpoint.close()

    def take_tokens(self) -> int:
        """The tokens of the endpoint's replies since the last call."""
        before = self._num_taken
        self._num_taken = self._endpoint.capacity().generated_tokens if self._endpoint is not None else 0
        return self._num_taken - before

    async def _reply(self, model: tuple[Engine, Renderer], messages: Sequence[Message], task_id: str) -> str:
        """Returns the judge's reply without its reasoning. Raises: RolloutError."""
        engine, renderer = model
        prompt = renderer.render(messages)
        max_context = engine.capacity().max_context
        if len(prompt) >= max_context:
            raise RolloutError(
                f"task {task_id}: the judge's prompt has {len(prompt)} tokens, its context {max_context}: "
                "raise rollout.engine.max_context",
                is_retryable=False,
            )
        # The seed comes from the question, so that the same question gets the same answer in every attempt.
        digest = hashlib.blake2b(messages[0].content.encode(), digest_size=4).digest()
        sampling = Sampling(
            temperature=0.0,
            max_tokens=min(max_context - len(prompt), self._config.max_tokens),
            seed=int.from_bytes(digest) >> 1,
        )
        generation = await engine.generate(GenerateRequest(token_ids=prompt, sampling=sampling, version=-1))
        if generation.finish_reason == "abort":
            raise RolloutError(f"task {task_id}: the judge's engine aborted its reply")
        tag = renderer.opens_reasoning(prompt) if isinstance(renderer, ChatRenderer) else ""
        text = renderer.parse(generation.token_ids).content
        return without_reasoning(f"{tag}{text}", begins_inside=bool(tag))


class ModelJudge(JudgeConnection[JudgeReward]):
    """Asks a policy of the run or the model at an endpoint. Implements `Judge`.

    Example: `judge = ModelJudge(JudgeReward(policy="judge"))`; `await judge.start()`;
    `await judge.value(task, "5", policies)`.
    """

    @property
    def unclear(self) -> float:
        """Value of a completion that lacks the part to judge."""
        return self._config.unclear

    async def value(self, task: Task, text: str, policies: Mapping[str, HostedModel]) -> tuple[float, bool]:
        """Returns the value of a text, and whether the judge gave a verdict. Raises: RolloutError.

        A judge whose reply has no clear verdict is asked once more, for the verdict alone.
        """
        config = self._config
        texts = {"prompt": task.prompt, "answer": task.answer, "text": text}
        messages = [Message(role="user", content=fill(config.prompt, texts))]
        reply = await self._reply(self._model(policies), messages, task.id)
        verdict = last_choice(reply, tuple(config.verdicts))
        if not verdict:
            again = f"Reply with only your verdict: {' or '.join(config.verdicts)}."
            messages += [Message(role="assistant", content=reply), Message(role="user", content=again)]
            try:
                second = await self._reply(self._model(policies), messages, task.id)
                verdict = last_choice(second, tuple(config.verdicts))
            except RolloutError as err:
                if err.is_retryable:
                    raise
                # The longer conversation is refused, e.g. because it doesn't fit into the context.
        return config.verdicts.get(verdict, config.unclear), bool(verdict)

    def _model(self, policies: Mapping[str, HostedModel]) -> tuple[Engine, Renderer]:
        if self._endpoint is not None:
            return self._endpoint, TextRenderer()
        hosted = policies.get(self._config.policy)
        if hosted is None:
            raise RolloutError(
                f"the judge, policy {self._config.policy!r}, is not served here "
                f"({', '.join(policies) or 'none is'}); a service that scores must host it",
                is_retryable=False,
            )
        return hosted.engine, hosted.renderer
