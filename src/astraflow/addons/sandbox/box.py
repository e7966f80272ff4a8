"""One box: the processes around a zygote, which runs one program at a time.

Programs written by a model take turns in boxes. An agent program has its own box, which shows more of the
machine and has one open port (`Openings`).

    this process --(socket)--> zygote --(fork)--> program
         |                        |
         +--> keeper (bwrap) -----+   its end ends the box

If a box is closed or its owner dies, everything that runs in it ends: closing the socket ends the zygote.
The zygote is the first process of its namespace, so the kernel then ends all other processes in it.
"""

import asyncio
import contextlib
import dataclasses
import json
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import msgspec

import astraflow
from astraflow.addons.sandbox.command import MAX_RESULT_BYTES, BoxCommand, CommandEnd, CommandLimits
from astraflow.addons.sandbox.inside.command import EXIT_UNSTARTABLE, REPORT_HEAD
from astraflow.addons.sandbox.inside.enter import Plan, boot_code
from astraflow.addons.sandbox.inside.program import BOX_FOLDER, FOLDER, STDIN_PATHS
from astraflow.addons.sandbox.interpreter import Interpreter
from astraflow.addons.sandbox.openings import NO_OPENINGS, Openings
from astraflow.addons.sandbox.passage import accepted, passage
from astraflow.addons.sandbox.verdict import (
    BoxLimits,
    Kind,
    Program,
    ProgramReport,
    ProgramVerdict,
    verdict_of,
)
from astraflow.errors import SandboxError
from astraflow.service import frames

__all__ = ["Box"]

_STARTING_S = 60.0
"""A box usually starts within a tenth of a second. With large libraries on a busy machine, it can take many
seconds."""
_GRACE_S = 5.0
"""A zygote ends a late program. A zygote that doesn't answer within this extra time is considered failed."""
_ENDING_S = 5.0
"""A zygote should end at once. After this time, the keeper is killed, and the zygote with it."""
_SHOWN_BYTES = 1_000
"""Number of bytes of a box's last output that an error shows."""
_INSIDE = "astraflow/addons/sandbox/inside"
_FRAMES = "astraflow/service/frames.py"


