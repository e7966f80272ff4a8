"""Which libraries a command imports: each costs tenths of a second, and every call of the command pays."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drivers.weight_files import write_model_folder

HEAVY = (
    "aiohttp",
    "datasets",
    "matplotlib",
    "numpy",
    "pydantic",
    "reasoning_gym",
    "sqlite3",
    "sympy",
    "torch",
    "transformers",
    "uvicorn",
)


def heavy_imports(*arguments: str) -> set[str]:
    """Runs a command in a process, and returns which of the heavy libraries it has imported."""
    code = (
        "import sys\nfrom astraflow.cli.main import main\n"
        f"try:\n    main({list(arguments)!r})\nexcept SystemExit as end:\n    code = end.code\n"
        f"print([code, *(name for name in {HEAVY!r} if name in sys.modules)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    code, *found = json.loads(done.stdout.splitlines()[-1].replace("'", '"'))
    assert code == 0, done.stderr
    return set(found)


@pytest.mark.parametrize("arguments", [("--version",), ("run", "--help")])
def test_what_a_command_prints_about_itself_needs_no_library(arguments: tuple[str, ...]) -> None:
    assert heavy_imports(*arguments) <= {"pydantic"}  # Typer's


def test_the_list_of_recipes_needs_no_library() -> None:
    assert heavy_imports("recipes", "list") <= {"pydantic"}


def test_the_status_of_a_run_needs_neither_its_recipe_nor_what_its_services_import(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"name": "r", "state": "finished"}')
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    assert heavy_imports("status", str(tmp_path)) <= {"aiohttp", "numpy", "pydantic"}


def test_a_dry_run_reads_models_and_tasks_without_the_libraries_that_run_them(tmp_path: Path) -> None:
    recipe = {
        "name": "r",
        "tasks": {"sources": {"train": {"name": "reasoning_gym", "dataset": "basic_arithmetic"}}},
        "policies": {"actor": {"model": str(write_model_folder(tmp_path / "m"))}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    found = heavy_imports("run", str(path), "--dry-run", "--run-dir", str(tmp_path / "run"))
    assert found & {"datasets", "matplotlib", "reasoning_gym", "sympy", "torch", "transformers"} == set()


SUMMARY = {
    "name": "r",
    "run_id": "1",
    "seed": 0,
    "state": "finished",
    "heldout_before": None,
    "heldout_after": None,
    "heldout_tasks": 0,
    "wall_s": 1.0,
    "rl_wall_s": 1.0,
    "overlap_frac": 0.0,
    "staleness_mean": 0.0,
    "staleness_max": 0,
    "staleness_bound": 0,
    "generated_tokens": 0,
    "committed_tokens": 0,
    "audit_ok": True,
    "audit_problems": [],
    "policies": [],
    "waits": [],
}
