"""Evaluates a version of a run, a model folder, or an endpoint on a recipe's evaluation sets after training.

The evaluation runs in one process, without services. It uses the recipe's engine, workflow, sampling, and
reward, and gives each episode the seed that it gets from the dataflow during training. The same weights on
the same engine therefore give the same answers as the evaluation of that version during the run. An episode
that fails permanently doesn't have a score: it is counted and left out. If one took too long, the set has no
estimates at all, because its longest answers are missing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from astraflow.addons.evaluation.reduction import reduce_metrics
from astraflow.addons.one_process.hosting import open_runner
from astraflow.algorithms.pass_at_k import Estimate, estimate, pass_estimates
from astraflow.dataflow.core.context import derive_seed
from astraflow.errors import ConfigError
from astraflow.protocols import TaskSource
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.sources import open_source, workflow_of
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.rollout.waiting import run_unless
from astraflow.types import Episode, Failure, Item, Lease, MetricItem
from astraflow.user_input.mistakes import hint

_LATE = "DeadlineError"
"""Error class of an episode that took longer than `rollout.episode_timeout_s`."""

__all__ = ["EvalReport", "EvalScore", "EvalSize", "chosen_sets", "evaluate", "evaluation_table"]


class EvalScore(Item, frozen=True, kw_only=True):
    """The result for one evaluation set. Estimates are means over tasks with 95 % intervals."""

    eval_set: str
    num_tasks: int
    samples: int
    """Requested episodes per task: the k of avg@k."""
    temperature: float
    num_samples: int
    """Episodes that have a score."""
    num_failed: int
    """Episodes that failed permanently and are left out of all scores."""
    failures: dict[str, int]
    """Error class -> failed episodes."""
    pass_at_1: Estimate | None
    """Share of samples with a score of at least 1; None if no episode has a score, or one took too long."""
    avg_at_k: Estimate | None
    """Mean score over samples and tasks, which training reports as its held-out score."""
    pass_at_k: dict[int, Estimate]
    """k -> unbiased pass@k, for 1, 2, 4, ... and all samples."""
    generated_tokens: int
    seconds: float
    metrics: tuple[MetricItem, ...] = ()
    """Metrics of the workflow and the runner over all episodes that have a score."""


class EvalReport(Item, frozen=True, kw_only=True):
    """The result of `astraflow eval`, which `--json` prints as one object."""

    target: str
    kind: str
    """`run`, `model`, or `endpoint`."""
    recipe: str
    """Name of the recipe."""
    policy: str
    """The policy that the target replaces."""
    version: int
    """Version of a run's weights; -1 for a model folder or an endpoint."""
    temperature: float
    """Temperature of the sets that don't specify their own."""
    sets: tuple[EvalScore, ...]


@dataclass(frozen=True, slots=True)
class EvalSize:
    """The size of an evaluation: its sets (none means all), samples per task, and tasks (0 means as in the
    recipe)."""

    sets: tuple[str, ...] = ()
    samples: int = 0
    tasks: int = 0


@dataclass(slots=True)
class _Round:
    """One evaluation set while it is being evaluated."""

    eval_set: str
    source: TaskSource
    num_tasks: int
    samples: int
    scores: list[list[float]] = field(default_factory=list[list[float]])
    """For each task, the scores of the episodes that didn't fail."""
    failures: Counter[str] = field(default_factory=Counter[str])
    metrics: list[tuple[MetricItem, ...]] = field(default_factory=list[tuple[MetricItem, ...]])
    num_done: int = 0


async def evaluate(
    recipe: Recipe,
    hosted: Mapping[str, HostedPolicy],
    size: EvalSize,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    stop: asyncio.Event | None = None,
) -> tuple[EvalScore, ...]:
    """Runs the evaluation sets one after the other. Doesn't close the engines.

    `progress` gets the name of the set, the number of its finished episodes, and the number of all its
    episodes. Failed episodes are counted. If `stop` is set, the set that is being evaluated is abandoned, and
    the scores of the finished sets are returned.
    Raises: ConfigError or DataError if a set or the reward cannot be loaded.
    """
    stop = stop or asyncio.Event()
    rounds = [_opened(recipe, name, size) for name in chosen_sets(recipe, size)]
    finished: list[EvalScore] = []
    async with open_runner(recipe, hosted, num_scorers=recipe.rollout.scorers) as runner:
        for round_ in rounds:
            score = await run_unless(_score(recipe, runner, hosted, round_, progress), stop)
            if score is None:
                break
            finished.append(score)
    return tuple(finished)


