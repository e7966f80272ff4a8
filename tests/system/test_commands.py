"""Commands around a run, as their users type them: doctor, eval, export, and halves of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drivers.system_driver import SUMS, Runs, astraflow

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

HELDOUT = {**SUMS, "split": "heldout", "size": 40, "heldout_frac": 0.5}
TRAIN = {**SUMS, "heldout_frac": 0.5}
SAMPLES = 3


def small(runs: Runs, *, steps: int) -> Path:
    """A recipe with a held-out set of 40 tasks and more than one sample each."""
    tasks = {"sources": {"sums": TRAIN}, "reward": {"name": "exact"}, "extract": "after_equals"}
    sets = {"heldout": {"num_tasks": 40, "samples": SAMPLES, "source": HELDOUT}}
    return runs.recipe(steps=steps, tasks=tasks, eval={"every": steps, "sets": sets})


def succeeded(*arguments: str) -> str:
    """What a command printed that must succeed."""
    done = astraflow(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def evaluated(*arguments: str) -> dict[str, Any]:
    """The first set of `astraflow eval ... --json`."""
    return json.loads(succeeded("eval", *arguments, "--json"))["sets"][0]


def test_what_a_run_learned_is_evaluated_and_exported_afterwards(runs: Runs) -> None:
    recipe = small(runs, steps=5)
    run = runs.start(recipe)
    assert run.finish() == 0, run.report()
    after = run.summary()["heldout_after"]
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    record = [line for line in lines if line["kind"] == "eval"][-1]

    of_run = evaluated(str(run.run_dir))
    assert (of_run["num_tasks"], of_run["samples"], of_run["num_failed"]) == (40, SAMPLES, 0)
    assert of_run["avg_at_k"]["low"] <= after <= of_run["avg_at_k"]["high"]
    assert record["pass@1_low"] <= of_run["pass_at_1"]["mean"] <= record["pass@1_high"]
    assert list(of_run["pass_at_k"]) == ["1", "2", "3"]

    model = runs.folder / "exported"
    assert "actor version 5" in succeeded("export", str(run.run_dir), str(model))
    of_model = evaluated(str(model), "--recipe", str(recipe))
    assert of_model["pass_at_k"] == of_run["pass_at_k"]
    assert of_model["avg_at_k"]["low"] <= after <= of_model["avg_at_k"]["high"]

    weights = AutoModelForCausalLM.from_pretrained(model).state_dict()
    checkpoint = run.run_dir / "checkpoints" / "actor" / "step-00000005"
    trained = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(weights[name], trained[name]) for name in trained)
    assert AutoTokenizer.from_pretrained(model).chat_template

    missing = astraflow("export", str(run.run_dir), str(runs.folder / "other"), "--version", "9")
    assert (missing.returncode, "version 9 is not kept (there are:" in missing.stderr) == (2, True)
    taken = astraflow("export", str(run.run_dir), str(model))
    assert (taken.returncode, "--force" in taken.stderr) == (2, True)
    done = astraflow("eval", str(run.run_dir), "--samples", "1", "--tasks", "8")
    assert "8 tasks x 1" in done.stdout
    assert "pass@1" in done.stdout
    assert "heldout: 8/8 episodes" in done.stderr


def test_the_doctor_passes_a_recipe_that_works_and_measures_no_drift(runs: Runs) -> None:
    told = succeeded("doctor", str(runs.recipe()), "--drift", "--run-dir", str(runs.folder / "run"))
    assert "fail  " not in told
    for check in ("system", "packages", "threads", "tokenizer of actor", "data of sums", "engine"):
        assert f"  {check}: " in told
    assert "drift of actor: max " in told
    assert not (runs.folder / "run").exists()


def test_the_doctor_fails_a_recipe_that_does_not_work(runs: Runs, taken_port: int) -> None:
    done = astraflow(
        "doctor", str(runs.recipe()), "policies.actor.model=./nowhere", f"dataflow.port={taken_port}"
    )
    assert done.returncode == 1, done.stderr
    assert "fail  model of actor: " in done.stdout
    assert "fail  ports: " in done.stdout
    assert "choose another dataflow.port" in done.stdout


@pytest.mark.long
def test_batches_are_collected_once_and_trained_twice_with_the_same_weights(runs: Runs) -> None:
    recipe, collected = str(small(runs, steps=3)), runs.folder / "collected"
    told = succeeded("run", recipe, "--only", "rollout", "--run-dir", str(collected))
    assert "actor batch 3/3: 4 groups" in told
    files: list[bytes] = []
    for name in ("one", "two"):
        out = runs.folder / name
        tail = ("--run-dir", str(out), "--batches", str(collected / "batches"))
        told = succeeded("run", recipe, "--only", "train", *tail)
        assert "actor step 3/3" in told
        files.append((out / "model" / "actor" / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    assert evaluated(str(runs.folder / "one" / "model" / "actor"), "--recipe", recipe)["num_failed"] == 0
    assert "audit: holds" in succeeded("audit", str(collected))
    again = astraflow("run", recipe, "--only", "train", "--run-dir", str(runs.folder / "one"))
    assert (again.returncode, "already holds results" in again.stderr) == (2, True)
    wrong = astraflow("run", recipe, "--only", "half")
    assert (wrong.returncode, "choices: rollout, train" in wrong.stderr) == (2, True)
