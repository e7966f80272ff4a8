"""The core in a build without `addons`: its unit tests pass, with no add-on and no entry point installed."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from drivers.system_driver import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

ROOMS = (
    *("algorithms", "cli", "dataflow", "losses", "models", "processes", "recipe", "report", "rollout"),
    *("run", "service", "tasks", "trainer", "types", "user_input", "weights", "workflows"),
)
NEEDED = (
    *("benchmarks", "docs", "examples", "packages", "recipes", "tools"),
    *("pyproject.toml", "CHANGELOG.md", "README.md"),
)
"""What tests read besides the package."""
ABSENT = re.compile(r"astraflow[._](addons|paced|conformance)")
NAME_ADD_ONS = (
    "cli/test_command_group.py::test_a_package_adds_a_command_and_a_group_of_commands",
    "cli/test_command_group.py::test_every_entry_point_of_astraflow_names_something_that_exists",
    "cli/test_commands.py::test_a_bug_in_the_users_code_is_told_by_its_own_lines",
    "cli/test_commands.py::test_a_dry_run_prints_the_recipe_with_its_changes",
    "cli/test_commands.py::test_every_command_explains_itself",
    "cli/test_commands.py::test_help_names_every_command",
    "cli/test_commands.py::test_weights_that_do_not_fit_are_refused_by_every_command_with_the_same_sentence",
    "cli/test_first_mistakes.py::test_a_first_mistake_is_told_once_with_its_remedy[rollout.engine.device=cuda:77]",
    "cli/test_first_mistakes.py::test_a_first_mistake_is_told_once_with_its_remedy[rollout.engine.device=gpu]",
    "cli/test_first_mistakes.py::test_a_first_mistake_is_told_once_with_its_remedy[rollout.engine=vllm]",
    "cli/test_imports.py::test_a_dry_run_reads_models_and_tasks_without_the_libraries_that_run_them",
    "cli/test_imports.py::test_the_list_of_recipes_needs_no_library",
    "cli/test_imports.py::test_the_status_of_a_run_needs_neither_its_recipe_nor_what_its_services_import",
    "cli/test_run_source.py::test_a_run_goes_on_by_its_folder",
    "cli/test_wrong_paths.py::",
    "recipe/test_derived.py::test_a_context_holds_what_tasks_and_completions_need[overrides2-2048]",
    "recipe/test_derived.py::test_the_smallest_recipe_with_one_more_choice_passes_every_check",
    "recipe/test_derived.py::test_named_slots_that_need_more_than_the_machine_has_are_refused_before_a_start",
    "recipe/test_derived.py::test_there_are_as_many_slots_as_half_the_memory_holds",
    "recipe/test_gallery.py::test_a_model_that_another_run_builds_is_waited_for",
    "report/test_view.py::test_plain_lines_name_a_process_in_trouble_once_and_say_when_it_is_well_again",
    "report/watch/test_watchdog.py::",
    "run/test_exact.py",
    "run/test_full_recipes.py",
    "run/test_preflight.py::test_devices_of_services_elsewhere_are_not_looked_for_here",
    "run/test_preflight.py::test_what_a_service_would_lack_on_this_machine_is_told_before_it_starts",
    "run/test_recipe_bounds.py::test_a_value_beyond_its_bound_is_refused_where_it_is_written",
    "tasks/test_own_rewards.py::test_factors_are_checked",
    "tasks/test_own_rewards.py::test_factors_multiply_the_sum_of_the_others",
    "user_input/test_installed.py::test_a_package_adds_a_tracker_and_a_check_of_recipes",
    "workflows/test_calls.py",
)
"""Tests of the core whose recipes, commands, or rules of the watchdog come from add-ons."""
MOST_LEFT_OUT = 30
"""Files of tests in the core's rooms that import an add-on, or help that does."""


@cache
def read_imports(path: Path) -> tuple[bool, set[Path]]:
    """Whether a file imports an add-on, and the drivers that it names."""
    text = path.read_text(encoding="utf-8")
    imports = [line for line in text.splitlines() if re.match(r"\s*(from|import) ", line)]
    drivers = {ROOT / "tests" / "drivers" / f"{name}.py" for name in re.findall(r"drivers\.(\w+)", text)}
    return any(map(ABSENT.search, imports)), drivers


def needs_add_on(path: Path) -> bool:
    """Whether a file imports an add-on, or a driver that does."""
    files, unread = {path}, {path}  # drivers may name each other
    while unread:
        imports_add_on, drivers = read_imports(unread.pop())
        if imports_add_on:
            return True
        unread |= drivers - files
        files |= drivers
    return False


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository without add-ons, beside everything that this Python has installed but our packages."""
    folder = tmp_path_factory.mktemp("core")
    leave_out = shutil.ignore_patterns("addons", "__pycache__")
    shutil.copytree(ROOT / "src", folder / "src", ignore=leave_out)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=leave_out)
    for name in NEEDED:
        (folder / name).symlink_to(ROOT / name)
    (folder / "installed").mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "astraflow" not in path.name:
            (folder / "installed" / path.name).symlink_to(path)
    return folder


def test_the_cores_unit_tests_pass_without_add_ons(copy: Path) -> None:
    unit = ROOT / "tests" / "unit"
    files = [path for room in ROOMS for path in sorted((unit / room).rglob("test_*.py"))]
    left_out = [path.relative_to(ROOT) for path in files if needs_add_on(path)]
    assert len(left_out) <= MOST_LEFT_OUT
    argv = [sys.executable, "-S", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    argv += [f"tests/unit/{room}" for room in ROOMS]
    argv += [f"--ignore={path}" for path in left_out]
    argv += [f"--deselect=tests/unit/{name}" for name in NAME_ADD_ONS]
    paths = [copy / "src", copy / "installed", copy, copy / "tests"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(argv, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 2000
