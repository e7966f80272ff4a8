"""The messages between a launcher and a host on another machine, over the host's stdin and stdout.

    host -> launcher    Hello; then StartConfirmation or StartRefusal; then ProcessReport once per second,
                        and SilenceReport if requested
    launcher -> host    Start; then Signal, SilenceWatch, and KeepAlive every few seconds

A frame consists of its length in four bytes, big-endian, and a message in msgpack. The host writes the line
`MARK` before its first frame, because shells and schedulers may print a greeting first. Every field has a
bound.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from astraflow.errors import BoundError, WireError
from astraflow.protocols import ProcessLife, ProcessSpec

__all__ = [
    "MARK",
    "MAX_LOG_BYTES",
    "FromHost",
    "Hello",
    "KeepAlive",
    "ProcessReport",
    "Signal",
    "SilenceReport",
    "SilenceWatch",
    "Start",
    "StartConfirmation",
    "StartRefusal",
    "ToHost",
    "encode_frame",
    "read_frame",
]

MARK = b"astraflow host, protocol 1\n"
"""The line before the first frame."""
MAX_LOG_BYTES = 256 * 1024
"""Largest output of a process in one frame; more output takes several frames."""
_MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Enough for the largest message, a `Start` with a few certificates."""
_LENGTH_BYTES = 4

_Text = Annotated[str, Meta(max_length=8_192)]
_Path = Annotated[str, Meta(max_length=4_096)]
_Seconds = Annotated[float, Meta(ge=0, le=1e10)]
_Amount = Annotated[float, Meta(ge=0, le=1e18)]
_Count = Annotated[int, Meta(ge=0, le=1_000_000)]


class Hello(Struct, frozen=True, tag=True, kw_only=True):
    """The machine that the host runs on."""

    hostname: _Text
    version: _Text
    """Version of AstraFlow there."""
    cpus: _Count
    gpus: _Count
    memory_bytes: _Amount
    free_disk_bytes: _Amount
    """Free space where the files of the process will be."""
    now_s: _Seconds
    """Its clock, in seconds since 1970."""
    caller: _Text = ""
    """The launcher's address as this machine sees it; empty if that is unknown."""


class StartConfirmation(Struct, frozen=True, tag="Started", kw_only=True):
    """The process runs."""

    pid: Annotated[int, Meta(ge=1, le=2**31)]


class StartRefusal(Struct, frozen=True, tag="Refused", kw_only=True):
    """The process can't be started here; the host ends."""

    text: _Text
    is_final: bool
    """Whether settings are wrong, so that another attempt would fail in the same way."""


class ProcessReport(Struct, frozen=True, tag="Told", kw_only=True):
    """The state of the process, and what it has written since the last report."""

    log: Annotated[bytes, Meta(max_length=MAX_LOG_BYTES)]
    silent_s: _Seconds | None
    works: bool
    condition: _Text
    code: Annotated[int, Meta(ge=-1_000, le=1_000)] | None
    """Exit code, once the process has ended and all of its output was sent. This is the last message."""
    is_evicted: bool
    """Whether the machine was taken away (SIGTERM to the host), so that the end isn't a crash."""

    @property
    def life(self) -> ProcessLife:
        """The state of the process, for a handle."""
        return ProcessLife(self.silent_s, works=self.works, condition=self.condition)


class SilenceReport(Struct, frozen=True, tag="SilentFor", kw_only=True):
    """The process has been silent for as long as `SilenceWatch` said."""

    text: _Text


class Start(Struct, frozen=True, tag=True, kw_only=True):
    """Starts a process. Carries the contents of the files that it reads."""

    version: _Text
    """Version of the launcher's AstraFlow."""
    name: _Text
    argv: Annotated[tuple[_Text, ...], Meta(max_length=1_000)]
    env: Annotated[dict[_Text, _Text], Meta(max_length=1_000)]
    secrets: Annotated[dict[_Text, _Text], Meta(max_length=1_000)]
    log_path: _Path
    scratch: Annotated[tuple[_Path, ...], Meta(max_length=100)]
    files: Annotated[dict[_Path, bytes], Meta(max_length=100)]

    @classmethod
    def of(cls, spec: ProcessSpec, files: Mapping[Path, bytes], *, version: str) -> "Start":
        """Makes the message that starts a process."""
        return cls(
            version=version,
            name=spec.name,
            argv=spec.argv,
            env=dict(spec.env),
            secrets=dict(spec.secrets),
            log_path=str(spec.log_path),
            scratch=tuple(map(str, spec.scratch)),
            files={str(path): content for path, content in files.items()},
        )

    @property
    def spec(self) -> ProcessSpec:
        """The process, with the paths of the launcher's machine."""
        return ProcessSpec(
            self.name,
            self.argv,
            self.env,
            Path(self.log_path),
            secrets=self.secrets,
            scratch=tuple(map(Path, self.scratch)),
            reads=tuple(map(Path, self.files)),
        )


class Signal(Struct, frozen=True, tag=True, kw_only=True):
    """Asks the process to stop, or kills it."""

    verb: Literal["terminate", "kill"]


class SilenceWatch(Struct, frozen=True, tag="WatchSilence", kw_only=True):
    """Requests a `SilenceReport` once the process has shown no sign of life for `longest_s`."""

    longest_s: _Seconds


class KeepAlive(Struct, frozen=True, tag="StillHere", kw_only=True):
    """The launcher is alive. A host that receives nothing for too long ends its process."""


FromHost = Hello | StartConfirmation | StartRefusal | ProcessReport | SilenceReport
ToHost = Start | Signal | SilenceWatch | KeepAlive
_Message = TypeVar("_Message")


def encode_frame(message: FromHost | ToHost) -> bytes:
    """Encodes a message as a frame. Raises: BoundError if the message is too large."""
    body = msgspec.msgpack.encode(message)
    if len(body) > _MAX_FRAME_BYTES:
        raise BoundError(
            f"{type(message).__name__}: {len(body):,} bytes; at most {_MAX_FRAME_BYTES:,} are sent"
        )
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def read_frame(stream: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    """Reads the next message.

    Raises: EOFError at the end of the stream, even within a frame; WireError for an invalid frame.
    """
    size = int.from_bytes(await stream.readexactly(_LENGTH_BYTES), "big")
    if size > _MAX_FRAME_BYTES:
        raise BoundError(f"a frame of {size:,} bytes; at most {_MAX_FRAME_BYTES:,} are expected")
    body = await stream.readexactly(size)
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as err:
        raise WireError(f"not a message between launcher and host: {err}") from err
