"""The core without add-ons: it imports, and names the add-on that has what somebody asks for."""

import json
import pkgutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

import astraflow
from astraflow.models.model_folder import check_model_folder
from astraflow.recipe.recipe import Recipe
from drivers.prepared_python import PreparedPython, command
from drivers.weight_files import write_model_folder

Run: TypeAlias = Callable[[str, Path], "subprocess.CompletedProcess[str]"]
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
import astraflow.cli.runs, astraflow.run.preflight, astraflow.recipe.gallery
"""
RECIPE = {
    "name": "r",
    "tasks": {"sources": {"train": {"name": "jsonl", "path": "tasks.jsonl"}}},
    "policies": {"actor": {"model": "model"}},
}


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs code where no add-on is found, as in a build without `addons`."""
    with PreparedPython(tmp_path_factory.mktemp("alone"), WITHOUT_ADD_ONS) as python:
        yield python.run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its model, which is judged once for all processes."""
    folder = tmp_path_factory.mktemp("recipe")
    check_model_folder(write_model_folder(folder / "model"))
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    return folder


def test_every_module_of_the_core_imports_without_add_ons(core_alone: Run, folder: Path) -> None:
    done = core_alone(f"for name in {CORE!r}: importlib.import_module(name)", folder)
    assert done.returncode == 0, done.stderr


def test_the_help_lists_the_commands_of_the_core(core_alone: Run, folder: Path) -> None:
    done = core_alone(command("--help"), folder)
    assert done.returncode == 0, done.stderr
    assert " run " in done.stdout
    assert " view " not in done.stdout


def test_a_command_says_which_add_on_this_installation_leaves_out(core_alone: Run, folder: Path) -> None:
    done = core_alone(command("view", "runs"), folder)
    assert done.returncode == 2
    told = (
        "error: `astraflow view` needs astraflow.addons.view, which this installation of AstraFlow leaves out"
    )
    assert done.stderr.strip() == told


def test_a_run_has_no_page_and_prints_plain_lines(core_alone: Run, folder: Path) -> None:
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
    done = core_alone(code, folder)
    assert done.returncode == 0, done.stderr


def test_an_option_says_which_add_on_this_installation_leaves_out(core_alone: Run, folder: Path) -> None:
    done = core_alone(command("run", "recipe.yaml", "--only", "train"), folder)
    assert done.returncode == 2
    assert done.stderr.startswith("error: `astraflow run --only` needs astraflow.addons.one_process, which")


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
        (
            "policies.actor.train.backend={name: torch, lora: {rank: 4}}",
            "train.backend.lora.rank needs astraflow.addons.lora,",
        ),
        ("launcher=slurm", 'launcher.name = "slurm" needs astraflow.addons.cluster,'),
    ],
)
def test_a_key_says_which_add_on_this_installation_leaves_out(
    core_alone: Run, folder: Path, override: str, told: str
) -> None:
    done = core_alone(command("run", "recipe.yaml", "--dry-run", override), folder)
    assert done.returncode == 2
    assert told in done.stderr


def test_the_option_for_a_launcher_of_an_add_on_that_is_left_out_names_the_add_on(
    core_alone: Run, folder: Path
) -> None:
    done = core_alone(command("run", "recipe.yaml", "--dry-run", "--on", "slurm"), folder)
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


def test_a_joining_service_reads_sections_of_add_ons_and_names_what_it_lacks(
    core_alone: Run, folder: Path
) -> None:
    recipe = Recipe.model_validate_json(json.dumps({**RECIPE, "cluster": {"k8s": {"image": "mine"}}}))
    (folder / "resolved.json").write_text(recipe.model_dump_json())
    done = core_alone(JOIN, folder)
    assert done.returncode == 0, done.stderr
    where, advice = done.stdout.splitlines()
    assert where.startswith(
        'the recipe of http://head:8400: launcher.name = "slurm" needs astraflow.addons.c'
    )
    assert advice.startswith(
        "The run itself accepts this recipe: install the same version of AstraFlow here,"
    )