def chosen_sets(recipe: Recipe, size: EvalSize) -> tuple[str, ...]:
    """Returns the names of the sets to evaluate. Raises: ConfigError if the recipe doesn't have one."""
    names = size.sets
    known = tuple(recipe.eval.sets)
    if not known:
        raise ConfigError(
            f"recipe {recipe.name!r} has no evaluation set; add one under eval.sets, or pass another --recipe"
        )
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--set {unknown[0]}: no such evaluation set{hint(unknown[0], known)}")
    return names or known


def _opened(recipe: Recipe, name: str, size: EvalSize) -> _Round:
    config = recipe.eval.sets[name]
    source = open_source(config.source, recipe, name, f"eval.sets.{name}.source", workflow_of(config, recipe))
    num_tasks = size.tasks or config.num_tasks
    if num_tasks > len(source):
        raise ConfigError(
            f"eval.sets.{name}: {num_tasks} tasks are requested, but its source holds {len(source)}"
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
    """Runs all episodes of one set, as many in parallel as a rollout service of the recipe runs."""
    began_s = time.perf_counter()
    tokens = _generated(hosted)
    total = round_.num_tasks * round_.samples
    # The tasks below share this iterator, so each episode runs once.
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
    scored = [scores for scores in round_.scores if scores]
    num_samples = sum(len(scores) for scores in scored)
    means = [sum(scores) / len(scores) for scores in scored]
    is_whole = not round_.failures[_LATE]
    passes = pass_estimates(scored, samples=round_.samples) if is_whole else {}
    return EvalScore(
        eval_set=round_.eval_set,
        num_tasks=round_.num_tasks,
        samples=round_.samples,
        temperature=recipe.eval.sampling_of(round_.eval_set)["temperature"],
        num_samples=num_samples,
        num_failed=total - num_samples,
        failures=dict(round_.failures),
        pass_at_1=passes.get(1),
        avg_at_k=estimate(means, num_draws=num_samples) if means and is_whole else None,
        pass_at_k=passes,
        generated_tokens=_generated(hosted) - tokens,
        seconds=round(time.perf_counter() - began_s, 3),
        metrics=reduce_metrics(round_.metrics),
    )


async def _run_episode(
    recipe: Recipe, runner: EpisodeRunner, round_: _Round, task_idx: int, sample: int
) -> None:
    """Runs one episode, with as many attempts as during training."""
    lease = Lease(
        id=f"{round_.eval_set}/{task_idx}.{sample}",
        kind="eval",
        group_id=0,
        episode_idx=task_idx * round_.samples + sample,
        attempt=0,
        task=round_.source.task(task_idx),
        seed=derive_seed(recipe.seed, "eval", round_.eval_set, task_idx, sample),
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


# --- as a table ------------------------------------------------------------------------------------


def evaluation_table(report: EvalReport) -> RenderableType:
    """Makes a table for terminals of 80 columns, with a section per set and a row per measure.

    Below the table, it says why episodes failed.
    """
    version = f" version {report.version}" if report.version >= 0 else ""
    title = f"{report.target}: {report.policy}{version}, temperature {report.temperature:g}"
    table = Table("set", "measure", "value", "95 % interval", "from")
    for score in report.sets:
        table.add_section()
        for idx, row in enumerate(_rows(score, report.temperature)):
            table.add_row(score.eval_set if idx == 0 else "", *row)
    failures = [Text(_failures(score), "red") for score in report.sets if score.num_failed]
    return Group(Text(title), table, *failures)


def _rows(score: EvalScore, default: float) -> list[tuple[str, str, str, str]]:
    """Makes the rows of one set. `default`: the temperature that is not mentioned in the rows."""
    measures: dict[str, Estimate | None] = {"pass@1": score.pass_at_1}
    measures[f"avg@{score.samples}"] = score.avg_at_k
    measures |= {f"pass@{k}": value for k, value in score.pass_at_k.items() if k > 1}
    sources = [
        f"{score.num_tasks} tasks x {score.samples}",
        f"{score.generated_tokens:,} tokens in {score.seconds:.1f} s",
    ]
    if score.temperature != default:
        sources[0] += f" at {score.temperature:g}"
    sources += [""] * len(measures)  # only the first rows say where the values come from
    return [
        (name, f"{value.mean:.4f}", f"{value.low:.4f} - {value.high:.4f}", source)
        if value
        else (name, "-", "incomplete" if score.failures.get(_LATE) else "no episode has a score", source)
        for (name, value), source in zip(measures.items(), sources, strict=False)
    ]


def _failures(score: EvalScore) -> str:
    causes = ", ".join(f"{name} {count}" for name, count in sorted(score.failures.items()))
    text = f"{score.eval_set}: {score.num_failed} episodes failed and are left out of all scores: {causes}"
    if late := score.failures.get(_LATE):
        text += (
            f". {late} of them took longer than rollout.episode_timeout_s, so the longest answers are "
            "missing, and the set is incomplete: raise it"
        )
    return text
