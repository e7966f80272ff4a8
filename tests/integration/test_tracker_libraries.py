"""Trackers with their libraries: TensorBoard here, the others in `.venv-trackers` (`make test-trackers`)."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drivers.tracker_driver import TrackedFolder, make_eval, make_step

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-trackers" / "bin" / "python"
LABELS: dict[str, object] = {"group": "lr-sweep", "tags": ["lr=0.1", "new"]}


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def test_tensorboard_shows_one_run_with_its_evaluations_also_after_a_resume(tmp_path: Path) -> None:
    tracked = TrackedFolder(tmp_path, "tensorboard")
    tracked.run(make_eval(0), make_step(0), make_step(1))
    tracked.run(make_step(2), make_eval(3, score=None))
    assert tracked.notes == []
    actor = tmp_path / "tensorboard" / "actor"
    assert scalars(actor, "loss") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert scalars(actor, "episode/turns") == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert scalars(actor / "eval-heldout", "score_mean") == [(0, 0.75)]
    assert scalars(actor / "eval-heldout", "num_tasks") == [(0, 1.0), (3, 1.0)]


def read_back(name: str, run_dir: Path) -> dict[str, Any]:
    done = subprocess.run(
        [str(PYTHON), str(ROOT / "tests" / "drivers" / "tracker_libraries.py"), name, str(run_dir)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.trackers
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("section", "pass_name", "labels"),
    [
        ({"name": "wandb", "mode": "offline", **LABELS}, "pass@1", {**LABELS, "tags": ["lr=0.1", "new"]}),
        ({"name": "trackio", "group": "lr-sweep"}, "pass@1", {"group": "lr-sweep"}),
        ({"name": "mlflow", **LABELS}, "pass_1", {"group": "lr-sweep", "lr": "0.1", "new": "true"}),
    ],
)
def test_a_tracker_holds_one_run_with_every_number_also_after_a_resume(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: dict[str, object],
    pass_name: str,
    labels: dict[str, object],
) -> None:
    name = str(section["name"])
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    tracked = TrackedFolder(tmp_path / "run", section, python=str(PYTHON))
    tracked.run(make_eval(0), make_step(0), make_step(1))
    tracked.run(make_step(2), make_eval(3, score=None))
    assert tracked.notes == [], tracked.log_of(name)
    found = read_back(name, tmp_path / "run")
    assert len(found["runs"]) == 1
    assert found["labels"] == labels
    points: dict[str, list[list[float]]] = {}
    for key, step, value in found["points"]:
        points.setdefault(key, []).append([step, value])
    assert points["actor/loss"] == [[1, 1.0], [2, 0.5], [3, 1 / 3]]
    assert points["actor/episode/turns"] == [[1, 2.0], [2, 2.0], [3, 2.0]]
    assert points["actor/eval/heldout/score_mean"] == [[0, 0.75]]
    assert points[f"actor/eval/heldout/{pass_name}"] == [[0, 0.8], [3, 0.8]]


@pytest.mark.trackers
@pytest.mark.timeout(600)
def test_wandb_without_a_key_is_said_and_does_not_hold_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    # Nothing listens there: what W&B's servers look like to a machine without a network.
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    tracked = TrackedFolder(tmp_path / "run", "wandb", python=str(PYTHON))
    tracked.start()
    tracked.write(make_step(0))
    tracked.close(deadline_s=120.0)
    assert "wandb did not process 1 rows" in tracked.notes[-1]
    assert "No API key configured" in tracked.notes[-1]
