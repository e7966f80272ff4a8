"""Writes a bundle: everything that a machine without a network needs to run a recipe.

    wheels/            the packages that are installed here, as wheels (`packed_wheels`)
    requirements.txt   their versions
    wheels-vllm/ ...   the same of the inference server's own environment, if the services start one
    models/ data/      the models of the policies, and the files and folders that the recipe reads
    modules            the user's modules that the recipe names, at the same relative paths
    recipe.yaml        the resolved recipe; its paths are relative to the bundle's folder
    checksums.txt      checksums of all other files, in the format of `sha256sum -c`
    install            a shell script: compares the checksums, creates environments, and installs into them

The other machine needs the same platform and Python version, which `install` checks.
"""

import json
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.metadata import metadata, packages_distributions
from pathlib import Path
from typing import Any

from astraflow.addons.bundle.bundle_files import (
    CHECKSUMS,
    copy_files,
    files_of,
    write_checksums,
)
from astraflow.addons.bundle.packed_wheels import needed_distributions, pack_wheels
from astraflow.addons.bundle.server_packages import Server, bundled_server
from astraflow.config import Config, dump_yaml, parse_config
from astraflow.errors import ConfigError, DataError
from astraflow.models.hub import is_hub_name, model_path, split_revision
from astraflow.recipe.model_checks import models_of
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_plan import uses
from astraflow.user_input.mistakes import hint
from astraflow.user_input.new_folder import is_free, new_folder
from astraflow.user_input.own_sources import own_files
from astraflow.user_input.user_files import is_there

__all__ = ["bundled", "install_script", "write_bundle"]

_JsonMap = dict[str, Any]
_PATH_KEYS = frozenset({"path", "folder"})
"""Keys of sources and components whose values are files or folders to read."""
_READ_SECTIONS = ("tasks", "eval", "workflow")
"""Sections of a recipe that read files, in addition to the policies' models."""

_INSTALL = """#!/bin/sh
# Installs this bundle without a network: sh install [FOLDER OF THE NEW ENVIRONMENT]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${{PYTHON:-python3}}
environment=${{1:-$here/.venv}}
"$python" - "$here" <<'CHECK'
import hashlib, pathlib, sys, sysconfig
here = pathlib.Path(sys.argv[1])
this = ("%d.%d" % sys.version_info[:2], sysconfig.get_platform())
if this != ({version!r}, {platform!r}):
    sys.exit("error: the bundle is for Python {version} on {platform}, this is Python %s on %s; set "
             "PYTHON to another one, or make the bundle on a machine like this" % this)
for line in (here / {checksums!r}).read_text(encoding="utf-8").split("\\n")[:-1]:
    digest, name = line.split("  ", 1)
    file = here / name
    if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
        sys.exit("error: %s is missing or damaged; copy the bundle again" % file)
CHECK
make_environment() {{
    "$python" -m venv "$1"
    "$1/bin/python" -m pip --isolated --disable-pip-version-check install --quiet --no-index --no-deps \\
        --find-links "$here/wheels$2" -r "$here/requirements$2.txt"
}}
make_environment "$environment" ""
for server in {servers}; do
    make_environment "$here/.venv-$server" "-$server"
done
echo "installed; next: cd $here && $environment/bin/astraflow run recipe.yaml"
"""


def write_bundle(
    recipe: Recipe, out: Path, *, extras: Sequence[str] = (), tell: Callable[[str], None] = print
) -> None:
    """Writes the bundle of a recipe into a new or empty folder.

    `extras` are additional extras of astraflow. The folder appears only when it is complete, so a failure
    leaves nothing behind.

    Raises: DataError or ConfigError if something that the recipe reads is missing or can't be bundled, or if
    a distribution can't be packed.
    """
    if out.is_symlink() or not is_free(out):
        raise DataError(f"{out} exists and is not an empty folder; choose another one")
    server = bundled_server(recipe)
    moved, copies = bundled(recipe, server)
    files = {place: files_of(source) for place, source in copies.items()}
    for source in copies.values():
        if out.resolve().is_relative_to(source.resolve()):
            raise DataError(f"{out} is in {source}, which the bundle holds; choose a folder elsewhere")
    distributions = needed_distributions(_requirements(recipe, extras))
    with new_folder(out) as building:
        for place, contents in files.items():
            tell(f"copying {copies[place]}")
            copy_files(contents, building / place)
        tell(f"packing {len(distributions)} installed packages")
        pack_wheels(distributions, building)
        if server is not None:
            tell(f"packing {len(server.distributions)} packages of {server.name}")
            pack_wheels(server.distributions, building, f"-{server.name}")
        (building / "recipe.yaml").write_text(dump_yaml(moved), encoding="utf-8")
        install = building / "install"
        install.write_text(install_script(server.name if server else ""))
        install.chmod(0o755)
        num_bytes = write_checksums(building)
    tell(f"{out}: {num_bytes / 1e6:.0f} MB; copy it, then there: sh {out.name}/install")


