"""Runs as data frames, and the notebooks in examples/ that use them."""

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import astraflow
from astraflow.errors import ConfigError, DataError
from drivers.experiment_folders import Experiment
from drivers.view_runs import RunWriter

NOTEBOOKS = Path(__file__).resolve().parents[4] / "examples" / "notebooks"


@pytest.fixture
def runs_folder(tmp_path: Path) -> Path:
    """A sweep of 2 x 2 runs, and a run with episodes."""
    (tmp_path / "runs" / "sums-sweep").mkdir(parents=True)
    sweep = Experiment(tmp_path / "runs" / "sums-sweep")
    for lr in ("0.001", "0.01"):
        for seed in range(2):
            own = (f"train.lr={lr}", f"seed={seed}")
            sweep.run(f"lr={lr}_seed={seed}", [0.1, 0.5 + seed / 10], overrides=own)
    own = Experiment(tmp_path / "runs" / "own")
    run = own.run("sums", [0.1, 0.9])
    shutil.rmtree(run / "journal")
    shutil.move(run, tmp_path / "runs" / "sums")
    writer = RunWriter(tmp_path / "runs" / "sums")
    writer.group(0, [0.0, 0.25])
    writer.group(1, [1.0, 1.0], version=1)
    writer.close()
    return tmp_path / "runs"


def test_metrics_and_recipes_of_a_sweep_join_by_run(runs_folder: Path) -> None:
    runs = astraflow.runs.load(runs_folder / "sums-sweep")
    metrics = runs.metrics()
    assert len(metrics) == 4 * (2 + 2)
    joined = metrics.merge(runs.recipes(), on="run", suffixes=("", "_of_run"))
    last = joined.query("kind == 'eval' and step == 1").groupby("policies.actor.train.lr").score_mean.mean()
    assert dict(last) == {"0.001": pytest.approx(0.55), "0.01": pytest.approx(0.55)}


def test_episodes_have_their_rewards_and_pass_filters(runs_folder: Path) -> None:
    runs = astraflow.runs.load(str(runs_folder / "su*s"))
    assert sorted(runs.episodes().reward) == [0.0, 0.25, 1.0, 1.0]
    assert list(runs.episodes(reward="0..0.5").run) == ["sums", "sums"]
    with pytest.raises(ConfigError):
        runs.episodes(reward="many")


def test_the_example_answers_questions_about_runs(
    runs_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_module("examples.08_reading_a_run").main(*map(str, sorted(runs_folder.glob("su*s"))))
    scores, steps, tasks = capsys.readouterr().out.split("\n\n")
    assert scores.splitlines()[-1].split() == ["sums", "actor", "0.1", "0.9"]
    assert steps.startswith("reward of the last step")
    assert "0.125" in tasks.splitlines()[3]  # the mean of 0 and 0.25


def test_frames_of_runs_without_rows_have_their_columns(runs_folder: Path) -> None:
    runs = astraflow.runs.load(runs_folder / "sums-sweep")
    assert {"run", "reward", "completion"} <= set(runs.episodes().columns)
    assert {"run", "version", "at_s"} <= set(runs.versions().columns)


def test_a_run_deleted_after_loading_gives_no_rows(runs_folder: Path) -> None:
    runs = astraflow.runs.load(runs_folder / "sums")
    shutil.rmtree(runs_folder / "sums")
    assert (len(runs.metrics()), len(runs.episodes()), len(runs.versions())) == (0, 0, 0)


def test_places_without_runs_and_unknown_libraries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        astraflow.runs.load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="none of pandas, polars"):
        astraflow.runs.load(tmp_path, library="excel")  # type: ignore[arg-type]


def test_polars_gets_the_same_rows(runs_folder: Path) -> None:
    pytest.importorskip("polars", reason="needs polars (extra `polars`)")
    runs = astraflow.runs.load(runs_folder / "sums-sweep", library="polars")
    assert runs.metrics().height == 16


@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
def test_a_notebook_runs(name: str, runs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs_folder.parent)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names: dict[str, Any] = {}
    for cell in json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    frames = {"learning_curves": "curves", "hardest_tasks": "tasks", "versions": "lengths"}
    assert len(names[frames[name]]) > 0
