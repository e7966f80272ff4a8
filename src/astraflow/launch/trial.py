"""One episode in one process: engine, workflow and reward of a recipe without any service.

Environment and workflow authors live in it: nothing is written, a bug raises where it happens.
"""

from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import ConfigError
from astraflow.host_tensors import WeightSnapshot
from astraflow.launch.config import Recipe
from astraflow.launch.plan import policy_info
from astraflow.launch.preflight import check_recipe
from astraflow.launch.shown import shown
from astraflow.protocols import Engine, TaskSource
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.environments import Environments
from astraflow.rollout.renderer import load_renderer
from astraflow.rollout.runner import EpisodeRunner
from astraflow.rollout.scoring import ScoringPool
from astraflow.types import Episode, Task
from astraflow.weights.snapshot import read_model
from astraflow.workflows.factory import make_workflow

__all__ = ["Trial", "episode_text", "try_episode"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A task and the episode that was run on it."""

    task: Task
    episode: Episode


async def try_episode(recipe: Recipe, *, task: int = 0, source: str = "", seed: int = 0) -> Trial:
    """Runs the recipe's workflow once with the policies' starting weights.

    `source`: a task source or an evaluation set; empty for the first source. `task`: position in it.
    Raises: ConfigError or DataError for the recipe; whatever the workflow raises.
    """
    sources = check_recipe(recipe)
    chosen = _chosen({**sources.train, **sources.eval}, source, task)
    scoring = ScoringPool(recipe.tasks.without_curators, num_workers=1)
    environments = Environments(recipe.tasks.environments)
    hosted: dict[str, HostedPolicy] = {}
    try:
        await environments.open()
        await scoring.start()
        for name, policy in recipe.policies.items():
            engine = await _engine(recipe, name, policy.model_dir)
            renderer = load_renderer(policy.model_dir)
            hosted[name] = HostedPolicy(policy_info(name, policy), engine, renderer)
        async with EpisodeRunner(
            hosted,
            make_workflow(recipe.workflow),
            scoring.score,
            environments=environments,
            timeout_s=recipe.rollout.episode_timeout_s,
        ) as runner:
            return Trial(chosen, await runner.episode(chosen, seed=seed))
    finally:
        await environments.close()
        await scoring.close()
        for policy in hosted.values():
            await policy.engine.close()


def _chosen(sources: dict[str, TaskSource], name: str, idx: int) -> Task:
    name = name or next(iter(sources))
    if name not in sources:
        raise ConfigError(f"{name!r} is no task source or evaluation set (choices: {', '.join(sources)})")
    size = len(sources[name])
    if idx >= size:
        raise ConfigError(f"task {idx} does not exist: {name} has {size} tasks, 0 to {size - 1}")
    return sources[name].task(idx)


async def _engine(recipe: Recipe, policy: str, folder: Path) -> Engine:
    from astraflow.rollout.engines.factory import make_engine  # heavy: imports the engine's libraries

    snapshot = WeightSnapshot(policy, 0, read_model(folder), folder)
    engine = make_engine(recipe.rollout.engine, snapshot=snapshot)
    await engine.load(snapshot, slot="live")
    return engine


def episode_text(trial: Trial) -> str:
    """The episode as text: every message, and what each trajectory came to."""
    task, episode = trial.task, trial.episode
    lines = [f"task {shown(task.id)} (answer: {shown(task.answer) or 'not given'})"]
    for message in episode.messages:
        name = f" ({shown(message.name)})" if message.name else ""
        lines += [f"--- {shown(message.role)}{name}", shown(message.content, keeps_lines=True)]
    lines.append(f"=== score {episode.score:g} in {episode.duration_s:.2f} s")
    for trajectory in episode.trajectories:
        num_sampled = sum(span.length for span in trajectory.versions)
        lines.append(
            f"{trajectory.policy} ({trajectory.role}): reward {trajectory.reward:g}, {len(trajectory.turns)} "
            f"turns, {num_sampled} sampled of {len(trajectory.token_ids) // 4} tokens, "
            f"{trajectory.finish_reason}{', fork' if trajectory.is_fork else ''}"
        )
    return "\n".join(lines)
