"""What a finished run leaves for people, from a real journal."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from astraflow.addons.plot.curve import draw_curve, plot_curve
from astraflow.dataflow.audit import audit
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder, RunRecord
from astraflow.report.report import load_summary, summary_table, write_report
from astraflow.report.summary import FailureShare, Summary
from astraflow.types import EpisodeResult, EvalRecord, Failure, MetricItem
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, make_plan, play_run, running


@pytest.fixture
async def folder(tmp_path: Path) -> RunFolder:
    """A finished run of scripted services, evaluated before and after."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    plan = make_plan(policies=("solver", "verifier"), num_steps=3, eval_tasks=3)
    async with running(folder.journal, plan) as run:
        await play_run(run, policies=("solver", "verifier"))
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


def one_policy() -> Recipe:
    """A recipe for the runs of this page that have the policy `actor` alone."""
    recipe = make_recipe()
    return recipe.model_copy(update={"policies": {"actor": recipe.policies["solver"]}})


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
    assert summary.generated_tokens >= summary.committed_tokens > 0
    assert 0 < summary.rl_wall_s < 60


async def test_tokens_with_a_gradient_are_told_from_those_that_were_committed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    async with running(folder.journal, make_plan(num_steps=2)) as run:
        await play_run(run, metrics=(MetricItem("num_gradient_tokens", 3.0, "sum"),))
    folder.save_record(RunRecord(name="demo", state="finished", active=((0.0, 1e12),)))
    summary = write_report(folder, one_policy())
    assert summary.gradient_tokens == summary.policies[0].gradient_tokens == 6
    assert summary.committed_tokens > 6
    console = Console(width=120, record=True)
    console.print(summary_table(summary), audit(folder.journal).table())
    text = console.export_text()
    assert f"6 tokens, {6 / summary.committed_tokens:.0%}" in text
    assert "of which with a gradient" in text
    assert "tokens committed" in text


async def test_a_stopped_run_has_a_summary_with_the_reason_and_a_curve(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    async with running(folder.journal, make_plan(num_steps=9)) as run:
        worker = ScriptedWorker(run.client)
        trainer = ScriptedTrainer(run.client)
        await trainer.attach()
        await worker.register()
        await worker.send(*[await worker.answer(lease) for lease in await worker.lease()])
        await trainer.train_step(0)
    folder.save_record(RunRecord(name="demo", state="stopped", reason="it was interrupted"))
    summary = write_report(folder, one_policy())
    assert (summary.state, summary.reason) == ("stopped", "it was interrupted")
    assert [policy.steps for policy in summary.policies] == [1]
    assert folder.curve.read_bytes().startswith(b"\x89PNG")
    assert "it was interrupted" in shown(summary)


async def test_failed_groups_and_their_cause_are_in_the_table(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    async with running(folder.journal, make_plan(num_steps=9, max_attempts=1)) as run:
        trainer = ScriptedTrainer(run.client)
        await trainer.attach()
        worker = ScriptedWorker(run.client)
        await worker.register()
        (lease,) = await worker.lease(1)
        failure = Failure(
            error_class="RolloutError",
            message=f"task {lease.task.id}: the reward returned nan; expected a finite number",
            is_retryable=False,
        )
        await worker.send(EpisodeResult(lease_id=lease.id, outcome=failure))
    folder.save_record(RunRecord(name="demo", state="stopped", reason="it was interrupted"))
    summary = write_report(folder, one_policy())
    assert summary.failures == (FailureShare(what=f"RolloutError: {failure.message}", num=1),)
    assert summary.warnings == ("actor: 1 of 1 groups failed",)
    for part in ("1 drawn: 1 failed", "1 times, e.g. RolloutError: task "):
        assert part in shown(summary)
    assert "per second" not in shown(summary), "there is no rate without a second of training"
    assert "0.000 -> 0.000" not in shown(summary), "there is no reward without a step"


async def test_a_run_that_has_just_ended_has_its_summary_before_it_is_written(folder: RunFolder) -> None:
    folder.save_recipe(make_recipe())
    early = load_summary(folder)
    assert not folder.summary.exists()
    assert early == write_report(folder, make_recipe())


def shown(summary: Summary) -> str:
    """The table as a person sees it."""
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(summary_table(summary))
    return captured.get()


async def test_the_table_shows_scores_tokens_and_the_audit(folder: RunFolder) -> None:
    text = shown(write_report(folder, make_recipe()))
    for part in ("solver: held-out", "verifier: reward", "3 of 3, version 3", "wall time", "audit", "holds"):
        assert part in text


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
    assert "**assistant (solver)**: " in before


async def test_a_learning_curve_is_drawn(folder: RunFolder) -> None:
    write_report(folder, make_recipe())
    assert folder.curve.read_bytes().startswith(b"\x89PNG")


async def test_the_curve_shows_rewards_and_scores_over_steps_and_over_seconds(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    async with running(tmp_path, make_plan(policies=("solver", "verifier"), num_steps=3)) as run:
        await play_run(run, policies=("solver", "verifier"))
    with JournalReader(tmp_path) as journal:
        steps = journal.steps()
    start_s = min(record.at_s for record in steps)
    scores = [(0, start_s, 0.25, 0.1), (3, start_s + 8.0, 0.75, 0.1), (4, start_s + 9.0, None, None)]
    evals = [
        EvalRecord(
            policy="solver", version=step, step=step, eval_set="h", num_tasks=1, num_samples=1, num_failed=0,
            score_mean=mean, score_stderr=error, at_s=at_s,
        )
        for step, at_s, mean, error in scores
    ]  # fmt: skip
    plot_curve(figure, steps, evals)
    for axis, over in zip(figure.axes, ("step", "seconds"), strict=True):
        assert axis.get_xlabel() == over
        _, labels = axis.get_legend_handles_labels()
        assert labels == ["solver: training reward", "verifier: training reward", "solver: held-out h"]
        drawn = {
            tuple(line.get_xdata()): tuple(line.get_ydata())
            for line in axis.get_lines()
            if line.get_linestyle() == "-"
        }
        for policy in ("solver", "verifier"):
            own = [record for record in steps if record.policy == policy]
            xs = [each.number if over == "step" else each.at_s - start_s for each in own]
            assert drawn[tuple(xs)] == tuple(each.reward_mean for each in own)
        assert drawn[(0, 3) if over == "step" else (0.0, 8.0)] == (0.25, 0.75)
        (bars,) = axis.collections
        assert [bar[:, 1].tolist() for bar in bars.get_segments()] == [
            pytest.approx([0.05, 0.45]), pytest.approx([0.55, 0.95])
        ]  # fmt: skip
    assert figure.axes[0].get_ylabel() == "score"
    assert figure.axes[0].get_legend() is not None


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert not draw_curve(tmp_path / "curve.png", [], [])
    assert list(tmp_path.iterdir()) == []


def test_a_curve_of_evaluations_alone_is_drawn(tmp_path: Path) -> None:
    record = EvalRecord(
        policy="a", version=0, step=0, eval_set="h", num_tasks=1, num_samples=1, num_failed=0,
        score_mean=0.5, score_stderr=0.1, at_s=1.0,
    )  # fmt: skip
    assert draw_curve(tmp_path / "curve.png", [], [record])
