"""Exported episodes of a run are read by Harbor's and verifiers' own models, and train again."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.view.trace_formats import rows_of
from drivers.system_driver import ROOT, Runs, astraflow

pytestmark = [pytest.mark.system, pytest.mark.interop, pytest.mark.timeout(600)]

NUM_EPISODES = 1000


def read_by(library: str, path: Path) -> list[dict[str, Any]]:
    venv = ROOT / f".venv-{library}"
    assert venv.exists(), f"no {venv}: `make {venv.name}` installs it"
    command = [venv / "bin" / "python", ROOT / "tests" / "interop" / "read_traces.py", library, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def exported(runs: Runs) -> dict[str, Path]:
    """The episodes of a small run, in each format."""
    recipe = runs.recipe(steps=65)
    run = runs.start(recipe)
    assert run.finish() == 0, run.report()
    files = {form: runs.folder / f"{form}.jsonl" for form in ("messages", "atif", "trace")}
    for form, path in files.items():
        args = ("--export", form, "--kind", "train", "--limit", str(NUM_EPISODES), "--out", str(path))
        assert astraflow("episodes", str(run.run_dir), *args).returncode == 0
    return files


def test_both_libraries_read_a_thousand_episodes_without_loss_and_they_train_again(
    runs: Runs, exported: dict[str, Path]
) -> None:
    own = [json.loads(line) for line in exported["messages"].read_text().splitlines()]
    assert len(own) == NUM_EPISODES
    assert [row for doc in read_by("harbor", exported["atif"]) for row in rows_of(doc)] == own
    traces = read_by("verifiers", exported["trace"])
    assert [row for doc in traces for row in rows_of(doc["record"])] == own
    for row, read in zip(own, traces, strict=True):
        (answer,) = [message for message in row["messages"] if message["role"] == "assistant"]
        given, said = answer["prompt_token_ids"], answer["token_ids"]
        assert read["ids"] == given + said
        assert read["mask"] == [False] * len(given) + [True] * len(said)
        assert read["logprobs"] == [0.0] * len(given) + answer["logprobs"]
        assert read["reward"] == row["reward"]
    for form, path in exported.items():
        source = {"name": "messages", "path": str(path)}
        recipe = runs.recipe(steps=2, tasks={"sources": {"chats": source}}, workflow={"name": "supervised"})
        run = runs.start(recipe, name=f"again-{form}")
        assert run.finish() == 0, run.report()
        assert run.summary()["audit_ok"]
