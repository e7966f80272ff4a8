"""Evaluation afterwards: a recipe's evaluation sets on a run's version, a model folder or an endpoint.

One process, no services: engine, workflow, sampling and reward are the recipe's own, and each episode gets
the seed that the dataflow gives it while training. The same weights on the same engine therefore give the
same answers as the run's own evaluation of that version. Scores are never made up: an episode that fails for
good is counted, and left out.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from astraflow.algorithms.pass_at_k import Estimate, estimate, pass_estimates
from astraflow.dataflow.core.context import derived_seed
from astraflow.envs.sources import make_source
from astraflow.errors import ConfigError, DataError
from astraflow.launch.config import Recipe
from astraflow.metrics import reduce_metrics
from astraflow.protocols import TaskSource
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.environments import Environments
from astraflow.rollout.runner import EpisodeRunner
from astraflow.rollout.scoring import ScoringPool
from astraflow.types import Episode, Failure, Item, Lease, MetricItem
from astraflow.workflows.factory import make_workflow

__all__ = ["EvalReport", "EvalScore", "EvalSize", "evaluate"]


class EvalScore(Item, frozen=True, kw_only=True):
    """One evaluation set. Estimates are means over tasks with 95 % intervals."""

    eval_set: str
    num_tasks: int
    samples: int
    """Episodes a task that were asked for: the k of avg@k."""
    num_samples: int
    """Episodes that have a score."""
    num_failed: int
    """Episodes that failed for good; left out of all scores."""
    failures: dict[str, int]
    """Error class -> failed episodes."""
    pass_at_1: Estimate | None
    """Share of samples whose score is at least 1; None if no episode has a score."""
    avg_at_k: Estimate | None
    """Mean score over samples and tasks: what training reports as its held-out score."""
    pass_at_k: dict[int, Estimate]
    """k -> unbiased pass@k, for 1, 2, 4, ... and all samples."""
    generated_tokens: int
    seconds: float
    metrics: tuple[MetricItem, ...] = ()
    """The workflow's own and the runner's, over all episodes that have a score."""


class EvalReport(Item, frozen=True, kw_only=True):
    """What `astraflow eval` says: one object, with `--json` printed as it is."""

    target: str
    kind: str
    """`run`, `model` or `endpoint`."""
    recipe: str
    """Name of the recipe."""
    policy: str
    """The policy that the target stands for."""
    version: int
    """Of a run's weights; -1 for a model folder or an endpoint."""
    temperature: float
    sets: tuple[EvalScore, ...]


@dataclass(frozen=True, slots=True)
class EvalSize:
    """What differs from the recipe: sets to evaluate (none: all), samples a task and tasks (0: as there)."""

    sets: tuple[str, ...] = ()
    samples: int = 0
    tasks: int = 0


@dataclass(slots=True)
class _Round:
    """One set on its way."""

    eval_set: str
    source: TaskSource
    num_tasks: int
    samples: int
    scores: list[list[float]] = field(default_factory=list[list[float]])
    failures: Counter[str] = field(default_factory=Counter[str])
    metrics: list[tuple[MetricItem, ...]] = field(default_factory=list[tuple[MetricItem, ...]])
    num_done: int = 0


