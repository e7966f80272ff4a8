"""Runs episodes of a recipe in this process, without services, for `try`, `doctor` and `eval`."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_plan import eval_rules, policy_info
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.environments import Environments
from astraflow.rollout.evaluation import Evaluation
from astraflow.rollout.renderer import policy_renderer
from astraflow.rollout.runner import EpisodeRunner
from astraflow.rollout.scoring import ScoringPool
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.weights.snapshot import read_model
from astraflow.workflows.factory import make_workflow

__all__ = ["host_models", "open_runner", "starting_weights"]


def starting_weights(recipe: Recipe) -> dict[str, WeightSnapshot]:
    """Reads each policy's model as version 0. Blocks. Raises: DataError."""
    return {
        name: WeightSnapshot(name, 0, read_model(policy.model_dir), policy.model_dir)
        for name, policy in recipe.policies.items()
    }


@asynccontextmanager
async def host_models(
    recipe: Recipe, snapshots: Mapping[str, WeightSnapshot], *, date: str = ""
) -> AsyncGenerator[Mapping[str, HostedPolicy]]:
    """Makes the recipe's engine for each snapshot; closes the engines at the end.

    `date`: what chat templates print as today's date; empty: today.
    """
    from astraflow.rollout.engines.factory import engine_maker  # heavy: imports the engine's libraries

    make_engine = engine_maker(recipe.rollout.engine, exact=recipe.exact)
    async with AsyncExitStack() as stack:
        hosted: dict[str, HostedPolicy] = {}
        for name, snapshot in snapshots.items():
            engine = make_engine(snapshot)
            stack.push_async_callback(engine.close)
            info = msgspec.structs.replace(policy_info(name, recipe.policies[name]), date=date)
            renderer = policy_renderer(info, snapshot.model_dir)
            hosted[name] = HostedPolicy(info, engine, renderer, snapshot.model_dir)
        yield hosted


@asynccontextmanager
async def open_runner(
    recipe: Recipe,
    hosted: Mapping[str, HostedPolicy],
    *,
    num_scorers: int,
) -> AsyncGenerator[EpisodeRunner]:
    """Opens a runner of the recipe's workflow on hosted policies, with its environments and reward.

    Evaluation leases run with the settings of their evaluation set.
    """
    scoring = ScoringPool(recipe.tasks.without_curators, num_workers=num_scorers)
    environments = Environments(recipe.tasks.environments)
    evaluation = Evaluation(eval_rules(recipe), num_workers=num_scorers)
    evaluation.host(hosted)
    scoring.policies = hosted
    async with AsyncExitStack() as closing:  # if one of them fails, the others are still closed
        for part in (scoring, evaluation, environments):
            closing.push_async_callback(part.close)
        await environments.open()
        await scoring.start()
        await evaluation.start()
        async with EpisodeRunner(
            hosted,
            make_workflow(recipe.workflow),
            scoring.score,
            environments=environments,
            timeout_s=recipe.rollout.episode_timeout_s,
            evaluation=evaluation.overrides,
        ) as runner:
            yield runner
