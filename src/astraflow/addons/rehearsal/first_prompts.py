"""The first prompts of each source, as the chat templates render them, and whether answers have room.

Engines that say one word take the place of models, so environments and workflows run, and nothing is loaded.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from astraflow.protocols import Capacity
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_plan import policy_info
from astraflow.recipe.sources import OpenSources
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.environments import Environments
from astraflow.rollout.renderer import load_renderer, load_tokenizer
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import GenerateRequest, Generation, Task
from astraflow.workflows.factory import make_workflow

__all__ = ["Asked", "first_prompts"]

_NUM_TASKS = 2
_MAX_REQUESTS = 24
"""Requests after which an episode has shown enough, e.g. of an environment with many turns."""
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Asked:
    """A request that a policy got."""

    policy: str
    text: str
    """The prompt, as the chat template renders it."""
    num_tokens: int
    """Of the prompt."""
    max_tokens: int
    opens_thought: bool
    """Whether the prompt ends within the model's reasoning."""


@dataclass
class _OneWordEngine:
    """Answers every request with one word, and records it."""

    tokenizer: Any
    word: tuple[int, ...]
    max_context: int
    asked: list[GenerateRequest] = field(default_factory=list[GenerateRequest])

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked.append(request)
        if len(self.asked) >= _MAX_REQUESTS:
            raise _SeenEnoughError
        size = len(self.word)
        return Generation(
            token_ids=self.word, logprobs=(-1.0,) * size, versions=(0,) * size, finish_reason="stop"
        )

    def capacity(self) -> Capacity:
        return Capacity(1, 0, 0, self.max_context, 0)


class _SeenEnoughError(Exception):
    pass


async def first_prompts(recipe: Recipe, sources: OpenSources) -> list[Asked]:
    """Plays the first tasks of each training source, and returns what the policies were asked."""
    engines: dict[str, _OneWordEngine] = {}
    hosted: dict[str, HostedPolicy] = {}
    for name, policy in recipe.policies.items():
        tokenizer = load_tokenizer(policy.model_dir)
        word = (*tokenizer.encode("yes", add_special_tokens=False), tokenizer.eos_token_id)
        context: Any = recipe.rollout.engine
        engine: Any = _OneWordEngine(tokenizer, word, context.context)
        renderer = load_renderer(policy.model_dir, policy.template_args, choice=policy.renderer)
        engines[name] = engine
        hosted[name] = HostedPolicy(policy_info(name, policy), engine, renderer)
    environments = Environments(recipe.tasks.environments)
    await environments.open()
    try:
        runner = EpisodeRunner(hosted, make_workflow(recipe.workflow), _score, environments=environments)
        async with runner:
            for source in sources.train.values():
                for idx in range(min(_NUM_TASKS, len(source))):
                    with suppress(_SeenEnoughError):
                        async with asyncio.timeout(_LIMIT_S):
                            await runner.episode(source.task(idx), seed=idx)
    finally:
        await environments.close()
    return [
        _asked(name, request, engine, hosted[name])
        for name, engine in engines.items()
        for request in engine.asked
    ]


async def _score(task: Task, text: str) -> float:
    del task, text
    return 0.0


def _asked(name: str, request: GenerateRequest, engine: _OneWordEngine, hosted: HostedPolicy) -> Asked:
    text = engine.tokenizer.decode(list(request.token_ids), skip_special_tokens=False)
    return Asked(
        name,
        text,
        len(request.token_ids),
        request.sampling.max_tokens,
        bool(hosted.read(request.token_ids, ())[0]),
    )
