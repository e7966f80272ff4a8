"""The sandbox: a bounded number of boxes in which programs take turns."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Self

from astraflow.addons.sandbox.backends import BoxMaker, chosen_maker
from astraflow.addons.sandbox.box import Box
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.openings import NO_OPENINGS, Openings
from astraflow.addons.sandbox.verdict import BoxLimits, Program, ProgramVerdict
from astraflow.errors import SandboxError

__all__ = ["Sandbox", "run"]

_log = logging.getLogger(__name__)

_RUNS_PER_BOX = 2_000
"""A box is replaced after this many programs, so that nothing accumulates. A new box takes a tenth of a
second."""
_TRIES = 2
"""Number of attempts to run a program if boxes fail. A failed box says nothing about the program."""
_DEFAULT = BoxLimits()


class Sandbox:
    """Runs programs written by a model, one at a time per box.

    Example::

        async with Sandbox(SandboxConfig(num_boxes=4)) as sandbox:
            verdict = await sandbox.run("print(int(input()) + 1)", stdin="41")
            assert verdict.stdout == "42\\n"

    Programs wait for a free box in the order of arrival. If a box's program was hostile or its caller was
    cancelled, the box is ended with everything that runs in it, and a new one replaces it.
    """

    def __init__(
        self,
        config: SandboxConfig | None = None,
        *,
        preloaded: Sequence[str] = (),
        openings: Openings = NO_OPENINGS,
    ) -> None:
        """`preloaded`: modules that each box imports once for all its programs. `openings`: what boxes show
        in addition to the interpreter."""
        self._config = config or SandboxConfig()
        self._preloaded = tuple(preloaded)
        self._openings = openings
        self._maker: BoxMaker | None = None
        self._opening = asyncio.Lock()
        self._turns = asyncio.Semaphore(self._config.num_boxes)
        self._idle: list[tuple[Box, int]] = []
        """Idle boxes, and the number of programs that each has run."""
        self._num_waiting = 0
        self._num_running = 0
        self._is_closed = False

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def backend(self) -> str:
        """The backend that creates boxes; empty before `open`."""
        return self._maker.backend if self._maker else ""

    @property
    def weakness(self) -> str:
        """What this machine lacks for full protection, although boxes work; empty if nothing."""
        return self._maker.weakness if self._maker else ""

    @property
    def num_boxes(self) -> int:
        """Largest number of programs that run at the same time."""
        return self._config.num_boxes

    @property
    def num_waiting(self) -> int:
        """Number of programs that wait for a box."""
        return self._num_waiting

    @property
    def num_running(self) -> int:
        """Number of programs that are running."""
        return self._num_running

    async def open(self) -> None:
        """Finds a backend that works here; otherwise, the first `run` does. A closed sandbox can be reopened.

        Raises: ConfigError if there is none.
        """
        self._is_closed = False
        await self._choose()

    async def _choose(self) -> None:
        # Concurrent first runs wait here, so that backends are tried only once.
        async with self._opening:
            if self._maker is None:
                self._maker = await chosen_maker(self._config, self._preloaded)

    async def run(
        self,
        program: str,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = "",
        limits: BoxLimits = _DEFAULT,
    ) -> ProgramVerdict:
        """Runs a Python program. If the caller is cancelled, all processes of the program are ended at once.

        `files`: the contents of its current folder, by relative path.

        Raises: ConfigError if this machine has no usable sandbox, or if files or input are invalid or too
        large; SandboxError if boxes fail repeatedly.
        """
        checked = Program.of(program, dict(files or {}), stdin, limits)
        await self._choose()
        self._num_waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._num_waiting -= 1
        self._num_running += 1
        try:
            return await self._run(checked)
        finally:
            self._num_running -= 1
            self._turns.release()

    async def close(self) -> None:
        """Ends all idle boxes. Callers must cancel running programs themselves."""
        self._is_closed = True
        while self._idle:
            box, _ = self._idle.pop()
            await box.close()

    async def _run(self, program: Program) -> ProgramVerdict:
        for attempt in range(1, _TRIES + 1):
            try:
                return await self._run_once(program)
            except SandboxError as err:
                if attempt == _TRIES:
                    raise
                _log.warning("a program is run again: %s", err)
        raise AssertionError("unreachable")

    async def _run_once(self, program: Program) -> ProgramVerdict:
        if self._is_closed:
            raise SandboxError("the sandbox is closed")
        assert self._maker is not None
        box, num_runs = self._idle.pop() if self._idle else (await self._maker.make(self._openings), 0)
        is_kept = False
        try:
            verdict = await box.run(program)
            is_kept = not verdict.is_hostile and num_runs + 1 < _RUNS_PER_BOX and not self._is_closed
            return verdict
        finally:
            if is_kept:
                self._idle.append((box, num_runs + 1))
            else:
                await box.close()


def run(
    program: str,
    files: Mapping[str, str | bytes] | None = None,
    stdin: str | bytes = "",
    limits: BoxLimits = _DEFAULT,
) -> ProgramVerdict:
    """Runs one program in a new box, for scripts and experiments. The box takes a tenth of a second.

    Raises: like `Sandbox.run`.
    """

    async def once() -> ProgramVerdict:
        async with Sandbox(SandboxConfig(num_boxes=1)) as sandbox:
            return await sandbox.run(program, files, stdin, limits)

    return asyncio.run(once())