class Box:
    """A running box.

    Example: `box = await Box.start("/usr/bin/bwrap", interpreter, ())`, `await box.run(program)`, and at the
    end `await box.close()`.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        words: IO[bytes],
    ) -> None:
        """`words`: the output of the box's own processes, which excludes the output of programs."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._words = words
        self._port: socket.socket | None = None
        """The listening socket of the box's only open port; None if it has none."""
        self._gateway = 0
        """The port of this machine to which connections to the open port are forwarded."""

    @classmethod
    async def start(
        cls,
        bwrap: str,
        interpreter: Interpreter,
        preloaded: Sequence[str],
        openings: Openings = NO_OPENINGS,
    ) -> Self:
        """Starts a box, using bubblewrap unless `bwrap` is empty. Raises: SandboxError."""
        with contextlib.ExitStack() as opened:
            words = opened.enter_context(tempfile.TemporaryFile())
            ours, theirs = map(opened.enter_context, socket.socketpair())
            from_box, channel = map(opened.enter_context, socket.socketpair())
            plan = _plan(bwrap, interpreter, preloaded, openings, (theirs.fileno(), channel.fileno()))
            process = await _started(plan, words)
            # Only the box may have these ends, so that its end is noticed.
            theirs.close()
            channel.close()
            reader, writer = await asyncio.open_connection(sock=ours)
            box = cls(process, reader, writer, words)
            try:
                async with asyncio.timeout(_STARTING_S):
                    await box._received(0)
                if openings.gateway:
                    box._port = _received_port(from_box)
                    box._gateway = openings.gateway
            except TimeoutError:
                await box.close()
                raise SandboxError(f"a box did not start within {_STARTING_S:g} s") from None
            except BaseException:
                await box.close()
                raise
            opened.pop_all()  # the box owns the others
            from_box.close()
        return box

    async def run(self, program: Program) -> ProgramVerdict:
        """Runs a program to its end. After any exception, including cancellation, the box must be closed.

        Raises: SandboxError if the box failed.
        """
        if program.refusal:
            return ProgramVerdict(Kind.REFUSED, "", "", cpu_s=0.0, peak_bytes=0, reason=program.refusal)
        limits = program.limits
        report, (stdout, stderr, _) = await self._answer(
            {"is_command": False, "limits": dataclasses.asdict(limits), "files": list(program.files)},
            [program.source, program.stdin, *program.files.values()],
            limits,
        )
        if report.problem:
            raise SandboxError(f"a program could not be started in its box: {report.problem}")
        return verdict_of(report, limits, stdout, stderr)

    async def execute(self, command: BoxCommand, *, is_forwarding: bool = True) -> CommandEnd:
        """Runs an agent program to its end. The box must have openings, and must be closed afterwards.

        `is_forwarding`: whether connections to the open port are forwarded; else `connect` accepts them.

        Raises: SandboxError if the box failed.
        """
        assert self._port is not None
        limits = command.limits
        spec = {
            "program": command.program,
            "argv": command.argv,
            "env": dict(command.env),
            "folder": command.folder,
            "kept": command.kept,
            "result": command.result,
        }
        async with passage(self._port, self._gateway) if is_forwarding else contextlib.nullcontext():
            program_report, (stdout, stderr, report) = await self._answer(
                {"is_command": True, "limits": dataclasses.asdict(limits), "files": list(command.files)},
                [json.dumps(spec).encode(), command.stdin, *command.files.values()],
                limits,
            )
        # The command's own program may be missing, which is no fault of the box.
        if program_report.problem and program_report.code != EXIT_UNSTARTABLE:
            raise SandboxError(f"an agent program could not be started in its box: {program_report.problem}")
        # Without a report, the program didn't end by itself: it was late, or the machine ran out of memory.
        code, has_result = REPORT_HEAD.unpack_from(report) if report else (program_report.code, False)
        return CommandEnd(
            code,
            stdout.decode(errors="replace"),
            stderr.decode(errors="replace"),
            bytes(report[REPORT_HEAD.size :]) if has_result else None,
            is_late=program_report.is_late,
            is_full=program_report.is_full,
            unstartable=program_report.problem,
        )

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Accepts the next connection to the open port of the box."""
        assert self._port is not None
        self._port.setblocking(False)
        return await asyncio.open_connection(sock=await accepted(self._port))

    async def _answer(
        self, head: Mapping[str, Any], parts: Sequence[bytes], limits: BoxLimits | CommandLimits
    ) -> tuple[ProgramReport, list[bytes]]:
        """Has the zygote run a program. Returns how it ended, its two outputs, and its keeper's report."""
        longest_s = limits.wall_s + _GRACE_S
        try:
            async with asyncio.timeout(longest_s):
                self._writer.write(frames.encode(dict(head), parts))
                await self._writer.drain()
                reply, outputs = await self._received(2 * limits.output_bytes + MAX_RESULT_BYTES)
        except TimeoutError:
            raise SandboxError(f"a box did not answer within {longest_s:g} s") from None
        except ConnectionError:
            raise SandboxError(f"a box has ended: {self._last_words()}") from None
        try:
            return msgspec.convert(reply, ProgramReport), outputs
        except msgspec.ValidationError as err:
            raise SandboxError(f"a box does not answer as it should: {err}") from err

    async def close(self) -> None:
        """Ends the box and everything that runs in it. Returns when nothing is left, even if the caller is
        cancelled meanwhile."""
        closing = asyncio.ensure_future(self._close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await closing
            raise

    async def _close(self) -> None:
        if self._port is not None:
            self._port.close()
        # Closing the socket ends the zygote. The keeper ends once the kernel has ended all processes below
        # it. Don't kill the keeper right away: it would be gone before the kernel has ended those processes.
        self._writer.transport.abort()
        try:
            async with asyncio.timeout(_ENDING_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        self._words.close()

    async def _received(self, max_bytes: int) -> tuple[dict[str, Any], list[bytes]]:
        try:
            return await frames.receive(self._reader.readexactly, max_bytes)
        except (EOFError, OSError):
            raise SandboxError(f"a box has ended: {self._last_words()}") from None
        except ValueError as err:
            raise SandboxError(f"a box does not answer as it should: {err}") from err

    def _last_words(self) -> str:
        self._words.seek(0)
        return self._words.read().decode(errors="replace").strip()[-_SHOWN_BYTES:] or "it said nothing"


def _received_port(from_box: socket.socket) -> socket.socket:
    """Returns the open port's listening socket. The zygote sends it before it reports that it is ready."""
    from_box.setblocking(False)
    try:
        _, fds, _, _ = socket.recv_fds(from_box, 1, 1, socket.MSG_CMSG_CLOEXEC)
        return socket.socket(fileno=fds[0])
    except (OSError, IndexError) as err:
        raise SandboxError("a box did not open its port") from err


def _plan(
    bwrap: str,
    interpreter: Interpreter,
    preloaded: Sequence[str],
    openings: Openings,
    fds: tuple[int, int],
) -> Plan:
    """Returns the plan of a box.

    `fds`: the box's ends of the socket to this process and of the socket that delivers its open port.
    """
    package = Path(astraflow.__file__).parent.parent
    ours = [(str(package / name), f"{BOX_FOLDER}/{name}") for name in (_INSIDE, _FRAMES)]
    # Skip files in a folder that the box shows anyway: they would have to be mounted into a read-only folder.
    own = [
        (source, _place(place, openings))
        for source, place in interpreter.visible
        if not openings.shows(place)
    ]
    if openings == NO_OPENINGS:
        own += [("/dev/null", place) for place in STDIN_PATHS]
    return Plan(
        bwrap=bwrap,
        python=_place(interpreter.executable, openings),
        visible=[list(pair) for pair in (*own, *ours, *openings.visible)],
        covered=[_place(path, openings) for path in interpreter.covered if not openings.shows(path)],
        preloaded=list(preloaded),
        paths=[_place(path, openings) for path in interpreter.paths],
        control=fds[0],
        gateway=openings.gateway,
        channel=fds[1],
        folders=list(openings.folders),
    )


def _place(path: str, openings: Openings) -> str:
    """Returns the path at which a box shows a file of the interpreter.

    A program written by a model has its own /tmp, which hides the machine's /tmp, so files in the latter are
    shown at another path. An agent program's /tmp shows them at their usual path.
    """
    is_hidden = Path(path).is_relative_to(FOLDER) and not openings.gateway
    return f"{BOX_FOLDER}{path}" if is_hidden else path


async def _started(plan: Plan, words: IO[bytes]) -> asyncio.subprocess.Process:
    package = str(Path(astraflow.__file__).parent.parent)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        "-c",
        boot_code(package, "astraflow.addons.sandbox.inside.enter", ""),
        json.dumps(dataclasses.asdict(plan)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=words,
        stderr=words,
        pass_fds=(plan.control, plan.channel),
        env={},
        cwd="/",
        start_new_session=True,
    )
