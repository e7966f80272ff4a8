"""What the box of an agent program shows: its interpreter and its own files, and nothing else of a user's."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from astraflow.addons.sandbox.command import CommandLimits
from astraflow.addons.sandbox.openings import NO_OPENINGS, Openings, openings_for
from astraflow.errors import ConfigError


def executable(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def opened(
    argv: Sequence[str],
    folder: Path,
    *,
    path: str = "/usr/bin:/bin",
    visible: Sequence[str] = (),
    private: Sequence[Path] = (),
) -> Openings:
    return openings_for(
        argv,
        folder=folder,
        path=path,
        gateway=8080,
        visible=[Path(each) for each in visible],
        private=private,
    )


def own(openings: Openings, folder: Path) -> set[str]:
    """The places below a folder, relative to it."""
    places = [Path(place) for _, place in openings.visible]
    return {str(place.relative_to(folder)) for place in places if place.is_relative_to(folder)}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a script, in a home folder with other things."""
    folder = tmp_path / "home" / "project"
    executable(folder / "agents" / "agent.py")
    executable(tmp_path / "home" / ".ssh" / "id_rsa")
    executable(folder / "data.json")
    return folder


def test_a_box_shows_the_system_and_the_scripts_folder(project: Path) -> None:
    found = opened(["sh", "agents/agent.py"], project)
    assert own(found, project.parent) == {"project/agents"}
    assert found.shows("/usr/bin/env")
    assert found.shows("/bin/sh")
    assert not any(
        found.shows(path) for path in ("/etc/passwd", "/run/dbus", "/var/lib", "/root/x", "/home/x")
    )
    assert (Path(found.program).name, found.folder) == ("sh", str(project))


def test_files_that_a_command_names_are_shown_without_their_folders(project: Path) -> None:
    found = opened(["sh", "agents/agent.py", "data.json", "no-file", "-", "x" * 10_000, ""], project)
    assert own(found, project) == {"agents", "data.json"}


def test_a_virtual_environment_is_shown_with_the_python_that_it_is_made_from(tmp_path: Path) -> None:
    base = tmp_path / "pyenv" / "3.11"
    executable(base / "bin" / "python3.11")
    executable(base / "lib" / "python3.11" / "os.py")
    (base / "bin" / "python3").symlink_to("python3.11")
    venv = tmp_path / "elsewhere" / "venv"
    executable(venv / "pyvenv.cfg", f"home = {base / 'bin'}\nversion = 3.11.7\n")
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(base / "bin" / "python3")
    script = executable(venv / "bin" / "my-agent", f"#!{venv / 'bin' / 'python'}\n")
    link = tmp_path / "bin" / "my-agent"
    link.parent.mkdir()
    link.symlink_to(script)
    expected = {"pyenv/3.11", "elsewhere/venv"}
    assert own(opened(["python"], tmp_path, path=str(venv / "bin")), tmp_path) == expected
    assert own(opened([str(script)], tmp_path), tmp_path) == expected
    assert own(opened(["my-agent"], tmp_path, path=str(link.parent)), tmp_path) == {*expected, "bin/my-agent"}


def test_the_root_is_no_environment_of_python(project: Path) -> None:
    assert not opened(["/bin/sh", "agents/agent.py"], project).shows("/etc/passwd")
    assert not opened([os.path.realpath(sys.executable), "-c", ""], project).shows("/etc/passwd")


def test_of_the_home_folder_and_of_shared_folders_single_files_are_shown(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = project.parent
    executable(home / "agent.py")
    monkeypatch.setenv("HOME", str(home))
    assert own(opened(["sh", "agent.py"], home), home) == {"agent.py"}
    assert own(opened(["./agent.py"], home), home) == {"agent.py"}
    monkeypatch.setenv("HOME", str(project))
    assert own(opened(["sh", "agent.py"], home), home) == {"agent.py"}


def test_a_module_is_looked_for_in_the_current_folder(project: Path) -> None:
    python = executable(project.parent / "python" / "bin" / "python")
    assert own(opened([str(python), "-m", "agents.agent"], project), project) == {"."}
    assert own(opened(["sh", "-m", "agents.agent"], project), project) == set()


def test_what_is_private_is_left_out_of_a_folder_that_is_shown(project: Path) -> None:
    executable(project / "run.py")
    executable(project / "runs" / "now" / "secrets" / "admin")
    executable(project / "runs" / "before" / "notes")
    (project / "latest").symlink_to("runs/now")
    (project / "everything").symlink_to(".")
    token = executable(project / "token")
    found = opened(["sh", "run.py"], project, private=[project / "runs" / "now", token])
    assert own(found, project) == {"agents", "data.json", "run.py", "runs/before"}


def test_a_user_can_show_more(project: Path) -> None:
    found = opened(["sh", "agents/agent.py"], project, visible=["data.json", str(project.parent / ".ssh")])
    assert own(found, project.parent) == {".ssh", "project/agents", "project/data.json"}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "cannot show nothing: .*/nothing does not exist"),
        ("runs/secret", "cannot show runs/secret: it is in a private folder"),
        ("/", "cannot show /: each box has one of its own"),
        ("/tmp", "cannot show /tmp: each box has one of its own"),
        ("/proc/self", "cannot show /proc/self: each box has one of its own"),
    ],
)
def test_what_cannot_be_shown_is_named(path: str, message: str, project: Path) -> None:
    executable(project / "runs" / "secret")
    with pytest.raises(ConfigError, match=message):
        opened(["sh"], project, visible=[path], private=[project / "runs"])


def test_a_program_that_cannot_run_is_named(project: Path) -> None:
    with pytest.raises(ConfigError, match="'ghost' cannot be started: no such program"):
        opened(["ghost"], project)
    with pytest.raises(ConfigError, match=r"agent.py is in a private folder of this run"):
        opened(["agents/agent.py"], project, private=[project])
    shim = executable(project / "shims" / "python", "#!/bin/sh\n")
    with pytest.raises(ConfigError, match="files that the sandbox hides"):
        opened(["python"], project, path=str(shim.parent))
    executable(project / "loop", f"#!{project / 'loop'}\n")
    assert own(opened(["./loop"], project), project) == {"."}


def test_the_current_folder_is_tmp_if_nothing_of_it_is_shown(project: Path) -> None:
    assert opened(["sh"], project).folder == "/tmp"
    assert opened(["sh"], Path("/usr/lib")).folder == "/usr/lib"


def test_files_below_tmp_are_shown_in_the_programs_own_tmp(project: Path) -> None:
    found = Openings(8080, (("/data/a", "/tmp/a"), ("/usr", "/usr")), "/usr/bin/sh")
    command = found.command(["sh"], {}, limits=CommandLimits(1.0))
    assert (command.kept, command.folder, command.program) == (("/tmp/a",), "/tmp", "/usr/bin/sh")
    assert not NO_OPENINGS.shows("/")
