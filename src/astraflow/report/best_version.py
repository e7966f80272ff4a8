"""The best version of each policy, as summaries show it: which one it is, and where its model folder is."""

from collections.abc import Sequence
from pathlib import Path

from astraflow.recipe.eval_config import BestConfig
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.run_plan import best_plan
from astraflow.report.summary import BestVersion
from astraflow.types import EvalRecord

__all__ = ["BEST_PREFIX", "best_version", "folder_of", "is_best"]

BEST_PREFIX = "best-step-"
"""Prefix of the names of these folders."""


def best_version(folder: RunFolder, recipe: Recipe, evals: Sequence[EvalRecord]) -> BestVersion | None:
    """The best version among the evaluations of one policy; None if the recipe keeps none."""
    marked = [record for record in evals if is_best(record, recipe.eval.best)]
    if not marked:
        return None
    record = marked[-1]
    path = folder_of(folder, record)
    figure = recipe.eval.best.figure
    return BestVersion(
        step=record.step,
        version=record.version,
        by=record.best_by,
        value=next((item.value for item in record.metrics if item.name == figure), record.score_mean or 0.0),
        folder=str(path.relative_to(folder.path)) if path.is_dir() else "",
    )


def is_best(record: EvalRecord, rule: BestConfig) -> bool:
    """Whether the current rule marked this record; an earlier start of the run may have used another rule."""
    plan = best_plan(rule)
    return plan is not None and record.best_by == plan.text


def folder_of(folder: RunFolder, record: EvalRecord) -> Path:
    """The model folder of a version that an evaluation marked as the best so far."""
    name = f"{BEST_PREFIX}{record.step:08d}-version-{record.version}"
    return folder.checkpoints / record.policy / name
