"""What a box for an agent program shows of the machine, and the only port that is open in it.

The box shows, read-only:

    the system's programs and libraries    /usr, /bin, /lib, ...
    the program's interpreter              its virtual environment, and the Python behind that environment
    the program's own folder               the folder of the script that the command names
    whatever else the caller names

Nothing else exists in the box: no home folders, /run, /var, or /opt, no run folder, and no files of other
users.
"""

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.addons.sandbox.command import BoxCommand, CommandLimits
from astraflow.addons.sandbox.inside.program import FOLDER
from astraflow.errors import ConfigError

__all__ = ["NO_OPENINGS", "Openings", "openings_for", "openings_of_a_shell"]

_SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr")
_SETTINGS = (
    "/etc/alternatives",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)
"""Files that programs and libraries of the system need. None of them belongs to a user or holds a secret."""
_SHARED = ("/etc", "/home", "/media", "/mnt", "/opt", "/run", "/srv", "/tmp", "/usr/local", "/var")
"""Folders that hold more than one program, as the home folder does. They are never shown as a whole."""
_OWN_OF_BOXES = ("/box", "/dev", "/proc")
_SHIMS = "shims"
"""Name of the folder in which pyenv, rbenv, and similar tools keep scripts that find the real program."""
_MAX_LINKS = 40
"""Number of links that the kernel follows."""
_MAX_SCRIPTS = 5
"""Number of scripts that the kernel starts as interpreters of one another."""
_MAX_SHEBANG = 256
"""Number of bytes that the kernel reads of a script's first line."""


@dataclass(frozen=True, slots=True)
class Openings:
    """What a box shows in addition to the sandbox's own interpreter.

    Example: `openings_for(["python3", "agent.py"], folder=Path.cwd(), path="/usr/bin", gateway=8080)`.
    """

    gateway: int
    """The port that is open in the box, and the port of the machine to which it leads; 0 for none."""
    visible: tuple[tuple[str, str], ...]
    """Source, and place in the box, of each visible file or folder. No place is below another one."""
    program: str = ""
    """Path of the program's file."""
    folder: str = FOLDER
    """The program's current folder."""
    folders: tuple[str, ...] = ()
    """Names of folders in the root that link to folders of the same name in the program's own folder."""

    def shows(self, path: str) -> bool:
        """Returns whether the box shows a path or a folder above it."""
        return any(Path(path).is_relative_to(place) for _, place in self.visible)

    def command(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        limits: CommandLimits,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        result: str = f"{FOLDER}/result",
    ) -> BoxCommand:
        """Returns the program with its arguments, variables, and files."""
        return BoxCommand(
            self.program,
            tuple(argv),
            env,
            folder=self.folder,
            kept=tuple(place for _, place in self.visible if Path(place).is_relative_to(FOLDER)),
            stdin=stdin,
            files=files or {},
            result=result,
            limits=limits,
        )


NO_OPENINGS = Openings(gateway=0, visible=())


def openings_of_a_shell(folders: Sequence[str]) -> Openings:
    """Returns what the boxes of a shell show: programs and libraries of the system, and no port.

    `folders`: names of folders in the root in which commands can write.
    """
    paths = [Path(each) for each in (*_SYSTEM, *_SETTINGS) if os.path.exists(each)]
    return Openings(0, tuple(_pairs(_outermost(paths), ())), folders=tuple(folders))


def openings_for(
    argv: Sequence[str],
    *,
    folder: Path,
    path: str,
    gateway: int,
    visible: Sequence[Path] = (),
    private: Sequence[Path] = (),
) -> Openings:
    """Returns what the box of a program shows.

    `folder`: the folder in which the program starts. `path`: the folders that are searched for programs, in
    the format of the variable PATH. `visible`: additional files and folders to show. `private`: files and
    folders that are hidden, even if they are in a visible folder.

    Raises: ConfigError if the program or an entry of `visible` doesn't exist or cannot be shown.
    """
    program = _program(argv[0], folder, path)
    named = [_named(each, folder, private) for each in visible]
    paths = [Path(each) for each in (*_SYSTEM, *_SETTINGS) if os.path.exists(each)]
    paths += [*_interpreter(program, folder, path), *_own(argv, program, folder), *named]
    pairs = tuple(_pairs(_outermost(paths), [each.resolve() for each in private]))
    openings = Openings(gateway, pairs, str(program))
    if not openings.shows(str(program)):
        raise ConfigError(f"{program} is in a private folder of this run, which the sandbox hides")
    places = [Path(place) for _, place in pairs]
    is_there = any(place.is_relative_to(folder) or folder.is_relative_to(place) for place in places)
    return Openings(gateway, pairs, str(program), str(folder) if is_there else FOLDER)


def _program(name: str, folder: Path, path: str) -> Path:
    """Returns the program's file, as a shell would find it. Raises: ConfigError if there is none."""
    place = shutil.which(folder / name if "/" in name else name, path=path)
    if place is None:
        raise ConfigError(f"the agent program {name!r} cannot be started: no such program")
    program = Path(os.path.abspath(folder / place))
    if program.parent.name == _SHIMS:
        raise ConfigError(
            f"{program} looks for the real {program.name} by files that the sandbox hides; name that one by "
            "its path (of a Python: `import sys; print(sys.executable)`)"
        )
    return program


