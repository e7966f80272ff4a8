"""Reads Harbor task folders, and checks that the sandbox can run them.

    instruction.md          the prompt for the agent
    task.toml               limits and settings, schema 1.x
    environment/            a Dockerfile, and files that it copies
    solution/solve.sh       a reference solution; optional
    tests/test.sh           writes /logs/verifier/reward.txt or reward.json

A box shows this machine's own programs, so an image can only be a plain base with added files. Features that
a box doesn't have are refused by name. Only settings that don't affect an episode are ignored.

Source: https://harborframework.com/docs/tasks.
"""

import math
import os
import re
import shlex
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn

import msgspec

from astraflow.addons.sandbox.shell import BoxFile, checked_path
from astraflow.errors import ConfigError

__all__ = ["HarborImage", "HarborTask", "harbor_image", "harbor_task", "read_folder"]

_MAX_FILES = 2_000
_MAX_BYTES = 16 << 20
"""Largest size of all files of a folder together."""
_MOST_S = 3_000
"""Longest time limit of a task in the sandbox. In a container, the episode's own deadline is enough."""
_SIZE = re.compile(r"(\d+)([KMGT])i?B?", re.IGNORECASE)
_MIB_PER_UNIT = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_PLAIN = ("bash", "buildpack-deps", "busybox", "debian", "python", "ubuntu")
"""Images with only programs that this machine has too."""
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_DESCRIPTIONS = {f"environment/{name}" for name in ("Dockerfile", *_COMPOSE)}
_DEFAULT_FOLDER = "/app"
"""The agent's folder if the image sets none. Docker uses the root folder, which is read-only here."""
_REMEDY = (
    "the sandbox has this machine's programs, no network, one user, and no services; run such a task in a "
    "container, with `where: podman` or the Harbor task sets of verifiers (docs/environments.md)"
)
_Mode = Literal["public", "no-network", "allowlist"]


