"""The sample of mutants: which tests run for a mutant, and what is said about those that survive."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivers.docs_driver import tool

mutants = tool("mutants")


def mutant_of(file: str) -> Any:
    return mutants.Mutant(Path("astraflow", file), "step", "", "- 1  + 2")


def test_every_part_of_the_package_has_system_tests_that_exist() -> None:
    for folder in mutants.SYSTEM_TESTS:
        assert (mutants.SOURCE / "astraflow" / folder).is_dir()
        tests = mutants.system_tests_of(Path("astraflow", folder, "any.py"))
        assert len(tests) == len(mutants.SYSTEM_TESTS[folder])


def test_a_folder_without_system_tests_of_its_own_has_those_of_its_parent() -> None:
    of = mutants.system_tests_of
    assert of(Path("astraflow/rollout/engines/lane.py")) == of(Path("astraflow/rollout/service.py"))
    assert of(Path("astraflow/wire.py")) == of(Path("astraflow/models/loading.py"))
    assert of(Path("astraflow/addons/math/answers.py")) == ()


def test_the_tests_that_share_a_files_name_run_first() -> None:
    for file, test in (
        ("rollout/scoring_process.py", "rollout/test_scoring.py"),
        ("weights/peers/swarm.py", "weights/peers/test_swarm.py"),
    ):
        first = mutants.tests_of(Path("astraflow", file))[0]
        assert first.relative_to(mutants.TESTS / "unit").as_posix() == test


def test_tests_that_reach_a_file_without_importing_it_run_for_it() -> None:
    def names_of(file: str) -> set[str]:
        return {test.stem for test in mutants.tests_of(Path("astraflow", file))}

    assert "test_judge" in names_of("addons/judge/judge.py")  # in the mirrored folder
    assert "test_hub_models" in names_of("addons/hub/download.py")  # named after the folder
    assert "test_process_hosts" in names_of("addons/cluster/host_main.py")  # names the module in a text


def test_a_change_of_strict_is_no_mutant_and_other_keywords_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mutmut", reason="mutmut is not installed (extra `mutants`)")
    monkeypatch.setattr(mutants, "SOURCE", tmp_path)
    file = Path("astraflow", "pairs.py")
    (tmp_path / "astraflow").mkdir()
    (tmp_path / file).write_text("def pairs(a, b):\n    return list(zip(a, b, strict=True))\n")
    every = mutants.sample([file], 99, 0)
    assert every
    assert all("strict=True" in mutant.code or "zip(a, b" not in mutant.code for mutant in every)
    (tmp_path / file).write_text("def words(a):\n    return a.split(maxsplit=True)\n")
    assert any("maxsplit=False" in mutant.code for mutant in mutants.sample([file], 99, 0))


@pytest.mark.parametrize(
    ("line", "failed"),
    [
        ("FAILED tests/a.py::test_b - assert 1 == 2", "tests/a.py::test_b"),
        ("FAILED tests/a.py::test_b[dp 2, tp 2] - ValueError: x - y", "tests/a.py::test_b[dp 2, tp 2]"),
        ("ERROR tests/a.py::test_b[x y]", "tests/a.py::test_b[x y]"),
        ("ERROR tests/a.py - ImportError: no module", ""),
    ],
)
def test_the_failed_test_that_runs_without_the_mutant_is_read_with_its_whole_id(
    line: str, failed: str
) -> None:
    assert mutants.first_failed(f"1 passed\n{line}\nFAILED tests/c.py::test_d\n") == (
        failed or "tests/c.py::test_d"
    )


def test_survivors_and_untested_mutants_are_listed_and_noticed_ones_are_not() -> None:
    outcomes = {
        mutant_of("wire.py"): mutants.NOTICED,
        mutant_of("run/run.py"): mutants.SURVIVED,
        mutant_of("cli/main.py"): mutants.UNTESTED,
    }
    assert mutants.survivors(outcomes) == [
        "survived: astraflow/run/run.py: step: - 1  + 2",
        "untested: astraflow/cli/main.py: step: - 1  + 2",
    ]
    assert mutants.summarize(outcomes)[0] == pytest.approx(100 / 3)


def test_a_copy_of_the_source_finds_its_recipes(tmp_path: Path) -> None:
    mutants.Workshop(tmp_path, 1, limit_s=1.0)
    code = "from astraflow.recipe import gallery; print(gallery.gallery_root(), gallery.__file__)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "0/src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(tmp_path / "0"), str(tmp_path / "0/src/astraflow/recipe/gallery.py")]
