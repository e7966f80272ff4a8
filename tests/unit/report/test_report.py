"""The summary of a run: what its table shows, and what it says without a journal."""

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from astraflow.errors import DataError
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder, RunRecord
from astraflow.report.report import load_summary, summary_table, write_report
from astraflow.report.summary import BestVersion, FailureShare, PolicySummary, Summary, WaitShare
from astraflow.types import FateCounts

POLICY = PolicySummary(
    name="actor", steps=7, num_steps=9, version=8, heldout_before={"math": 0.125},
    heldout_after={"math": 0.5}, reward_first=0.25, reward_last=0.75, staleness_mean=1.5,
    staleness_max=3, staleness_bound=4, generated_tokens=5000, committed_tokens=4000, redone_steps=0,
    fates=FateCounts(drawn=1040, trained=1028, failed=12),
    best=BestVersion(step=6, version=6, by="max math", value=0.625, folder="best"),
)  # fmt: skip
SUMMARY = Summary(
    name="demo", run_id="r", seed=0, state="finished", reason="all steps\nare done", heldout_before=0.125,
    heldout_after=0.5, heldout_tasks=64, wall_s=30.0, rl_wall_s=20.0, overlap_frac=0.375, staleness_mean=1.5,
    staleness_max=3, staleness_bound=4, generated_tokens=5000, committed_tokens=4000, gradient_tokens=1000,
    audit_ok=True, audit_problems=(), policies=(POLICY,),
    waits=(WaitShare(who="trainer actor", whom="rollout", total_s=5.0, frac=0.25),),
    failures=(FailureShare(what="RewardError: no\ndetails", num=12),), warnings=("look at this",),
)  # fmt: skip


def shown(summary: Summary) -> list[str]:
    """The rows of the table, their cells joined by a bar."""
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(summary_table(summary))
    lines = [line.strip(" │") for line in console.export_text().splitlines()]
    return ["|".join(part.strip() for part in line.split("│")) for line in lines]


def test_the_table_shows_the_figures_of_a_run_and_its_policies() -> None:
    assert {
        "reason|all steps",
        "actor: held-out math|0.125 -> 0.500",
        "actor: best|0.625 (max math) at step 6",
        "actor: reward|0.250 -> 0.750",
        "actor: steps|7 of 9, version 8",
        "actor: groups|1,040 drawn: 1,028 trained, 12 failed",
        "actor: staleness|mean 1.50, max 3, bound 4",
        "wall time|30.0 s, of which 20.0 s of RL",
        "generated|5,000 tokens, 250 per second",
        "committed|4,000 tokens, 200 per second",
        "of which with a gradient|1,000 tokens, 25%",
        "generation and training overlap|38% of the RL time",
        "waiting|trainer actor for rollout: 5.0 s (25%)",
        "failed attempts|12 times, e.g. RewardError: no",
        "warning|look at this",
        "audit|holds",
    } <= set(shown(SUMMARY))


def test_the_table_of_a_run_without_steps_says_what_is_missing() -> None:
    policy = msgspec.structs.replace(POLICY, steps=0, heldout_before={}, best=None, fates=FateCounts())
    rows = shown(
        msgspec.structs.replace(
            SUMMARY, reason="", policies=(policy,), rl_wall_s=0.0, gradient_tokens=None, audit_ok=False,
            audit_problems=("one", "two"), time_scale=60.0,
        )
    )  # fmt: skip
    assert {
        "actor: reward|-",
        "actor: groups|0 drawn",
        "generated|5,000 tokens",
        "of which with a gradient|not reported by every trainer",
        "audit|one; two",
        "EMULATED|the models are not real; 60 emulated seconds pass per second",
    } <= set(rows)
    assert not any(row.startswith(("reason", "actor: held-out", "actor: best")) for row in rows)


def make_recipe(**changes: Any) -> Recipe:
    fields = {
        "name": "demo",
        "seed": 5,
        "tasks": {"sources": {"train": {"name": "jsonl", "path": "tasks.jsonl"}}},
        "policies": {"actor": {"model": "models/a", "train": {"steps": 3}}},
    }
    return Recipe.model_validate_json(json.dumps(fields | changes))


@pytest.mark.parametrize(("num_sets", "heldout_tasks"), [(0, 0), (1, 24)])
def test_a_run_that_ended_before_its_journal_has_a_summary_that_says_so(
    tmp_path: Path, num_sets: int, heldout_tasks: int
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    record = RunRecord(
        name="demo", url="", state="failed", launcher_pid=0, at_s=9.0, reason="the port is taken",
        active=((3.0, 9.0),), services=(), alarms=(), pool="",
    )  # fmt: skip
    folder.save_record(record)
    held = {"source": {"name": "jsonl", "path": "held.jsonl"}, "num_tasks": 24}
    recipe = make_recipe(eval={"sets": {"held": held}} if num_sets else {})
    summary = write_report(folder, recipe)
    assert (summary.state, summary.reason, summary.seed) == ("failed", "the port is taken", 5)
    assert (summary.wall_s, summary.rl_wall_s, summary.heldout_tasks) == (6.0, 0.0, heldout_tasks)
    assert (summary.audit_ok, summary.policies, summary.heldout_before) == (False, (), None)
    assert summary.audit_problems[0].startswith("the run recorded nothing")
    assert load_summary(folder) == summary
    folder.summary.write_text("{}")
    with pytest.raises(DataError, match="delete it, and it is rebuilt from the journal"):
        load_summary(folder)