class _About(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""
    description: str = ""
    authors: Any = None
    keywords: Any = None


class _Agent(msgspec.Struct, forbid_unknown_fields=True):
    timeout_sec: float | None = None
    user: Any = None
    network_mode: _Mode | None = None
    allowed_hosts: list[str] = []


class _Verifier(msgspec.Struct, forbid_unknown_fields=True):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    user: Any = None
    environment_mode: str = "shared"
    network_mode: _Mode | None = None
    allowed_hosts: list[str] = []


class _Environment(msgspec.Struct, forbid_unknown_fields=True):
    docker_image: str | None = None
    build_timeout_sec: Any = None
    cpus: float = 1
    memory_mb: int = 2048
    storage_mb: int = 10240
    memory: str = ""
    """The same as a size, such as "2G", as in schema 1.0."""
    storage: str = ""
    gpus: int = 0
    gpu_types: Any = None
    env: dict[str, str] = {}
    workdir: str | None = None
    network_mode: _Mode | None = None
    allow_internet: bool = True
    allowed_hosts: list[str] = []
    mcp_servers: list[Any] = []
    healthcheck: Any = None
    skills_dir: Any = None


class _Solution(msgspec.Struct, forbid_unknown_fields=True):
    env: dict[str, str] = {}


class _Config(msgspec.Struct, forbid_unknown_fields=True):
    schema_version: str = "1.0"
    version: str = ""
    task: _About = msgspec.field(default_factory=_About)
    metadata: Any = None
    source: Any = None
    artifacts: Any = None
    agent: _Agent = msgspec.field(default_factory=_Agent)
    verifier: _Verifier = msgspec.field(default_factory=_Verifier)
    environment: _Environment = msgspec.field(default_factory=_Environment)
    solution: _Solution = msgspec.field(default_factory=_Solution)
    steps: list[Any] = []


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task folder in the form that the sandbox runs. Files are named by their absolute paths in the box."""

    name: str
    source: str
    """The task folder; in a container, the image is built from it."""
    instruction: str
    folder: str
    """The folder in which commands run."""
    files: Mapping[str, BoxFile]
    """The files that the image copies."""
    tests: Mapping[str, BoxFile]
    solution: Mapping[str, BoxFile]
    """Empty without a reference solution."""
    agent_s: float
    """Time limit for all commands of the agent together; 0: no limit."""
    verifier_s: float
    memory_mb: int
    storage_mb: int
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    verifier_env: Mapping[str, str] = field(default_factory=dict[str, str])
    solution_env: Mapping[str, str] = field(default_factory=dict[str, str])
    image: str = ""
    """In a container: the image that the task names, made from its Dockerfile already; empty: build that."""
    cpus: float = 1.0
    has_network: bool = False


def read_folder(folder: Path, *, in_container: bool = False) -> dict[str, BoxFile]:
    """Reads all files of a folder, by their relative paths. A container has those of its image itself, so
    only what describes the image is read.

    Raises: ConfigError for links, for anything else that isn't a regular file, and for too many files.
    """
    files: dict[str, BoxFile] = {}
    total = 0
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        if in_container and name.startswith("environment/") and name not in _DESCRIPTIONS:
            continue
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise ConfigError(f"{path} is a link to {os.readlink(path)!r}; a task folder may have only files")
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a regular file")
        total += status.st_size
        if len(files) == _MAX_FILES or total > _MAX_BYTES:
            raise ConfigError(
                f"{folder} has more than {_MAX_FILES:,} files or {_MAX_BYTES >> 20} MiB, which is more than "
                "the sandbox puts into a box"
            )
        files[name] = BoxFile(path.read_bytes(), bool(status.st_mode & stat.S_IXUSR))
    return files


def _walk(folder: Path) -> Iterator[Path]:
    """All files and links in and below a folder, sorted by name. Links are not followed."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path


def harbor_task(
    files: Mapping[str, BoxFile], where: str, *, without_network: bool = False, in_container: bool = False
) -> HarborTask:
    """Makes the task of a folder. `where`: the folder's name in errors. `without_network`: accept tasks that
    may use the network (Harbor's default), and run them without it. `in_container`: a container has any image
    and network.

    Raises: ConfigError if the folder isn't a task, or needs something that isn't supported.
    """
    config = _config(_text(files, "task.toml", where), where)
    _check_config(config, where, without_network=without_network, in_container=in_container)
    for needed in ("instruction.md", "tests/test.sh"):
        if needed not in files:
            raise ConfigError(f"{where} has no {needed}; is it a Harbor task folder?")
    context = {
        name.removeprefix("environment/"): file
        for name, file in files.items()
        if name.startswith("environment/")
    }
    environment = config.environment
    if in_container:
        image = _container_image(context, where, environment)
    else:
        image = harbor_image(
            context, where, docker_image=environment.docker_image, workdir=environment.workdir
        )
    most_s = math.inf if in_container else _MOST_S
    return HarborTask(
        name=config.task.name or where,
        source=where,
        instruction=_text(files, "instruction.md", where),
        folder=image.folder,
        files=image.files,
        tests=_below(files, "tests"),
        solution=_below(files, "solution"),
        agent_s=_seconds(config.agent.timeout_sec or 0.0, "agent", where, most_s),
        verifier_s=_seconds(config.verifier.timeout_sec, "verifier", where, most_s),
        memory_mb=environment.memory_mb,
        storage_mb=environment.storage_mb,
        env={**image.env, **environment.env},
        verifier_env=config.verifier.env,
        solution_env=config.solution.env,
        image=environment.docker_image or "",
        cpus=environment.cpus,
        has_network=_base_network(environment) == "public",
    )


def _below(files: Mapping[str, BoxFile], folder: str) -> dict[str, BoxFile]:
    return {f"/{name}": file for name, file in files.items() if name.startswith(f"{folder}/")}


def _text(files: Mapping[str, BoxFile], name: str, where: str) -> str:
    if name not in files:
        raise ConfigError(f"{where} has no {name}; is it a Harbor task folder?")
    try:
        return files[name].content.decode()
    except UnicodeDecodeError as err:
        raise ConfigError(f"{where}/{name} is not UTF-8: {err}") from err


def _refuse(where: str, what: str) -> NoReturn:
    raise ConfigError(f"{where}: {what} is not supported here: {_REMEDY}")


# --- task.toml ------------------------------------------------------------------------------------


def _config(text: str, where: str) -> _Config:
    try:
        config = msgspec.convert(tomllib.loads(text), _Config)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as err:
        raise ConfigError(f"{where}/task.toml: {err}") from err
    return msgspec.structs.replace(config, environment=_with_sizes(config.environment, where))


def _check_config(config: _Config, where: str, *, without_network: bool, in_container: bool) -> None:
    """Refuses settings that the sandbox doesn't support."""
    version = config.version or config.schema_version
    if not version.startswith("1."):
        raise ConfigError(f"{where}/task.toml: schema_version = {version!r}; expected 1.x")
    environment = config.environment
    needed = {
        "[[steps]]": bool(config.steps),
        "agent.user": config.agent.user is not None,
        "verifier.user": config.verifier.user is not None,
        f"verifier.environment_mode = {config.verifier.environment_mode!r}": (
            config.verifier.environment_mode != "shared"
        ),
        "environment.gpus": environment.gpus > 0,
        "environment.mcp_servers": bool(environment.mcp_servers),
        "environment.healthcheck": environment.healthcheck is not None,
        "environment.skills_dir": environment.skills_dir is not None,
    }
    for what, is_needed in needed.items():
        if is_needed:
            _refuse(where, what)
    if environment.memory_mb < 1 or environment.storage_mb < 1:
        raise ConfigError(f"{where}/task.toml: memory_mb and storage_mb must be more than 0")
    if not in_container:
        _check_network(config, where, without_network=without_network)
    for section in (environment, config.verifier, config.solution):
        for name, value in section.env.items():
            if "$" in value:
                _refuse(where, f"the variable {name} = {value!r} of this machine")


def _base_network(environment: _Environment) -> _Mode:
    return environment.network_mode or ("public" if environment.allow_internet else "no-network")


def _check_network(config: _Config, where: str, *, without_network: bool) -> None:
    environment = config.environment
    base = _base_network(environment)
    modes = {
        "environment": base,
        "agent": config.agent.network_mode or base,
        "verifier": config.verifier.network_mode or base,
    }
    for section in (environment, config.agent, config.verifier):
        if section.allowed_hosts:
            modes["allowed_hosts"] = "allowlist"
    for name, mode in modes.items():
        if mode == "allowlist" or (mode == "public" and not without_network):
            hint = "; if the task needs none, pass without_network: true" if mode == "public" else ""
            _refuse(where, f"the network ({name}: {mode}{hint})")


def _seconds(value: float, section: str, where: str, most_s: float) -> float:
    if not 0 <= value <= most_s:
        raise ConfigError(
            f"{where}/task.toml: {section}.timeout_sec = {value}; expected 0 to {most_s:,.0f} s"
        )
    return value


def _with_sizes(environment: _Environment, where: str) -> _Environment:
    """Turns sizes such as "2G" into numbers of MiB. Raises: ConfigError."""
    sizes: dict[str, int] = {}
    for name in ("memory", "storage"):
        text = getattr(environment, name)
        if not text:
            continue
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{where}/task.toml: environment.{name} = {text!r}; expected a size like 2G")
        sizes[f"{name}_mb"] = int(int(match[1]) * _MIB_PER_UNIT[match[2].upper()])
    return msgspec.structs.replace(environment, **sizes)


# --- the image ------------------------------------------------------------------------------------


@dataclass
class HarborImage:
    """What a Dockerfile adds to a plain base. Files are named by their absolute paths in the box."""

    folder: str = ""
    """The folder in which commands run."""
    files: dict[str, BoxFile] = field(default_factory=dict[str, BoxFile])
    env: dict[str, str] = field(default_factory=dict[str, str])


def harbor_image(
    context: Mapping[str, BoxFile], where: str, *, docker_image: str | None, workdir: str | None
) -> HarborImage:
    """Makes the image of an environment.

    `context`: the files of the folder `environment`, by their relative paths. `docker_image`, `workdir`: the
    settings with these names. Without a Dockerfile, these files go into the image's folder, as in Harbor.

    Raises: ConfigError if the sandbox doesn't support the image.
    """
    for name in _COMPOSE:
        if name in context:
            _refuse(where, f"environment/{name}")
    image = HarborImage()
    if docker_image is not None:
        _check_base(docker_image, where)
    elif "Dockerfile" not in context:
        raise ConfigError(f"{where} has neither environment/Dockerfile nor environment.docker_image")
    if "Dockerfile" in context:
        for line in _instructions(_text(context, "Dockerfile", f"{where}/environment")):
            _apply(image, line, context, where)
    image.folder = _check_path(workdir or image.folder or _DEFAULT_FOLDER, where)
    if "Dockerfile" not in context:
        image.files |= {f"{image.folder}/{name}": file for name, file in context.items()}
    return image


def _container_image(context: Mapping[str, BoxFile], where: str, environment: _Environment) -> HarborImage:
    """Returns the folder of an image for a container, which has the files itself. Raises: ConfigError."""
    for name in _COMPOSE:
        if name in context:
            _refuse(where, f"environment/{name}")
    if environment.docker_image is None and "Dockerfile" not in context:
        raise ConfigError(f"{where} has neither environment/Dockerfile nor environment.docker_image")
    lines = _instructions(_text(context, "Dockerfile", where)) if "Dockerfile" in context else []
    words = [line.split(None, 1) for line in lines]
    folders = [word[1] for word in words if len(word) > 1 and word[0].upper() == "WORKDIR"]
    path = PurePosixPath("/").joinpath(*folders, environment.workdir or "")
    return HarborImage(folder=str(path) if str(path) != "/" else _DEFAULT_FOLDER)


def _check_base(name: str, where: str) -> None:
    if re.split("[:@]", name.removeprefix("docker.io/").removeprefix("library/"))[0] not in _PLAIN:
        _refuse(where, f"the image {name!r} (not one of {', '.join(_PLAIN)})")


def _instructions(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    return [line.strip() for line in text.splitlines() if line.strip()]


def _apply(image: HarborImage, line: str, context: Mapping[str, BoxFile], where: str) -> None:
    """Applies one instruction of a Dockerfile. Raises: ConfigError if it needs a container."""
    name, _, rest = line.partition(" ")
    try:
        words = shlex.split(rest)
    except ValueError as err:
        raise ConfigError(f"{where}/environment/Dockerfile: {line!r}: {err}") from err
    match name.upper():
        case "FROM" if len(words) == 1:
            _check_base(words[0], where)
        case "WORKDIR" if len(words) == 1:
            image.folder = str(PurePosixPath(image.folder or "/") / words[0])
        case "ENV" if words and all("=" in word and "$" not in word for word in words):
            image.env |= dict(word.split("=", 1) for word in words)
        case "COPY" if len(words) > 1 and not any(re.search(r"[*?\[$]|^--", word) for word in words):
            _copy(image, words, context, where)
        case _:
            _refuse(where, f"{line[:80]!r} in environment/Dockerfile")


def _copy(image: HarborImage, words: list[str], context: Mapping[str, BoxFile], where: str) -> None:
    *sources, target = words
    place = PurePosixPath(image.folder or "/") / target
    is_folder = target.endswith("/") or target in {".", ".."} or len(sources) > 1
    for source in sources:
        path = PurePosixPath(source.lstrip("/") or ".")
        if ".." in path.parts:
            raise ConfigError(f"{where}/environment/Dockerfile: {source!r} leads out of the folder")
        if str(path) in context:
            copies = {str(place / path.name if is_folder else place): context[str(path)]}
        else:
            prefix = "" if str(path) == "." else f"{path}/"
            copies = {
                str(place / name.removeprefix(prefix)): file
                for name, file in context.items()
                if name.startswith(prefix) and name != "Dockerfile"
            }
        if not copies:
            raise ConfigError(f"{where}/environment/Dockerfile: cannot copy {source!r}: no such file")
        image.files |= {_check_path(each, where): file for each, file in copies.items()}


def _check_path(path: str, where: str) -> str:
    """Returns a path at which commands can write. Raises: ConfigError if they can't."""
    try:
        return checked_path(path)
    except ConfigError as err:
        raise ConfigError(f"{where}: {err}") from err
