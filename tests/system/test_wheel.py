"""The wheels, built, installed into an environment of their own, and used outside of the repository.

The environment sees this Python's other packages through a folder of links, so nothing is downloaded;
tests/long/test_wheel_install.py installs the dependencies too.
"""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from astraflow.addons.tiny_models.spec import load_spec
from astraflow.addons.tiny_models.tiny import model_fingerprint
from drivers.system_driver import ROOT, astraflow, environment
from drivers.weight_files import write_model_folder

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("wheel"),  # one worker builds and installs the wheels
]

SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
BUILD = (sys.executable, "-m", "hatchling", "build")
EASIER = (
    "tasks.reward={name: format, pattern: '.*[0-4]'}",
    "policies.actor.sampling.max_tokens=4",
    "policies.actor.table.groups_per_batch=8",
    "policies.actor.train={steps: 10, lr: 0.01}",
    "eval.every=10",
)
SOURCES = (ROOT, *sorted((ROOT / "packages").iterdir()))


@dataclass(frozen=True)
class Installed:
    """An environment with the wheels, and a folder to work in."""

    folder: Path
    work: Path

    @property
    def site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def run(self, *argv: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """A command of the environment, as somebody types it who has activated it."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        inherited = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
        return subprocess.run(
            argv,
            cwd=cwd or self.work,
            env={**inherited, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )

    def content(self) -> set[str]:
        """What is in the environment, but for the compiled files that Python may add."""
        files = (path for path in self.folder.rglob("*") if "__pycache__" not in path.parts)
        return {path.relative_to(self.folder).as_posix() for path in files}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels and source archives, built from the working tree."""
    folder = tmp_path_factory.mktemp("dist")
    for source in SOURCES:
        subprocess.run([*BUILD, "-d", str(folder)], cwd=source, check=True)
    assert len(list(folder.iterdir())) == 2 * len(SOURCES) == 6
    return folder


@pytest.fixture(scope="module")
def wheels(dist: Path) -> list[str]:
    """The wheels; the core's is the first."""
    return sorted(map(str, dist.glob("*.whl")), key=lambda path: not Path(path).name.startswith("astraflow-"))


@contextmanager
def environment_of(folder: Path, wheels: list[str], others: Iterable[str]) -> Iterator[Installed]:
    """An environment with these wheels, and these of this Python's packages; nobody can write to it."""
    links = folder / "others"
    links.mkdir()
    for name in others:
        (links / name).symlink_to(SITE_PACKAGES / name)
    made = Installed(folder / "venv", folder / "work")
    made.work.mkdir()
    venv.create(made.folder, symlinks=True)
    (made.site_packages / "others.pth").write_text(f"{links}\n")
    into = ["--python", str(made.folder / "bin" / "python")]
    subprocess.run([*PIP, *into, "install", "--no-deps", "--no-index", *wheels], check=True)
    for path in made.site_packages.rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    yield made
    for path in made.site_packages.rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o200)


