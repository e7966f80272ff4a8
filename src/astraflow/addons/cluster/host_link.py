"""The launcher's end of the link to a host: a command, such as `ssh`, with the host's stdin and stdout."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from astraflow.addons.cluster.host_frames import MARK, FromHost, Hello, ToHost, encode_frame, read_frame
from astraflow.errors import WireError

__all__ = ["HostLink", "LinkLostError"]

_MAX_ERROR_BYTES = 4096
"""How much of the end of the command's stderr is kept, because it says why a link was lost."""
_EXIT_GRACE_S = 2.0
"""Time for the command to end by itself after its stdout has closed."""
_DECODER = msgspec.msgpack.Decoder(FromHost)


class LinkLostError(Exception):
    """The link has ended; the text says why. `code`: exit code of the command, None if it still ran."""

    def __init__(self, text: str, code: int | None) -> None:
        super().__init__(text)
        self.code = code


class HostLink:
    """A link to a host, open until `close`. Its command has its own session, so Ctrl-C doesn't reach it.

    Example: `link = await HostLink.open(["ssh", "gpu-1", "python3 -P -m ..."])`.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._errors = b""
        self._drain = asyncio.create_task(self._keep_errors())

    @classmethod
    async def open(cls, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> "HostLink":
        """Starts the command, by default with this process's environment. Raises: OSError if the program
        doesn't exist."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env=env
        )
        return cls(process)

    async def hello(self) -> Hello:
        """Waits for the host's first message. Raises: LinkLostError."""
        try:
            await self._stdout.readuntil(MARK)  # at most 64 KiB, the limit of the stream
        except asyncio.LimitOverrunError as err:
            raise LinkLostError(
                "it printed more than 64 KiB before AstraFlow's first message; let its shell print less", None
            ) from err
        except EOFError as err:
            raise await self._lost() from err
        message = await self.receive()
        if not isinstance(message, Hello):
            raise LinkLostError(f"it sent {type(message).__name__} before Hello", None)
        return message

    async def receive(self) -> FromHost:
        """Returns the next message. Raises: LinkLostError."""
        try:
            return await read_frame(self._stdout, _DECODER)
        except WireError as err:
            raise LinkLostError(str(err), None) from err
        except EOFError as err:
            raise await self._lost() from err

    def send(self, message: ToHost) -> None:
        """Sends a message. If the link has ended, this does nothing, and `receive` raises."""
        if not self._stdin.is_closing():
            self._stdin.write(encode_frame(message))

    def close_stdin(self) -> None:
        """Announces that no more messages follow, so the host ends its process."""
        self._stdin.close()

    def close(self) -> None:
        """Terminates the command, if it still runs, which the host notices. SIGTERM also removes a waiting
        `srun` from Slurm's queue."""
        self._drain.cancel()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def finish(self) -> None:
        """Gives the command a moment to end by itself, terminates it, and kills it if that takes too long.
        Returns once it has ended."""
        transport = cast("Any", self._process)._transport
        # `wait` also waits until all output is read and nobody else holds the pipes, so they are closed.
        for end in (self.close, transport.close):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_GRACE_S):
                    await self._process.wait()
            end()
        await self._process.wait()

    async def _lost(self) -> LinkLostError:
        """Makes an error with the reason that the command gave: the last line of stderr, or the exit code."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_GRACE_S):
                await self._process.wait()
                await self._drain
        lines = self._errors.decode(errors="replace").strip().splitlines()
        code = self._process.returncode
        how = "it closed its output" if code is None else f"it ended with code {code}"
        return LinkLostError(lines[-1] if lines else how, code)

    async def _keep_errors(self) -> None:
        assert self._process.stderr is not None
        while part := await self._process.stderr.read(_MAX_ERROR_BYTES):
            self._errors = (self._errors + part)[-_MAX_ERROR_BYTES:]
