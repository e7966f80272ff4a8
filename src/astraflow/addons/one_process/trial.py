"""`astraflow try`: runs one episode of a recipe in one process, without services.

This is for authors of environments and workflows. Nothing is written, and a bug raises where it occurs.
"""

from dataclasses import dataclass

from astraflow.addons.one_process.hosting import host_models, open_runner, starting_weights
from astraflow.errors import ConfigError
from astraflow.protocols import TaskSource
from astraflow.recipe.recipe import Recipe
from astraflow.report.terminal_text import printable, speaker_of
from astraflow.run.preflight import check_recipe
from astraflow.types import Episode, Task
from astraflow.user_input.mistakes import hint

__all__ = ["Trial", "episode_text", "try_episode"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A task and an episode that ran on it."""

    task: Task
    episode: Episode


async def try_episode(recipe: Recipe, *, task: int = 0, source: str = "", seed: int = 0) -> Trial:
    """Runs the recipe's workflow once with the policies' starting weights.

    `source` is a task source or an evaluation set; empty means the first source. `task` is the position in
    it.

    Raises: ConfigError or DataError for the recipe; any error of the workflow.
    """
    checked = check_recipe(recipe)
    recipe = checked.recipe
    sources = checked.sources
    chosen = _find_task({**sources.train, **sources.eval}, source, task)
    async with (
        host_models(recipe, starting_weights(recipe)) as hosted,
        open_runner(recipe, hosted, num_scorers=1) as runner,
    ):
        return Trial(chosen, await runner.episode(chosen, seed=seed))


def _find_task(sources: dict[str, TaskSource], name: str, idx: int) -> Task:
    name = name or next(iter(sources))
    if name not in sources:
        raise ConfigError(f"{name!r} is not a task source or evaluation set{hint(name, list(sources))}")
    size = len(sources[name])
    if idx >= size:
        raise ConfigError(f"task {idx} does not exist: {name} has {size} tasks, 0 to {size - 1}")
    return sources[name].task(idx)


def episode_text(trial: Trial) -> str:
    """Returns the episode as text: every message, then a line per trajectory."""
    task = trial.task
    episode = trial.episode
    lines = [f"task {printable(task.id)} (answer: {printable(task.answer) or 'not given'})"]
    for message in episode.messages:
        lines += [f"--- {speaker_of(message)}", printable(message.content, keeps_lines=True)]
    lines.append(f"=== score {episode.score:g} in {episode.duration_s:.2f} s")
    parts = [item for item in episode.metrics if item.name.startswith("reward/")]
    if parts:
        lines.append(", ".join(f"{printable(item.name)} {item.value:g}" for item in parts))
    for trajectory in episode.trajectories:
        num_sampled = sum(span.length for span in trajectory.versions)
        num_tokens = len(trajectory.token_ids) // 4  # ids are 4 bytes each
        lines.append(
            f"{trajectory.policy} ({trajectory.role}): reward {trajectory.reward:g}, {len(trajectory.turns)} "
            f"turns, {num_sampled} sampled of {num_tokens} tokens, "
            f"{trajectory.finish_reason}{', fork' if trajectory.is_fork else ''}"
        )
    return "\n".join(lines)