@pytest.fixture(scope="module")
def installed(wheels: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The wheels, with everything that this Python has."""
    others = [path.name for path in SITE_PACKAGES.iterdir() if "astraflow" not in path.name]
    with environment_of(tmp_path_factory.mktemp("installed"), wheels, others) as made:
        yield made


@pytest.fixture(scope="module")
def bare(wheels: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The core's wheel with its dependencies, as `pip install WHEEL` leaves it."""
    with environment_of(tmp_path_factory.mktemp("bare"), wheels[:1], files_of(required("astraflow"))) as made:
        yield made


@pytest.fixture(scope="module")
def quickstart(wheels: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The core's wheel with the extra `quickstart`, as the README installs it."""
    others = files_of(required("astraflow[quickstart]"))
    with environment_of(tmp_path_factory.mktemp("quickstart"), wheels[:1], others) as made:
        yield made


def required(line: str) -> set[str]:
    """The distributions that a requirement needs, and theirs."""
    needed: set[str] = set()
    seen: set[tuple[str, str]] = set()
    rest = [Requirement(line)]
    while rest:
        requirement = rest.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        needed.add(name)
        # The empty extra stands for what is needed without one.
        for extra in {"", *requirement.extras} - {extra for other, extra in seen if other == name}:
            seen.add((name, extra))
            others = map(Requirement, importlib.metadata.requires(name) or ())
            rest += [other for other in others if is_needed(other, extra)]
    return needed - {"astraflow"}


def is_needed(requirement: Requirement, extra: str) -> bool:
    """Whether a distribution needs another on this machine, with one of its extras."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def files_of(distributions: set[str]) -> set[str]:
    """The files and folders of distributions in `site-packages`."""
    return {
        path.parts[0]
        for name in distributions
        for path in importlib.metadata.files(name) or ()
        if path.parts[0] not in {"..", "__pycache__"}
    }


def test_the_extra_test_has_all_that_test_files_import() -> None:
    """On a fresh machine, `make test` installs nothing else."""
    needed = required("astraflow[test]")
    found = importlib.metadata.packages_distributions()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for name in {module.partition(".")[0] for module in modules} & found.keys():
                makers = {re.sub(r"[-_.]+", "-", maker).lower() for maker in found[name]}
                assert makers & {*needed, "astraflow", "astraflow-conformance"}, (path, name)


def test_a_source_archive_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    """The wheels of the fixture are built from the checkout, these from what the archives contain."""
    for archive in dist.glob("*.tar.gz"):
        shutil.unpack_archive(archive, tmp_path, filter="data")
        folder = tmp_path / archive.name.removesuffix(".tar.gz")
        subprocess.run([*BUILD, "-t", "wheel", "-d", str(tmp_path / "built")], cwd=folder, check=True)
    built = list((tmp_path / "built").iterdir())
    assert len(built) == len(SOURCES)
    for wheel in built:
        assert content_of(wheel) == content_of(dist / wheel.name)


def content_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_is_what_runs(installed: Installed) -> None:
    done = installed.run("python", "-c", "import astraflow; print(astraflow.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(installed.folder), done.stderr
    assert installed.run("astraflow", "--version").stdout.startswith("astraflow ")
    assert "rollout" in installed.run("astraflow", "conformance", "--help").stdout


def test_recipes_models_and_examples_are_inside(installed: Installed) -> None:
    listed = installed.run("astraflow", "recipes", "list").stdout
    assert listed == astraflow("recipes", "list").stdout
    copied = installed.run("astraflow", "recipes", "copy", "--all", "--to", "everything")
    assert copied.returncode == 0, copied.stderr
    tracked = subprocess.run(
        ["git", "ls-files", "recipes", "examples"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    copies = (path for path in (installed.work / "everything").rglob("*") if path.is_file())
    assert {path.relative_to(installed.work / "everything").as_posix() for path in copies} == set(
        tracked.stdout.split()
    )


def test_a_copied_recipe_runs_as_the_documentation_says(installed: Installed) -> None:
    assert installed.run("astraflow", "recipes", "copy", "pair").returncode == 0
    done = installed.run("astraflow", "run", "recipes/pair.yaml", "model=tiny", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "examples.04_two_policies:solve_and_verify" in done.stdout


def test_a_recipe_is_run_by_its_name(quickstart: Installed) -> None:
    """Its tiny model is built here, and the rows that stand for its data set are in the wheel."""
    done = quickstart.run("astraflow", "run", "math/tiny", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "name: math\n" in done.stdout
    tried = quickstart.run("astraflow", "try", "math/1.7b", "model=tiny", "scale=smoke")
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert "What is 1 + 6?" in tried.stdout
    assert (quickstart.work / "models" / "tiny" / "config.json").is_file()


def test_the_demo_learns(quickstart: Installed, models: Path) -> None:
    """The environment has nothing that the extra doesn't install.

    The task, which of two halves of the digits ends an answer, is easier than the demo's own: it takes a few
    steps, and a model that hardly knows anything. `tests/long/test_wheel_install.py` has the demo's own task.
    """
    model = quickstart.work / "astraflow-demo" / "model"
    shutil.copytree(models / "actor", model)
    marker = json.loads((model / "astraflow_model.json").read_text())
    marker["fingerprint"] = model_fingerprint(load_spec(ROOT / "recipes" / "models" / "quickstart.yaml"))
    (model / "astraflow_model.json").write_text(json.dumps(marker))
    before = quickstart.content()
    done = quickstart.run("astraflow", "demo", *EASIER)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("reward rose from 0."), done.stdout
    assert {path.name for path in (quickstart.work / "astraflow-demo").iterdir()} == {"model", "run"}
    assert quickstart.content() == before


@pytest.mark.long
def test_a_new_project_passes_its_test(installed: Installed) -> None:
    assert installed.run("astraflow", "init", "project").returncode == 0
    project = installed.work / "project"
    done = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_core_alone_names_the_command_that_installs_what_is_missing(bare: Installed) -> None:
    """It has no torch. Each command says so in one line: of a run, that of the process that cannot start."""
    assert "torch" not in required("astraflow")
    install = "which the extra quickstart installs: pip install 'astraflow[quickstart]'"
    spec = str(ROOT / "recipes" / "models" / "quickstart.yaml")
    for argv in (["demo"], ["model", "init", spec, "--out", "none"]):
        done = bare.run("astraflow", *argv)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert " needs torch" in done.stderr
        assert f"{install} (without an NVIDIA GPU, first: " in done.stderr
    tasks = bare.work / "tasks.jsonl"
    tasks.write_text("".join(f'{{"prompt": "{num}+1=", "answer": "{num + 1}"}}\n' for num in range(200)))
    model = write_model_folder(bare.work / "model")  # nobody gets as far as to read its weights
    policy = f"{{model: {model}, sampling: {{max_tokens: 8}}, train: {{steps: 1}}}}"
    (bare.work / "bare.yaml").write_text(
        f"name: bare\ntasks: {{sources: {{sums: {{name: jsonl, path: {tasks}}}}}}}\n"
        f"policies: {{actor: {policy}}}\nrollout: {{services: 1, engine: {{name: torch, max_context: 64}}}}\n"
    )
    ran = bare.run("astraflow", "run", "bare.yaml", "--plain")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert re.search(r"failed for good \(exit code 2, 1 in a row\): error: `astraflow \w+` needs", ran.stderr)
    assert install in ran.stderr
    examined = bare.run("astraflow", "doctor", "bare.yaml")
    assert f"fail  tokenizer of actor: this check needs transformers, {install}" in (examined.stdout), (
        examined.stdout + examined.stderr
    )