async def evaluate(
    recipe: Recipe,
    hosted: Mapping[str, HostedPolicy],
    size: EvalSize,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[EvalScore, ...]:
    """Runs the evaluation sets one after the other; does not close the engines.

    `progress` gets the set's name, its episodes done and all of them.
    Raises: ConfigError or DataError if a set or the reward cannot be had; RolloutError never: it is counted.
    """
    rounds = [_opened(recipe, name, size) for name in _chosen(recipe, size.sets)]
    scoring = ScoringPool(recipe.tasks.without_curators, num_workers=recipe.rollout.scorers)
    environments = Environments(recipe.tasks.environments)
    try:
        await environments.open()
        await scoring.start()
        async with EpisodeRunner(
            hosted,
            make_workflow(recipe.workflow),
            scoring.score,
            environments=environments,
            timeout_s=recipe.rollout.episode_timeout_s,
            eval_temperature=recipe.eval.temperature,
        ) as runner:
            return tuple([await _score(recipe, runner, hosted, round_, progress) for round_ in rounds])
    finally:
        await environments.close()
        await scoring.close()


def _chosen(recipe: Recipe, names: Sequence[str]) -> tuple[str, ...]:
    known = tuple(recipe.eval.sets)
    if not known:
        raise ConfigError(
            f"recipe {recipe.name!r} has no evaluation set; add one under eval.sets, or pass another --recipe"
        )
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--set {unknown[0]}: no such evaluation set (choices: {', '.join(known)})")
    return tuple(names) or known


def _opened(recipe: Recipe, name: str, size: EvalSize) -> _Round:
    config = recipe.eval.sets[name]
    try:
        source = make_source(config.source, name=name, environments=recipe.tasks.environments)
    except (ConfigError, DataError) as err:
        raise type(err)(f"eval.sets.{name}.source: {err}") from err
    num_tasks = size.tasks or config.num_tasks
    if num_tasks > len(source):
        raise ConfigError(
            f"eval.sets.{name}: {num_tasks} tasks are asked for, its source holds {len(source)}"
        )
    round_ = _Round(name, source, num_tasks, size.samples or config.samples)
    round_.scores = [[] for _ in range(num_tasks)]
    return round_


async def _score(
    recipe: Recipe,
    runner: EpisodeRunner,
    hosted: Mapping[str, HostedPolicy],
    round_: _Round,
    progress: Callable[[str, int, int], None] | None,
) -> EvalScore:
    """All episodes of one set, as many at once as a rollout service of the recipe runs."""
    began_s, tokens = time.perf_counter(), _generated(hosted)
    total = round_.num_tasks * round_.samples
    waiting = iter([divmod(idx, round_.samples) for idx in range(total)])

    async def work() -> None:
        for task_idx, sample in waiting:
            await _run_episode(recipe, runner, round_, task_idx, sample)
            round_.num_done += 1
            if progress is not None:
                progress(round_.eval_set, round_.num_done, total)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(total, recipe.rollout.max_episodes)):
            group.create_task(work())
    scored = [own for own in round_.scores if own]
    num_samples = sum(len(own) for own in scored)
    means = [sum(own) / len(own) for own in scored]
    passes = pass_estimates(scored, samples=round_.samples)
    return EvalScore(
        eval_set=round_.eval_set,
        num_tasks=round_.num_tasks,
        samples=round_.samples,
        num_samples=num_samples,
        num_failed=total - num_samples,
        failures=dict(round_.failures),
        pass_at_1=passes.get(1),
        avg_at_k=estimate(means, num_draws=num_samples) if means else None,
        pass_at_k=passes,
        generated_tokens=_generated(hosted) - tokens,
        seconds=round(time.perf_counter() - began_s, 3),
        metrics=reduce_metrics(round_.metrics),
    )


async def _run_episode(
    recipe: Recipe, runner: EpisodeRunner, round_: _Round, task_idx: int, sample: int
) -> None:
    """One episode with the retries that a run gives it."""
    lease = Lease(
        id=f"{round_.eval_set}/{task_idx}.{sample}",
        kind="eval",
        group_id=0,
        episode_idx=task_idx * round_.samples + sample,
        attempt=0,
        task=round_.source.task(task_idx),
        seed=derived_seed(recipe.seed, "eval", round_.eval_set, task_idx, sample),
        eval_set=round_.eval_set,
    )
    for attempt in range(1, recipe.dataflow.max_attempts + 1):
        outcome = (await runner.run(lease)).outcome
        match outcome:
            case Episode():
                round_.scores[task_idx].append(outcome.score)
                round_.metrics.append(outcome.metrics)
                return
            case Failure() if not outcome.is_retryable or attempt == recipe.dataflow.max_attempts:
                round_.failures[outcome.error_class] += 1
                return
            case Failure():
                continue


def _generated(hosted: Mapping[str, HostedPolicy]) -> int:
    return sum(policy.engine.capacity().generated_tokens for policy in hosted.values())
