"""What `astraflow run` takes its recipe from: a file, or the folder of a run."""

from pathlib import Path

import pytest
import yaml

from astraflow.cli.main import main
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.run_folder import RunFolder
from drivers.weight_files import write_model_folder

RECIPE = """\
name: demo
tasks: {sources: {train: {name: jsonl, path: tasks.jsonl}}}
workflow: {use: "examples.04_two_policies:solve_and_verify"}
policies:
  solver: {model: models/a, train: {steps: 30}}
  verifier: {extends: solver, train: {lr: 1.0e-3}}
  judge: {model: models/b, role: frozen}
rollout: {engine: {max_context: 512}}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in "ab":
        write_model_folder(tmp_path / "models" / name)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 64)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def run_dir(tmp_path: Path, recipe: Path) -> Path:
    folder = RunFolder(tmp_path / "runs" / "demo")
    folder.create()
    folder.save_recipe(load_recipe(recipe))
    return folder.path


def resolved(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, int]:
    """Policy -> its steps, in the recipe that the command would run."""
    with pytest.raises(SystemExit) as ended:
        main(("run", *arguments, "--dry-run"))
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    policies = yaml.safe_load(printed.out)["policies"]
    return {name: policy["train"]["steps"] for name, policy in policies.items()}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(("run", *arguments, "--dry-run"))
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_steps_stand_for_those_of_every_trained_policy(recipe: Path) -> None:
    longer = load_recipe(recipe, ["steps=50", "policies.verifier.train.steps=60"])
    assert {name: p.train.steps for name, p in longer.trained.items()} == {"solver": 50, "verifier": 60}
    assert longer.policies["judge"].train.steps == 100
    assert load_recipe(recipe, {"steps": 7}).policies["verifier"].train.steps == 7


def test_a_number_of_steps_that_is_none_names_its_key(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"policies\.solver\.train\.steps = 'many'"):
        load_recipe(recipe, ["steps=many"])


def test_a_run_goes_on_by_its_folder(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resolved(capsys, str(run_dir), "steps=50") == {"solver": 50, "verifier": 50, "judge": 100}
    assert resolved(capsys, "--run-dir", str(run_dir), "steps=40")["solver"] == 40
    assert resolved(capsys, "--run-dir", str(run_dir), "policies.solver.train.steps=31")["verifier"] == 30
    assert resolved(capsys, str(run_dir))["solver"] == 30


def test_a_folder_that_holds_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a resumable run" in refused(capsys, str(tmp_path), "steps=50")
    assert "is not a resumable run" in refused(capsys, "--run-dir", str(tmp_path / "none"), "steps=5")


def test_without_recipe_and_folder_there_is_nothing_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "pass a recipe, or the folder of a run" in refused(capsys, "steps=50")


def test_a_run_goes_on_in_its_own_folder_only(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(capsys, str(run_dir), "--run-dir", str(tmp_path / "other"))
    assert "is the folder of a run, which resumes there" in text
