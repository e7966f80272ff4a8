"""Items of weights: the manifests, chunks and deltas of a version, and how a publisher offers them."""

from typing import Annotated, Literal

from msgspec import Meta

from astraflow.types.bounds import (
    MAX_CHUNKS,
    MAX_TENSORS,
    Bytes,
    Count,
    Digest,
    Label,
    Labels,
    RelPath,
    TensorName,
    UnixSeconds,
    Url,
    Version,
    Versions,
)
from astraflow.types.episodes import ServedVersions
from astraflow.types.item import Item, RunState

__all__ = [
    "Chunk",
    "ChunkState",
    "DeltaFile",
    "FileInfo",
    "Forget",
    "HandOver",
    "Manifest",
    "PublisherHealth",
    "Shortcut",
    "SourceLink",
    "TensorInfo",
    "VersionsReply",
]


class Chunk(Item, frozen=True, array_like=True):
    """A piece of a version's bytes, identified by its xxh3-128 hash in hex, and its length."""

    hash: Digest
    num_bytes: Bytes


class TensorInfo(Item, frozen=True, kw_only=True):
    """A tensor of a version: Hugging Face name, shape, dtype, and position in the joined chunks."""

    name: TensorName
    shape: Annotated[tuple[Bytes, ...], Meta(max_length=16)]
    dtype: Literal["bfloat16", "float16", "float32"]
    offset: Bytes
    num_bytes: Bytes


class FileInfo(Item, frozen=True, kw_only=True):
    """A small file of the model folder (config, tokenizer, chat template), which version 0 contains."""

    name: Label
    chunk: Chunk


class SourceLink(Item, frozen=True, kw_only=True):
    """Where chunks can be fetched.

    `http`: at `url + "/v1/chunks/" + hash`. `file`: from a folder of chunk files. `s3`: from a prefix of
    chunk objects. A rollout service that serves its chunks has its name in the label `peer`.
    """

    kind: Literal["http", "file", "s3"]
    url: Url
    labels: Labels = {}


class Shortcut(Item, frozen=True, kw_only=True):
    """A delta to a version that is also available in full, so `base` need not be kept for it."""

    base: Version
    encoding: Label
    chunks: Annotated[tuple[Chunk, ...], Meta(max_length=MAX_CHUNKS)]


class Manifest(Item, frozen=True, kw_only=True):
    """An immutable version `(policy, version)`.

    `full`: the joined chunks contain every tensor at its offset. `delta`: the chunks contain the difference
    to version `base`, and to no other, in the format that `encoding` names.
    """

    policy: Label
    version: Version
    kind: Literal["full", "delta"]
    base: Version = -1
    encoding: Label = "raw"
    tensors: Annotated[tuple[TensorInfo, ...], Meta(max_length=MAX_TENSORS)]
    """The same for all versions of a policy. Empty if a name of the table is sent instead."""
    chunks: Annotated[tuple[Chunk, ...], Meta(max_length=MAX_CHUNKS)]
    digest: Digest
    """Hex xxh3-128 over the xxh3-128 of each 512 KiB of the version. Installed bytes must match it."""
    files: Annotated[tuple[FileInfo, ...], Meta(max_length=1024)] = ()
    sources: Annotated[tuple[SourceLink, ...], Meta(max_length=4096)] = ()
    num_bytes: Bytes
    """Bytes to fetch."""
    created_s: UnixSeconds = 0.0
    shortcut: Shortcut | None = None
    """For a full version: a delta for receivers that hold its base."""


class DeltaFile(Item, frozen=True, kw_only=True):
    """A version that a trainer hands over as a delta."""

    path: RelPath
    """A file with one delta of encoding `astraflow-delta-1`, relative to `incoming`."""
    base: Version
    """The previous version, which the publisher has."""


class HandOver(Item, frozen=True, kw_only=True):
    """A trainer hands a version to its publisher: in full, as a delta, or both.

    The bytes are in files of the publisher's `incoming` folder.
    """

    policy: Label
    version: Version
    path: RelPath = ""
    """A file with the full version, relative to `incoming`: the tensors at their offsets, then the files of
    the model folder one after the other. Or a folder with a file for each chunk, named `0`, `1`, ..., and
    `files` for the rest. The publisher keeps these instead of copying them, so they must not change. Empty if
    there is only a delta."""
    delta: DeltaFile | None = None
    """A delta alone is refused with code `full_needed` if the publisher needs the full version."""
    tensors: Annotated[tuple[TensorInfo, ...], Meta(max_length=MAX_TENSORS)]
    digest: Digest
    """As in the manifest. The publisher refuses bytes, or the result of a delta, with another digest."""
    files: Annotated[tuple[FileInfo, ...], Meta(max_length=1024)] = ()
    """Empty after the first version of a policy, whose files stay valid."""
    is_first: bool = False
    """True for the first version of a trainer's session, which is published in full. The dataflow never
    announced its number, so it replaces what a trainer that died may have left under this number."""


class Forget(Item, frozen=True, kw_only=True):
    """Allows a publisher to delete versions of a policy that are neither `needed` nor among the newest."""

    policy: Label
    needed: Versions


class ChunkState(Item, frozen=True, kw_only=True):
    """The state of a chunk at a peer: complete, in transfer, or neither."""

    state: Literal["here", "coming", "absent"]


class PublisherHealth(Item, frozen=True, kw_only=True):
    """The publisher works and can serve these versions."""

    versions: Annotated[tuple[ServedVersions, ...], Meta(max_length=1024)]
    num_chunks: Count
    num_bytes: Count
    sent_bytes: Count = 0
    """Bytes of chunks sent since the publisher started."""


class VersionsReply(Item, frozen=True, kw_only=True):
    """Manifests newer than the given version, oldest first, and versions that evaluation needs now."""

    newest: Version
    manifests: Annotated[tuple[Manifest, ...], Meta(max_length=65_536)]
    pinned: Versions
    state: RunState
    table: Digest = ""
    """Name of the tensor table; empty without manifests. Tables that the caller named are not sent."""
