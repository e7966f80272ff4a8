"""The core without add-ons: it imports, and names the add-on that has what somebody asks for."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import astraflow
from astraflow.recipe.recipe import Recipe
from drivers.weight_files import write_model_folder

CORE = sorted(
    module.name
    for module in pkgutil.walk_packages(astraflow.__path__, "astraflow.", onerror=lambda _: None)
    if not module.name.startswith("astraflow.addons")
)
"""All modules but those of add-ons."""

WITHOUT_ADD_ONS = """
import importlib, sys

class NoAddOns:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("astraflow.addons"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoAddOns())
"""
RECIPE = {
    "name": "r",
    "tasks": {"sources": {"train": {"name": "jsonl", "path": "tasks.jsonl"}}},
    "policies": {"actor": {"model": "model"}},
}


def core_alone(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Runs Python in a process that finds no add-on, as in a build without `addons`."""
    argv = [sys.executable, "-c", WITHOUT_ADD_ONS + code]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)


def command(*arguments: str) -> str:
    """Code that calls the command line."""
    return f"from astraflow.cli.main import main\nmain({list(arguments)!r})"


def test_every_module_of_the_core_imports_without_add_ons(tmp_path: Path) -> None:
    done = core_alone(f"for name in {CORE!r}: importlib.import_module(name)", tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_help_lists_the_commands_of_the_core(tmp_path: Path) -> None:
    done = core_alone(command("--help"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert " run " in done.stdout
    assert " view " not in done.stdout


def test_a_command_of_an_add_on_that_is_left_out_is_told(tmp_path: Path) -> None:
    done = core_alone(command("view", "runs"), tmp_path)
    assert done.returncode == 2
    told = (
        "error: `astraflow view` needs astraflow.addons.view, which this installation of AstraFlow leaves out"
    )
    assert done.stderr.strip() == told


def test_a_run_has_no_page_and_prints_plain_lines(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from rich.console import Console
from astraflow.recipe.run_folder import RunFolder
from astraflow.report.view import ShownRun, make_pages
run = ShownRun(
    recipe=None,
    where="runs/r",
    folder=RunFolder(Path("runs/r")),
    terminal=Console(force_terminal=True),
    has_link=True,
)
assert make_pages(run) == []
"""
    done = core_alone(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_option_of_an_add_on_that_is_left_out_is_told(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    done = core_alone(command("run", "recipe.yaml", "--only", "train"), tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: `astraflow run --only` needs astraflow.addons.half_runs, which")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trackers=[wandb]", 'trackers.0.name = "wandb" needs astraflow.addons.trackers,'),
        ("trackers=[{use: 'json:loads'}]", "trackers needs astraflow.addons.trackers,"),
        ("cluster.max_services=2", "cluster.max_services needs astraflow.addons.pool,"),
        (
            "eval={best: {metric: a}, sets: {a: {source: {name: jsonl, path: tasks.jsonl}}}}",
            "eval.best.metric needs astraflow.addons.export,",
        ),
        ("exact=true", "exact: true needs astraflow.addons.exact,"),
        (
            "policies.actor.train.backend={name: own_loop, loop: {use: 'a:b'}}",
            'policies.actor.train.backend.name = "own_loop" needs astraflow.addons.tinker,',
        ),
        ("launcher=slurm", 'launcher.name = "slurm" needs astraflow.addons.cluster,'),
    ],
)
def test_a_name_of_an_add_on_that_is_left_out_is_told(tmp_path: Path, override: str, told: str) -> None:
    write_model_folder(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    done = core_alone(command("run", "recipe.yaml", "--dry-run", override), tmp_path)
    assert done.returncode == 2
    assert told in done.stderr


def test_the_option_for_a_launcher_of_an_add_on_that_is_left_out_names_the_add_on(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    done = core_alone(command("run", "recipe.yaml", "--dry-run", "--on", "slurm"), tmp_path)
    assert done.returncode == 2
    assert "error: --on slurm needs astraflow.addons.cluster, which this" in done.stderr


JOIN = """
import json
from pathlib import Path
from astraflow.errors import ConfigError
from astraflow.processes.rollout_process import recipe_of
from astraflow.recipe.run_plan import RunInfo

text = Path("resolved.json").read_text()
info = lambda text: RunInfo(
    name="r", run_id="", state="running", policies=(), workflow="single_turn", fingerprints=None, recipe=text
)
assert recipe_of(info(text), "http://head:8400").model_dump_json() == text
try:
    recipe_of(info(text.replace('{"name":"local"}', '{"name":"slurm"}')), "http://head:8400")
except ConfigError as err:
    print(err)
"""


def test_a_joining_service_reads_sections_of_add_ons_and_names_what_it_lacks(tmp_path: Path) -> None:
    recipe = Recipe.model_validate_json(json.dumps({**RECIPE, "cluster": {"k8s": {"image": "mine"}}}))
    (tmp_path / "resolved.json").write_text(recipe.model_dump_json())
    done = core_alone(JOIN, tmp_path)
    assert done.returncode == 0, done.stderr
    where, advice = done.stdout.splitlines()
    assert where.startswith(
        'the recipe of http://head:8400: launcher.name = "slurm" needs astraflow.addons.c'
    )
    assert advice.startswith(
        "The run itself accepts this recipe: install the same version of AstraFlow here,"
    )