def _named(path: Path, folder: Path, private: Sequence[Path]) -> Path:
    """Returns the absolute form of a path that the caller wants to show.

    Raises: ConfigError if a box cannot show it.
    """
    absolute = Path(os.path.abspath(folder / path.expanduser()))
    if not os.path.exists(absolute):
        raise ConfigError(f"the sandbox cannot show {path}: {absolute} does not exist")
    resolved = absolute.resolve()
    if any(resolved.is_relative_to(each.resolve()) for each in private):
        raise ConfigError(f"the sandbox cannot show {path}: it is in a private folder of this run")
    if str(absolute) in {"/", FOLDER} or any(absolute.is_relative_to(each) for each in _OWN_OF_BOXES):
        raise ConfigError(f"the sandbox cannot show {absolute}: each box has one of its own")
    return absolute


# --- the interpreter ------------------------------------------------------------------------------


def _interpreter(program: Path, folder: Path, path: str) -> Iterator[Path]:
    """Yields the program's file and, if it is a Python or a script for one, what this Python needs."""
    for _ in range(_MAX_SCRIPTS):
        for link in _links(program):
            yield link
            yield from _environment(link)
        interpreter = _shebang(program, folder, path)
        if interpreter is None:
            return
        program = interpreter


def _links(path: Path) -> Iterator[Path]:
    """Yields the path, then each path that it leads to, link by link."""
    for _ in range(_MAX_LINKS):
        yield path
        if not path.is_symlink():
            return
        path = Path(os.path.abspath(path.parent / path.readlink()))


def _environment(program: Path) -> Iterator[Path]:
    """Yields the virtual environment or the Python installation that a file `bin/NAME` belongs to."""
    prefix = program.parent.parent
    if _is_shared(prefix):
        return  # either the system's Python, which is shown anyway, or the folder holds much more than Python
    settings = prefix / "pyvenv.cfg"
    if os.path.isfile(settings):
        yield prefix
        home = re.search(r"^home\s*=\s*(.+?)\s*$", settings.read_text(encoding="utf-8"), re.M)
        if home:
            yield from _environment(Path(home[1]) / "python")
            yield from _environment(Path(home[1]).resolve() / "python")
    elif any(prefix.glob("lib/python3*/os.py")):
        yield prefix


def _shebang(program: Path, folder: Path, path: str) -> Path | None:
    """Returns the interpreter that a script's first line names; None if it names none or cannot be read.

    Raises: ConfigError if that interpreter doesn't exist.
    """
    try:
        with program.open("rb") as file:
            line = file.readline(_MAX_SHEBANG)
        words = shlex.split(line[2:].decode()) if line.startswith(b"#!") else []
    except (OSError, ValueError):
        return None
    if len(words) > 1 and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    return _program(words[0], folder, path) if words else None


# --- the program's own files ----------------------------------------------------------------------


def _own(argv: Sequence[str], program: Path, folder: Path) -> Iterator[Path]:
    """Yields the files that the command names, the folder of the first of them, and the current folder if the
    command is `python -m`."""
    files = [program] if "/" in argv[0] and not _is_installed(program) else []
    named = [Path(os.path.abspath(folder / argument)) for argument in argv[1:]]
    files += [path for path in named if os.path.isfile(path)]
    yield from files
    folders = [file.parent for file in files[:1]]
    if program.name.startswith("python") and "-m" in argv:
        folders.append(folder)
    yield from (each for each in folders if not _is_shared(each))


def _is_installed(program: Path) -> bool:
    """Returns whether a program belongs to the system or to a Python installation, which are shown anyway."""
    is_of_system = any(program.is_relative_to(each) for each in _SYSTEM)
    return is_of_system or any(True for _ in _environment(program))


def _is_shared(folder: Path) -> bool:
    """Returns whether a folder holds more than one program: the home folder, /tmp, `_SHARED`, and all folders
    above them."""
    others = (Path(os.path.expanduser("~")), Path(tempfile.gettempdir()), *map(Path, _SHARED))
    return any(other.is_relative_to(folder) for each in others for other in (each, each.resolve()))


# --- what is mounted ------------------------------------------------------------------------------


def _outermost(paths: Sequence[Path]) -> list[Path]:
    """Returns the paths that are not below another one, sorted."""
    outermost: list[Path] = []
    for path in sorted(set(paths)):  # a folder sorts before everything below it
        if not any(path.is_relative_to(each) for each in outermost):
            outermost.append(path)
    return outermost


def _pairs(paths: Sequence[Path], private: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yields source and place of what is shown. A folder that holds private files is shown entry by entry."""
    for path in paths:
        try:
            resolved = path.resolve(strict=True)
        except OSError:
            continue  # a broken link would lead nowhere in the box either
        if any(resolved.is_relative_to(each) for each in private):
            continue
        if not any(each.is_relative_to(resolved) for each in private):
            yield str(resolved), str(path)
        elif not path.is_symlink():
            yield from _pairs(sorted(path.iterdir()), private)
