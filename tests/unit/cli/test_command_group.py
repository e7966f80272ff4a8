"""Commands that installed packages add: how they are found, listed, and named if they are missing."""

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from astraflow.cli.command_group import in_order
from astraflow.cli.main import main
from astraflow.user_input.installed import load_entry

MODULE = """
import typer
from astraflow.cli.command_group import AddedCommand

def greet(name: str) -> None:
    "Greet somebody."
    print(f"hello {name}")

several = typer.Typer(help="Several commands.", no_args_is_help=True)
several.command("greet")(greet)
several.callback()(lambda: None)

FIRST = AddedCommand(greet, after="")
THIRD = AddedCommand(several, after="second")
LAST = AddedCommand(greet)
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *entries: str) -> None:
    """A package as an installer leaves it, on the path."""
    info = folder / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[astraflow.commands]", *entries, ""]))
    (folder / "somebodys_commands.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "somebodys_commands", raising=False)


def run(*arguments: str) -> int:
    """The exit code of a command run in this process."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_package_adds_a_command_and_a_group_of_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, "hail = somebodys_commands:FIRST", "several = somebodys_commands:THIRD")
    assert run("hail", "Ada") == 0
    assert run("several", "greet", "Bob") == 0
    assert capsys.readouterr().out == "hello Ada\nhello Bob\n"
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert text.index("hail") < text.index("demo")
    assert "Several commands." in text


def test_an_added_command_stands_after_the_one_that_it_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = ["zero = somebodys_commands:FIRST", "third = somebodys_commands:THIRD"]
    install(tmp_path, monkeypatch, *entries, "last = somebodys_commands:LAST")
    names = [name for name in in_order(["first", "second"]) if name in ENTRIES]
    assert names == ["zero", "first", "second", "third", "last"]
    follows_none = [name for name in in_order(["first"]) if name in ENTRIES]
    assert follows_none[:2] == ["zero", "first"]
    assert sorted(follows_none[2:]) == ["last", "third"]


ENTRIES = {"zero", "first", "second", "third", "last"}


def test_a_package_cannot_replace_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "audit = somebodys_commands:FIRST")
    assert run("audit", str(tmp_path / "none")) == 2


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("somebodys_commands:NONE", "of astraflow.commands) does not load"),
        ("no_such_module:X", "of astraflow.commands) does not load"),
        ("somebodys_commands:greet", "of astraflow.commands) is not an AddedCommand"),
        (
            "astraflow.addons.no_such_addon.command:X",
            "needs astraflow.addons.no_such_addon, which this installation of AstraFlow leaves out",
        ),
    ],
)
def test_a_command_that_cannot_be_had_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    message: str,
) -> None:
    install(tmp_path, monkeypatch, f"hail = {target}")
    assert run("hail", "Ada") == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "hail" in told
    assert message in told


def test_every_entry_point_of_astraflow_names_something_that_exists() -> None:
    entries = [e for e in distribution("astraflow").entry_points if e.group.startswith("astraflow.")]
    assert entries
    assert [entry for entry in entries if load_entry(entry) is None] == []


@pytest.mark.parametrize("arguments", [["--version"], ["run", "--help"], ["audit", "--help"]])
def test_a_command_imports_no_module_of_an_add_on_that_it_does_not_need(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom astraflow.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "print([name for name in sys.modules if name.startswith('astraflow.addons')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
