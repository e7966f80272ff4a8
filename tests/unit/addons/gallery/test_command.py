"""`astraflow recipes`, `astraflow init` and the completion of the shell, as their users call them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.cli.main import main
from astraflow.recipe.gallery import gallery_root
from drivers.system_driver import ROOT


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_list_names_recipes_examples_and_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("recipes", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names.index("quickstart") < names.index("examples/own_parts") < names.index("models/quickstart")
    assert all(len(line) <= 80 for line in lines)


def test_the_list_is_there_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("recipes", "list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    (quickstart,) = [row for row in rows if row["name"] == "quickstart"]
    assert quickstart["kind"] == "recipe"
    assert Path(quickstart["path"]) == gallery_root() / "recipes" / "quickstart.yaml"


def test_a_recipe_is_shown_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("recipes", "show", "quickstart") == 0
    assert capsys.readouterr().out == (ROOT / "recipes" / "quickstart.yaml").read_text()


def test_a_copy_is_followed_by_the_commands_that_run_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("recipes", "copy", "pair", "--to", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/examples/04_two_policies.py\n" in out
    commands = out.partition("Now run:\n")[2]
    assert "astraflow model init recipes/models/verifier.yaml --out models/verifier\n" in commands
    assert commands.endswith("  astraflow run recipes/pair.yaml\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("copy",), "name the recipes to copy, or pass --all"),
        (("copy", "pair", "--all"), "name the recipes to copy, or pass --all"),
        (("copy", "pairs"), "no recipe or model is named 'pairs'; did you mean \"pair\"?"),
        (
            ("show", "nothing like it"),
            "no recipe or model is named 'nothing like it' (`astraflow recipes list`",
        ),
    ],
)
def test_a_wrong_name_is_one_clear_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("recipes", *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_new_project_is_told_with_its_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my project"
    assert run("init", str(folder)) == 0
    out = capsys.readouterr().out
    assert f"  cd '{folder}'\n" in out
    assert (folder / "workflow.py").is_file()
    assert run("init", str(folder)) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("astraflow recipes show qui", ["quickstart", "quickstart-one-gpu", "quickstart-vllm"]),
        ("astraflow expo", ["export"]),
    ],
)
def test_the_shell_completes_commands_and_names(words: str, completions: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "astraflow.cli.main"],
        env={
            **os.environ,
            "_ASTRAFLOW_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == completions
