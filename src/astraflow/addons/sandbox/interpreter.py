"""What a box shows of an interpreter: its program, its standard library, and the shared libraries of both.

Each process asks an interpreter once which files it has mapped after importing all of its extension modules.
A box therefore shows only about twenty files and one folder of the machine.
"""

import asyncio
import json
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import ConfigError

__all__ = ["Interpreter", "examine"]

_ASKING_S = 60.0
"""An interpreter answers within a tenth of a second, or within seconds on a busy machine."""

_QUESTION = """
import importlib, json, os, sys, sysconfig
paths = sysconfig.get_paths()
extensions = os.path.join(paths["platstdlib"], "lib-dynload")
names = {name.partition(".")[0] for name in os.listdir(extensions)} if os.path.isdir(extensions) else set()
skipped = ("_test", "_xx", "xx", "_tkinter", "_curses", "readline", "_dbm", "_gdbm", "nis", "_ctypes_test")
for name in sorted(names):
    if not name.startswith(skipped):
        try:
            importlib.import_module(name)
        except Exception:
            pass
sys.path += json.loads(sys.argv[1])
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
with open("/proc/self/maps") as maps:
    mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
print(json.dumps({
    "executable": os.path.realpath(sys.executable),
    "folders": sorted({os.path.realpath(paths["stdlib"]), os.path.realpath(paths["platstdlib"])}),
    "files": sorted(path for path in mapped if os.path.isfile(path)),
}))
"""
_LOADING = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1", "/etc/ld.so.cache")
"""The dynamic loader and its list of libraries. Programs contain the loader's path, which may be a link."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter and the files that it needs."""

    executable: str
    visible: tuple[tuple[str, str], ...]
    """Source and target of each file or folder that a box shows."""
    covered: tuple[str, ...]
    """Folders below visible folders that a box shows as empty."""
    paths: tuple[str, ...] = ()
    """Visible folders of installed packages."""


_known: dict[tuple[str, bool, tuple[str, ...]], Interpreter] = {}


async def examine(python: str, preloaded: tuple[str, ...], *, with_packages: bool) -> Interpreter:
    """Finds out which files an interpreter needs.

    `python`: the interpreter; empty for the interpreter of this process. `preloaded`: modules that each box
    imports, and whose shared libraries it therefore shows too.

    Raises: ConfigError if the interpreter doesn't answer or cannot import one of these modules.
    """
    key = (python, with_packages, preloaded)
    if key not in _known:
        packages = [sysconfig.get_paths()["purelib"]] if with_packages else []
        output = await _asked(python or sys.executable, json.dumps(packages), json.dumps(preloaded))
        answer = json.loads(output)
        _known[key] = await asyncio.to_thread(
            _interpreter, answer["executable"], answer["folders"], answer["files"], packages
        )
    return _known[key]


def _interpreter(
    executable: str, folders: Sequence[str], mapped: Sequence[str], packages: Sequence[str]
) -> Interpreter:
    """Returns what a box has to show of an interpreter.

    `folders`: the standard library. `mapped`: files that the interpreter has mapped into memory.
    """
    visible_folders = (*folders, *packages)
    files = [
        path for path in mapped if not any(Path(path).is_relative_to(folder) for folder in visible_folders)
    ]
    loading = [path for path in _LOADING if os.path.exists(path)]
    links = [link for path in files for link in _links_to(path)]
    visible = {path: os.path.realpath(path) for path in (executable, *files, *links, *loading, *folders)}
    visible |= {path: path for path in packages}
    installed = [f"{folder}/{name}" for folder in folders for name in ("site-packages", "dist-packages")]
    return Interpreter(
        executable,
        tuple((source, target) for target, source in visible.items()),
        tuple(path for path in installed if os.path.isdir(path) and path not in packages),
        tuple(packages),
    )


def _links_to(path: str) -> list[str]:
    """Returns the links to a library in its own folder. Programs refer to libraries by such links, such as
    `libz.so.1`."""
    folder = os.path.dirname(path)
    stem = os.path.basename(path).partition(".so")[0]
    links = [f"{folder}/{name}" for name in os.listdir(folder) if name.startswith(f"{stem}.so")]
    return [link for link in links if os.path.islink(link) and os.path.realpath(link) == path]


async def _asked(python: str, *arguments: str) -> bytes:
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-I",
            "-S",
            "-c",
            _QUESTION,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as err:
        raise ConfigError(f"sandbox.python = {python!r} cannot be started: {err.strerror}") from err
    try:
        async with asyncio.timeout(_ASKING_S):
            answer, complaint = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        last = complaint.decode(errors="replace").strip()[-500:]
        raise ConfigError(f"sandbox.python = {python!r} is not a usable interpreter: {last}")
    return answer
