"""Finds out which backends can make a box on this machine.

Each backend is tried by running a program in a box. Checking for features isn't enough: a kernel, its
security modules, and the container around them decide only together whether a box is possible.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from astraflow.addons.sandbox.box import Box
from astraflow.addons.sandbox.command import CommandLimits
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.inside.kernel import landlock_version
from astraflow.addons.sandbox.inside.seccomp import is_known_machine
from astraflow.addons.sandbox.interpreter import Interpreter, examine
from astraflow.addons.sandbox.openings import NO_OPENINGS, Openings, openings_for
from astraflow.addons.sandbox.verdict import BoxLimits, Kind, Program
from astraflow.errors import ConfigError, Error

__all__ = ["BACKENDS", "Backend", "BoxMaker", "advice", "chosen_maker", "tried_maker"]

Backend = Literal["bubblewrap", "namespaces"]
BACKENDS: tuple[Backend, ...] = ("bubblewrap", "namespaces")
"""In order of preference: bubblewrap is small, mature, and widely used."""

_FIRST = BoxLimits(cpu_s=10.0, wall_s=30.0)
_FIRST_AGENT = CommandLimits(wall_s=30.0)
_ANY_PORT = 50_000
"""The open port of the box that is tried. It can be any port, because no episode is running yet."""


class BoxMaker:
    """Makes boxes of one kind.

    Example: `box = await (await chosen_maker(SandboxConfig())).make()`.
    """

    def __init__(self, backend: Backend, interpreter: Interpreter, preloaded: Sequence[str]) -> None:
        self.backend: Backend = backend
        self._interpreter = interpreter
        self._preloaded = tuple(preloaded)

    @property
    def python(self) -> str:
        """Path of the interpreter in its boxes."""
        return self._interpreter.executable

    @property
    def weakness(self) -> str:
        """What this machine lacks for full protection, although boxes work; empty if nothing."""
        return "" if landlock_version() else "the kernel has no Landlock, so mounts alone guard the files"

    async def make(self, openings: Openings = NO_OPENINGS) -> Box:
        """Starts a box. With openings, the box is for one agent program. Raises: SandboxError."""
        bwrap = (shutil.which("bwrap") or "") if self.backend == "bubblewrap" else ""
        return await Box.start(bwrap, self._interpreter, self._preloaded, openings)


async def chosen_maker(
    config: SandboxConfig, preloaded: Sequence[str] = (), *, for_agents: bool = False
) -> BoxMaker:
    """Returns a maker of boxes for the first backend that the config allows and that can run a program.

    `for_agents`: whether the backend must also run an agent program, whose boxes need more of the machine.

    Raises: ConfigError that says why each backend doesn't work. Nothing ever runs without a box.
    """
    problems: list[str] = []
    for backend in BACKENDS if config.backend == "auto" else (config.backend,):
        tried = await tried_maker(backend, config, preloaded, for_agents=for_agents)
        if isinstance(tried, BoxMaker):
            return tried
        problems.append(f"{backend}: {tried}")
    whose = "agent programs in a sandbox" if for_agents else "programs of a model"
    raise ConfigError(
        f"this machine has no usable sandbox, and {whose} never run without one "
        f"({'; '.join(problems)}); {advice()}"
    )


async def tried_maker(
    backend: Backend, config: SandboxConfig, preloaded: Sequence[str] = (), *, for_agents: bool = False
) -> BoxMaker | str:
    """Returns the maker of one backend's boxes if a program runs in them, otherwise the reason it doesn't.

    `for_agents`: as in `chosen_maker`. Raises: ConfigError if the config's Python cannot be used.
    """
    if problem := _missing(backend):
        return problem
    interpreter = await examine(config.python, tuple(preloaded), with_packages=config.packages)
    maker = BoxMaker(backend, interpreter, preloaded)
    problem = await _tried(maker)
    if for_agents and not problem:
        problem = await _tried_agent(maker)
    return problem or maker


def advice() -> str:
    """Returns what to do on a machine without a usable sandbox."""
    allow = "allow user namespaces here"
    return allow if shutil.which("bwrap") else f"install bubblewrap (the program bwrap), and {allow}"


def _missing(backend: Backend) -> str:
    """Returns what this machine obviously lacks; empty if a box may work."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces; it needs Linux"
    if not is_known_machine():
        return f"no filter of system calls is known for {os.uname().machine}"
    if backend == "bubblewrap" and shutil.which("bwrap") is None:
        return "the program bwrap is not installed"
    return ""


async def _tried(maker: BoxMaker) -> str:
    """Runs a program in a new box. Returns why that doesn't work; empty if it does."""
    try:
        box = await maker.make()
    except Error as err:
        return str(err)
    try:
        verdict = await box.run(Program.of("print(6 * 7)", {}, "", _FIRST))
    except Error as err:
        return str(err)
    finally:
        await box.close()
    if verdict.kind is not Kind.PASSED or verdict.stdout != "42\n":
        return f"its first program ended with {verdict.kind} ({verdict.reason}): {verdict.stderr[-300:]}"
    return ""


async def _tried_agent(maker: BoxMaker) -> str:
    """Runs an agent program in a new box. Returns why that doesn't work; empty if it does."""
    argv = (maker.python, "-I", "-S", "-c", "print(6 * 7)")
    try:
        openings = openings_for(argv, folder=Path("/"), path="", gateway=_ANY_PORT)
        command = openings.command(argv, {}, limits=_FIRST_AGENT)
        box = await maker.make(openings)
    except Error as err:
        return str(err)
    try:
        end = await box.execute(command)
    except Error as err:
        return str(err)
    finally:
        await box.close()
    if end.code != 0 or end.stdout != "42\n":
        problem = end.unstartable or f"it ended with {end.code}: {end.stderr[-300:]}"
        return f"its first agent program did not work: {problem}"
    return ""
