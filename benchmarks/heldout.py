"""Measures the held-out accuracy of any weights of a recipe's model with the torch engine, as one judge for
all sides.

Example: `await Evaluator(load_recipe("recipes/quickstart.yaml"), "actor", num_tasks=512).score(snapshot)`.
"""

import asyncio
import dataclasses
import os
import statistics

import msgspec

from astraflow.errors import ConfigError
from astraflow.models.loading import export_tensors, load_causal_lm
from astraflow.recipe.recipe import Recipe
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.rollout.renderer import load_renderer
from astraflow.tasks.rewards import make_reward
from astraflow.tasks.sources import make_source
from astraflow.types import GenerateRequest, Message, Sampling
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["Evaluator"]


class Evaluator:
    """Measures the held-out accuracy of weights on the recipe's first evaluation set, using all cores.

    `samples` is the number of completions per task. `base` is version 0.
    Raises: ConfigError if the set has too few tasks.
    """

    def __init__(
        self, recipe: Recipe, policy: str, *, num_tasks: int, samples: int = 1, temperature: float = 1.0
    ) -> None:
        source = make_source(next(iter(recipe.eval.sets.values())).source)
        if len(source) < num_tasks:
            raise ConfigError(f"the evaluation set has {len(source)} tasks; {num_tasks} are needed")
        config = recipe.policies[policy]
        self._tasks = [source.task(idx) for idx in range(num_tasks) for _ in range(samples)]
        self._renderer = load_renderer(config.model_dir, config.template_args)
        self._reward = make_reward(recipe.tasks.without_curators)
        self._sampling = Sampling(max_tokens=config.sampling.max_tokens, temperature=temperature)
        self._prompts = [
            self._renderer.render((*task.context, Message(role="user", content=task.prompt)))
            for task in self._tasks
        ]
        tensors = export_tensors(load_causal_lm(config.model_dir))
        self.base = WeightSnapshot(policy, 0, tensors, config.model_dir)
        context = max(len(prompt) for prompt in self._prompts) + self._sampling.max_tokens
        engine = TorchEngineConfig(num_slots=256, max_context=context, num_threads=os.cpu_count() or 1)
        self._engine = TorchEngine(engine, self.base)
        self._num_loaded = 0

    async def score(self, snapshot: WeightSnapshot) -> float:
        """Returns the mean reward of the completions.

        Seeds depend only on version and task, so equal weights get equal scores on all sides.
        """
        self._num_loaded += 1  # the engine needs a distinct number for each set of weights
        await self._engine.load(dataclasses.replace(snapshot, version=self._num_loaded), slot="live")
        first_seed = snapshot.version * len(self._tasks)
        requests = [
            GenerateRequest(
                token_ids=prompt, sampling=msgspec.structs.replace(self._sampling, seed=first_seed + idx)
            )
            for idx, prompt in enumerate(self._prompts)
        ]
        generations = await asyncio.gather(*(self._engine.generate(request) for request in requests))
        texts = [self._renderer.parse(generation.token_ids).content for generation in generations]
        return statistics.fmean(map(self._reward, self._tasks, texts))

    async def close(self) -> None:
        """Ends the engine."""
        await self._engine.close()