def install_script(server: str) -> str:
    """Returns the script `install`. `server`: the name of the inference server; empty without one."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    platform = sysconfig.get_platform()
    return _INSTALL.format(version=version, platform=platform, checksums=CHECKSUMS, servers=server)


def bundled(recipe: Recipe, server: Server | None = None) -> tuple[Recipe, dict[str, Path]]:
    """Returns the recipe with the paths of a bundle, and the file or folder here of each of these paths.

    Raises: DataError or ConfigError if something that the recipe reads is missing or can't be bundled.
    """
    mapping: _JsonMap = json.loads(recipe.model_dump_json())
    copies = _models(recipe, mapping)
    for section in _READ_SECTIONS:
        _read_by(mapping[section], section, copies)
    copies |= _own_modules(recipe)
    if server is not None:
        mapping["rollout"]["engine"]["python"] = server.python
    return parse_config(mapping, Recipe, where="the bundle's recipe"), copies


def _requirements(recipe: Recipe, extras: Sequence[str]) -> list[str]:
    """Returns the packages that the recipe needs: astraflow, and those that contain its components.

    Raises: ConfigError if astraflow has no such extra.
    """
    known = metadata("astraflow").get_all("Provides-Extra") or []
    for extra in extras:
        if extra not in known:
            raise ConfigError(f"--extra {extra} is not an extra of astraflow{hint(extra, known)}")
    owners = packages_distributions()
    modules = {type(part).__module__ for part in _parts(recipe)} | {
        use.use.partition(":")[0] for use in uses(recipe)
    }
    tops = {module.partition(".")[0] for module in modules}
    names = {owner for top in tops for owner in owners.get(top, ())} - {"astraflow"}
    return [f"astraflow[{','.join(dict.fromkeys(('quickstart', *extras)))}]", "pip", *sorted(names)]


def _parts(config: Config) -> list[Config]:
    """Returns a config and all configs inside it."""
    parts = [config]
    for key in type(config).model_fields:
        value: Any = getattr(config, key)
        inside: Sequence[Any] = [*value.values()] if isinstance(value, dict) else [value]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType] - any mapping of a recipe
        inside = [each for part in inside for each in (part if isinstance(part, tuple) else (part,))]  # pyright: ignore[reportUnknownVariableType] - any list of a recipe
        parts += [part for each in inside if isinstance(each, Config) for part in _parts(each)]
    return parts


def _models(recipe: Recipe, mapping: _JsonMap) -> dict[str, Path]:
    """Maps the path of each model in the bundle to its folder here, and writes the paths into `mapping`.

    Raises: DataError if a model is missing.
    """
    copies: dict[str, Path] = {}
    for name, policy in recipe.policies.items():
        for where, model in models_of(name, policy).items():
            folder = model_path(model)
            if not (folder / "config.json").is_file():
                raise DataError(
                    f"{where} = {model!r} is not a model here (there is no config.json); build it "
                    "(`astraflow model init`) or download it first"
                )
            *sections, key = where.removeprefix(f"policies.{name}.").split(".")
            section = mapping["policies"][name]
            for part in sections:
                section = section[part]
            own = split_revision(model)[0] if is_hub_name(model) else Path(model).expanduser()
            section[key] = f"./{_placed(copies, 'models', folder, name=Path(own).name)}"
    return copies


def _placed(copies: dict[str, Path], folder: str, source: Path, *, name: str = "") -> str:
    """Returns the path of a file or folder in the bundle; a known source keeps its path.

    `name` is its name in the bundle; if empty, its name here.
    """
    source = source.resolve()
    name = name or source.name
    for place, known in copies.items():
        if known == source:
            return place
    place = f"{folder}/{name}"
    number = 1
    while place in copies:
        number += 1
        place = f"{folder}/{number}-{name}"
    copies[place] = source
    return place


def _read_by(node: Any, where: str, copies: dict[str, Path]) -> None:
    """Assigns paths in the bundle to the files and folders that a section names, and writes them into it.

    Raises: DataError if a file or folder is missing.
    """
    if isinstance(node, list):
        for idx, each in enumerate(node):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - any list of a recipe
            _read_by(each, f"{where}.{idx}", copies)
    if not isinstance(node, dict):
        return
    section: _JsonMap = node  # pyright: ignore[reportUnknownVariableType] - any mapping of a recipe
    # The arguments of a user's own component may have the same keys.
    if section.get("name") == "prepared" and section.get("folder") == "" and "dataset" in section:
        section["folder"] = f"data/{section['dataset']}"
    for key, value in section.items():
        if isinstance(value, str) and value and key in _PATH_KEYS:
            if not is_there(Path(value)):
                raise DataError(
                    f"{where}.{key} = {value!r} is not here, so it cannot go into the bundle; prepare or "
                    "download it first (`astraflow data prepare`, or save a data set of the hub to a "
                    "folder), and name that"
                )
            section[key] = f"./{_placed(copies, 'data', Path(value))}"
        else:
            _read_by(value, f"{where}.{key}", copies)


def _own_modules(recipe: Recipe) -> dict[str, Path]:
    """Maps paths in the bundle to the files of modules that the user wrote. Raises: ConfigError."""
    modules: dict[str, Path] = {}
    for use in uses(recipe):
        module = use.use.partition(":")[0]
        files = own_files(module)
        if not files:
            raise ConfigError(
                f"{use.use}: the module is not installed here as a file, so it cannot be bundled"
            )
        for file in files:
            if "site-packages" not in file.parts and "dist-packages" not in file.parts:
                modules[_place_of_module(file)] = file
    return modules


def _place_of_module(file: Path) -> str:
    """Returns the path of a module's file relative to the folder in which Python finds it."""
    folders = [
        Path(folder).resolve()
        for folder in sys.path
        if folder and file.is_relative_to(Path(folder).resolve())
    ]
    nearest = max(folders, key=lambda folder: len(folder.parts), default=file.parent)
    return file.relative_to(nearest).as_posix()
