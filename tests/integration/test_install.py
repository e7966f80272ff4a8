"""How `make` installs packages: with uv, which gets pip's settings, or else with pip."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drivers.docs_driver import tool
from drivers.package_driver import environment_with_pip
from drivers.system_driver import ROOT
from drivers.wheel_driver import make_wheel

INSTALL = ROOT / "tools" / "install.py"
UV = shutil.which("uv") or shutil.which(Path(sys.executable).with_name("uv"))

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.xdist_group("install"),  # one worker makes the environment
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing but pip."""
    return environment_with_pip(tmp_path_factory.mktemp("environment") / "venv")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with two versions of `pebbles`."""
    for version in ("1.0", "2.0"):
        make_wheel(tmp_path / "wheels", "pebbles", version)
    return tmp_path / "wheels"


def install(environment: Path, *arguments: str, path: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """Installs into the environment, from which `pebbles` is gone, without a network."""
    for left in environment.glob("lib/python*/site-packages/pebbles-*"):
        shutil.rmtree(left)
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("INSTALLER", "PIP_", "UV_"))
    }
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    return subprocess.run(
        [str(environment / "bin" / "python"), str(INSTALL), *arguments],
        env={**inherited, **pip, "PATH": path, **more},
        capture_output=True,
        text=True,
        check=False,
    )


def installed(environment: Path) -> list[str]:
    """The versions of `pebbles`, each with the program that installed it."""
    found = environment.glob("lib/python*/site-packages/pebbles-*.dist-info")
    return [
        f"{path.stem.removeprefix('pebbles-')} {(path / 'INSTALLER').read_text().strip()}" for path in found
    ]


def program(folder: Path, text: str) -> str:
    """A folder for PATH whose `uv` is a shell script."""
    folder.mkdir()
    (folder / "uv").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "uv").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.skipif(UV is None, reason="uv is not installed")
def test_uv_installs_with_the_folders_and_constraints_of_pip(
    environment: Path, wheels: Path, tmp_path: Path
) -> None:
    (tmp_path / "limits.txt").write_text("pebbles<2\n")
    done = install(
        environment,
        "pebbles",
        path=f"{Path(str(UV)).parent}{os.pathsep}{os.environ['PATH']}",
        PIP_FIND_LINKS=str(wheels),
        PIP_CONSTRAINT=str(tmp_path / "limits.txt"),
    )
    assert done.returncode == 0, done.stderr
    assert installed(environment) == ["1.0 uv"]


def test_pip_installs_what_uv_cannot(environment: Path, wheels: Path, tmp_path: Path) -> None:
    path = program(tmp_path / "bin", "echo uv was asked >&2; exit 2")
    done = install(environment, "pebbles", path=path, PIP_FIND_LINKS=str(wheels))
    assert (done.returncode, done.stderr) == (0, "")
    assert installed(environment) == ["2.0 pip"]


def test_pip_installs_where_nobody_has_uv(environment: Path, wheels: Path) -> None:
    done = install(environment, "pebbles", path="/nowhere", PIP_FIND_LINKS=str(wheels))
    assert (done.returncode, done.stderr) == (0, "")
    assert installed(environment) == ["2.0 pip"]


def test_what_cannot_be_installed_is_said_in_pips_words(environment: Path, tmp_path: Path) -> None:
    path = program(tmp_path / "bin", "exit 1")
    done = install(environment, "pebbles", path=path)
    assert done.returncode == 1
    assert "No matching distribution found for pebbles" in done.stderr


@pytest.mark.parametrize("more", [{"INSTALLER": "pip"}, {"PIP_PREFER_BINARY": "1"}], ids=["asked", "setting"])
def test_uv_is_left_out_if_asked_or_if_pip_has_a_setting_that_it_lacks(
    environment: Path, wheels: Path, tmp_path: Path, more: dict[str, str]
) -> None:
    asked = tmp_path / "asked"
    path = program(tmp_path / "bin", f"touch {asked}")
    done = install(environment, "pebbles", path=path, PIP_FIND_LINKS=str(wheels), **more)
    assert done.returncode == 0, done.stderr
    assert installed(environment) == ["2.0 pip"]
    assert not asked.exists()
    assert ("prefer-binary" in done.stdout) == ("PIP_PREFER_BINARY" in more)


def test_pips_files_and_variables_become_options_of_uv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tool("install")
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://one/simple\nextra-index-url =\n  https://two/simple\n  https://three/simple\n"
        "[install]\nno-index = false\npre = true\n[download]\nuser = true\n"
    )
    for name in [name for name in os.environ if name.startswith(("PIP_", "SSL_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror/simple")
    monkeypatch.setenv("PIP_CERT", "/certificates")
    settings = {
        name: value
        for name, value in made.pip_settings().items()
        if name in {"index-url", "extra-index-url", "no-index", "pre", "cert", "user"}
    }
    options, variables = made.uv_settings(settings)
    assert sorted(zip(options[::2], options[1::2], strict=True)) == [
        ("--default-index", "https://mirror/simple"),
        ("--index", "https://three/simple"),
        ("--index", "https://two/simple"),
        ("--index-strategy", "unsafe-best-match"),
        ("--prerelease", "allow"),
    ]
    assert variables == {"SSL_CERT_FILE": "/certificates"}
