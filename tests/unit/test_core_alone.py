"""The command line without add-ons: it lists its own commands, and names the add-on that has another one."""

import subprocess
import sys
from pathlib import Path

WITHOUT_ADD_ONS = """
import sys

class NoAddOns:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("astraflow.addons"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoAddOns())
"""


def core_alone(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Runs Python in a process that finds no add-on, as in a build without `addons`."""
    argv = [sys.executable, "-c", WITHOUT_ADD_ONS + code]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)


def command(*arguments: str) -> str:
    """Code that calls the command line."""
    return f"from astraflow.cli.main import main\nmain({list(arguments)!r})"


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
