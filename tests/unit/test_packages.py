"""The packages beside the product: what they add if they are installed, what is said if they are not."""

import json
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

import astraflow
from astraflow.config import Config, Use, Variant, parse_config, with_installed
from astraflow.errors import ConfigError
from astraflow.models.model_folder import check_model_folder
from drivers.prepared_python import PreparedPython, command
from drivers.weight_files import write_model_folder

ROOT = Path(__file__).parents[2]
PACKAGES = sorted((ROOT / "packages").glob("*/pyproject.toml"))
RECIPE: dict[str, Any] = {
    "name": "r",
    "tasks": {"sources": {"train": {"name": "reasoning_gym", "dataset": "basic_arithmetic"}}},
    "policies": {"actor": {"model": "m"}},
}


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.name)
def test_a_package_has_the_version_of_the_core_and_needs_exactly_that(path: Path) -> None:
    project = tomllib.loads(path.read_text())["project"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert project["version"] == astraflow.__version__
    assert f"astraflow=={astraflow.__version__}" in project["dependencies"]
    assert extras[project["name"].removeprefix("astraflow-")] == [
        f"{project['name']}=={astraflow.__version__}"
    ]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreparedPython]:
    """A Python that has everything that this one has installed, but not our packages beside the product."""
    folder = tmp_path_factory.mktemp("site-packages")
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "astraflow_" not in path.name:
            (folder / path.name).symlink_to(path)
    start = f"import sys; sys.path += [{str(ROOT / 'src')!r}, {str(folder)!r}]; sys.argv[0] = 'astraflow'"
    start += "\nimport astraflow.run.preflight"
    with PreparedPython(tmp_path_factory.mktemp("bare"), start, "-I", "-S") as python:
        yield python


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that is judged once for all processes."""
    folder = write_model_folder(tmp_path_factory.mktemp("models") / "m")
    check_model_folder(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("conformance", ()),
        ("conformance", ("dataflow", "http://127.0.0.1:1", "--quick")),
        ("conformance", ("--help",)),
        ("plan", ("quickstart",)),
    ],
)
def test_a_command_without_its_package_says_what_to_install(
    bare: PreparedPython, tmp_path: Path, name: str, arguments: tuple[str, ...]
) -> None:
    done = bare.run(command(name, *arguments), tmp_path)
    assert done.returncode == 2
    assert done.stderr == f'error: `astraflow {name}` needs a package: pip install "astraflow[{name}]"\n'


@pytest.mark.parametrize("key", ["rollout.engine", "policies.actor.train.backend", "workflow"])
def test_a_recipe_that_names_a_missing_package_is_told_what_to_install(
    bare: PreparedPython, model: Path, key: str
) -> None:
    path = model.with_name("recipe.yaml")
    path.write_text(json.dumps(RECIPE))
    overrides = (f"{key}={{name: paced}}", f"model={model}")
    done = bare.run(command("run", str(path), "--dry-run", *overrides), model.parent)
    assert done.returncode == 2
    assert done.stderr == (
        f'error: {path}: {key}.name = "paced" needs a package: pip install "astraflow[paced]"\n'
    )


class Plain(Config):
    name: Literal["plain"] = "plain"


CHOICE = Plain | Variant | Use
MODULE = """
from typing import Literal
from astraflow.config import Config, Variant

class Fast(Variant):
    name: Literal["fast"] = "fast"
    size: int = 1

class Other(Config):
    name: Literal["other"] = "other"

class Twin(Variant):
    name: Literal["plain"] = "plain"
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    """A package as an installer leaves it, on the path."""
    info = folder / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[astraflow.tests]\n{entry}\n")
    (folder / "somebodys_variants.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "somebodys_variants", raising=False)


def test_an_installed_variant_stands_where_the_choice_has_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "fast = somebodys_variants:Fast")
    choice = with_installed(CHOICE, "astraflow.tests")
    names = [member.model_fields["name"].default for member in get_args(get_args(choice)[0])]
    assert names == ["plain", "fast", "use"]
    section = type("Section", (Config,), {"__annotations__": {"part": choice}})
    parsed = section.model_validate_json('{"part": {"name": "fast", "size": 3}}')
    assert (parsed.part.name, parsed.part.size) == ("fast", 3)
    assert section.model_validate_json(parsed.model_dump_json()) == parsed


def test_without_an_installed_variant_the_choice_is_the_built_in_ones() -> None:
    assert get_args(with_installed(CHOICE, "astraflow.tests"))[0] == Plain | Use


def test_a_variant_of_an_addon_that_is_left_out_is_skipped_and_named_to_who_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "faster = astraflow.addons.no_such_addon.config:Faster")
    section = type(
        "Section", (Config,), {"__annotations__": {"part": with_installed(CHOICE, "astraflow.tests")}}
    )
    with pytest.raises(
        ConfigError, match=r'part\.name = "faster" needs astraflow\.addons\.no_such_addon, which'
    ):
        parse_config({"part": {"name": "faster"}}, section)
    with pytest.raises(ConfigError, match=r'part\.name = "fastest" is not a part'):
        parse_config({"part": {"name": "fastest"}}, section)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "fast = somebodys_variants:Slow",
            r"somebodys_variants:Slow \(somebodys, .*'fast'.*\) does not load",
        ),
        ("fast = no_such_module:Fast", r"no_such_module:Fast \(somebodys, .*\) does not load"),
        ("quick = somebodys_variants:Fast", "is not a Variant whose `name` is 'quick'"),
        ("other = somebodys_variants:Other", "is not a Variant whose `name` is 'other'"),
        ("plain = somebodys_variants:Twin", "two variants of astraflow.tests have the name 'plain'"),
    ],
)
def test_a_package_whose_variant_does_not_fit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, message: str
) -> None:
    install(tmp_path, monkeypatch, entry)
    with pytest.raises(ConfigError, match=message):
        with_installed(CHOICE, "astraflow.tests")
