"""What a finished run leaves for people, from a real journal."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from astraflow.launch.config import Recipe
from astraflow.launch.folder import RunFolder, RunRecord
from astraflow.launch.report import draw_curve, load_summary, summary_table, write_report
from astraflow.types import EvalRecord
from dataflow_driver import make_plan, play, running


@pytest.fixture
async def folder(tmp_path: Path) -> RunFolder:
    """A finished run of scripted services, evaluated before and after."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    plan = make_plan(policies=("solver", "verifier"), num_steps=3, eval_tasks=3)
    async with running(folder.journal, plan) as run:
        await play(run, policies=("solver", "verifier"))
    folder.save_record(RunRecord(name="demo", state="finished", active=((0.0, 1e12),)))
    return folder


def make_recipe() -> Recipe:
    source = {"name": "jsonl", "path": "tasks.jsonl"}
    policy = {"model": "models/a", "train": {"steps": 3}}
    fields = {
        "name": "demo",
        "seed": 4,
        "tasks": {"sources": {"train": source}},
        "policies": {"solver": policy, "verifier": policy},
        "eval": {"sets": {"heldout": {"source": source, "num_tasks": 3}}},
    }
    return Recipe.model_validate_json(json.dumps(fields))


async def test_the_summary_holds_what_the_journal_says(folder: RunFolder) -> None:
    summary = write_report(folder, make_recipe())
    assert load_summary(folder) == summary
    assert (summary.name, summary.seed, summary.state, summary.heldout_tasks) == ("demo", 4, "finished", 3)
    assert summary.audit_ok
    assert [(p.name, p.steps, p.num_steps, p.version) for p in summary.policies] == [
        ("solver", 3, 3, 3),
        ("verifier", 3, 3, 3),
    ]
    assert summary.heldout_before is not None
    assert summary.staleness_max <= summary.staleness_bound
    assert summary.generated_tokens >= summary.trained_tokens > 0
    assert 0 < summary.rl_wall_s < 60


async def test_a_run_that_has_just_ended_has_its_summary_before_it_is_written(folder: RunFolder) -> None:
    folder.save_recipe(make_recipe())
    early = load_summary(folder)
    assert not folder.summary.exists()
    assert early == write_report(folder, make_recipe())


async def test_the_table_shows_scores_tokens_and_the_audit(folder: RunFolder) -> None:
    console = Console(width=120, color_system=None)
    with console.capture() as shown:
        console.print(summary_table(write_report(folder, make_recipe())))
    for part in ("solver: held-out", "verifier: reward", "3 of 3, version 3", "wall time", "audit", "holds"):
        assert part in shown.get()


async def test_episodes_before_and_after_are_of_the_same_tasks(folder: RunFolder) -> None:
    write_report(folder, make_recipe())
    before, _, after = (folder.samples / "episodes.md").read_text().partition("# After")
    tasks = [
        [line.split(",")[0] for line in part.splitlines() if line.startswith("## ")]
        for part in (before, after)
    ]
    assert len(tasks[0]) == 3
    assert tasks[0] == tasks[1]
    assert "version 0" in before
    assert "version 3" in after


async def test_a_learning_curve_is_drawn(folder: RunFolder) -> None:
    write_report(folder, make_recipe())
    assert folder.curve.read_bytes().startswith(b"\x89PNG")


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert not draw_curve(tmp_path / "curve.png", [], [])
    assert list(tmp_path.iterdir()) == []


def test_a_curve_of_evaluations_alone_is_drawn(tmp_path: Path) -> None:
    record = EvalRecord(
        policy="a", version=0, step=0, eval_set="h", num_tasks=1, num_samples=1, num_failed=0,
        score_mean=0.5, score_stderr=0.1, at_s=1.0,
    )  # fmt: skip
    assert draw_curve(tmp_path / "curve.png", [], [record])
