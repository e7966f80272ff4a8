"""Manifests: where tensors lie in the bytes of a version, and how these bytes are cut, hashed and checked.

The bytes of a version are its tensors in manifest order, each at the next multiple of `ALIGNMENT`, with zeros
in between. They are cut into chunks of fixed size. The digest is a hash over the hashes of each half MiB, so
that several threads can compute it. Everything here is pure: no files, no sockets.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from astraflow import wire
from astraflow.errors import WeightsError, WireError
from astraflow.types import Chunk, FileInfo, Manifest, TensorInfo
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.threads import shared_threads

__all__ = [
    "ALIGNMENT",
    "FILES",
    "ITEM_BYTES",
    "MAX_CHUNK_BYTES",
    "SEGMENT_BYTES",
    "TensorBytes",
    "VersionBytes",
    "VersionDigest",
    "base_name",
    "build_manifest",
    "check_digest",
    "check_file_name",
    "check_manifest",
    "check_policy_name",
    "check_tensors",
    "cut",
    "delta_of",
    "digest_of",
    "digest_of_hashes",
    "elements_in",
    "hash_bytes",
    "is_model_file",
    "lay_out",
    "name_of",
    "pack",
    "plan_path",
    "read_base",
    "span_bytes",
    "table_digest",
    "table_of",
    "tensors_in",
    "tensors_of",
]

ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every dtype, so that views of the buffer are aligned."""

FILES = "files"
"""Name of the file with the model files, among the chunks of a version that a trainer hands over."""

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one element, by dtype."""

SEGMENT_BYTES = 1 << 19
"""Bytes per hash of the digest: few enough to remain in the core's own cache between use and hashing."""

_THREADS_FROM = 16 * SEGMENT_BYTES
"""The calling thread hashes a smaller version; several threads hash a larger one in parts of this size."""

MAX_CHUNK_BYTES = 1 << 30
"""Largest chunk, because a process that serves or checks one holds it in memory."""

_MAX_CHUNKS = 1 << 20
_MAX_DIMENSIONS = 16
_MAX_FILES = 256
_MAX_FILE_BYTES = 1 << 29
"""Config and tokenizer together; a large tokenizer has 40 MB."""
_MAX_DELTA_EXTRA = 1 << 20
"""A delta may exceed twice its version by this many bytes, for the headers of many small tensors."""

_HASH = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_FILE_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".md")
"""Formats that are read and never executed: no Python or pickle travels with a model."""


# --- names and hashes -----------------------------------------------------------------------------


def hash_bytes(data: bytes | memoryview) -> str:
    """xxh3-128 of the bytes as 32 hexadecimal digits. It detects damage, not forgery."""
    return xxhash.xxh3_128_hexdigest(data)


def check_policy_name(name: str) -> str:
    """Returns the name if a folder can have it. Raises: WeightsError."""
    if not _NAME.fullmatch(name):
        raise WeightsError(
            f"policy name {name!r}: use letters, digits, '_', '-' and '.'; the first cannot be '-' or '.'"
        )
    return name


def is_model_file(name: str) -> bool:
    """Whether a file of this name may be published with a version: it is never executed and holds no
    weights."""
    # A file like `model.safetensors.index.json` maps tensors to files, which would be wrong here.
    return bool(_NAME.fullmatch(name)) and name.endswith(_FILE_SUFFIXES) and not name.endswith(".index.json")


def check_file_name(name: str) -> str:
    """Returns the name if such a file may be published with a version. Raises: WeightsError."""
    if not is_model_file(name):
        raise WeightsError(
            f"file {name!r} cannot be published with a version; expected a plain name that ends in "
            f"{', '.join(_FILE_SUFFIXES)}"
        )
    return name


# --- layout ---------------------------------------------------------------------------------------


def table_of(tensors: Iterable[tuple[str, Sequence[int], str]]) -> tuple[TensorInfo, ...]:
    """The table of a version with tensors of these names, shapes and dtypes.

    Raises: WeightsError if a dtype is unknown or a name is repeated.
    """
    infos: list[TensorInfo] = []
    end = 0
    for name, shape, dtype in tensors:
        if dtype not in ITEM_BYTES:
            choices = ", ".join(ITEM_BYTES)
            raise WeightsError(f"tensor {name!r}: dtype {dtype!r} is not one of {choices}")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        end = offset + num_bytes
        infos.append(
            TensorInfo(
                name=name,
                shape=tuple(shape),
                dtype=dtype,  # pyright: ignore[reportArgumentType]  # checked above
                offset=offset,
                num_bytes=num_bytes,
            )
        )
    check_tensors(infos)
    return tuple(infos)


def table_digest(tensors: Sequence[TensorInfo]) -> str:
    """Identifies a table: xxh3-128 of its encoding, as 32 hexadecimal digits."""
    return hash_bytes(msgspec.msgpack.encode(tensors))


def lay_out(tensors: Sequence[HostTensor]) -> tuple[TensorInfo, ...]:
    """The table of a version with these tensors, all of which must be complete.

    Raises: WeightsError if a tensor's bytes, shape and dtype disagree, or a name is repeated.
    """
    infos = table_of((tensor.name, tensor.shape, tensor.dtype) for tensor in tensors)
    for info, tensor in zip(infos, tensors, strict=True):
        if tensor.data.ndim != 1 or tensor.data.dtype != np.uint8:
            raise WeightsError(f"tensor {tensor.name!r}: data must be uint8 [num_bytes], its raw bytes")
        if tensor.data.nbytes != info.num_bytes:
            raise WeightsError(
                f"tensor {tensor.name!r}: {tensor.data.nbytes} bytes, but shape {tensor.shape} of "
                f"{tensor.dtype} needs {info.num_bytes}"
            )
    return infos


def span_bytes(tensors: Sequence[TensorInfo]) -> int:
    """Number of bytes of a version: the end of its last tensor."""
    return tensors[-1].offset + tensors[-1].num_bytes if tensors else 0


def elements_in(info: TensorInfo, start: int, end: int) -> tuple[int, int]:
    """The `[first, last)` elements of a tensor that lie in `[start, end)` of the version; (0, 0) if none do.
    Neither bound may cut an element."""
    width = ITEM_BYTES[info.dtype]
    low = max(start - info.offset, 0)
    high = min(end - info.offset, info.num_bytes)
    return (low // width, high // width) if low < high else (0, 0)


def cut(num_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """The `[start, end)` of each chunk."""
    return [(start, min(start + chunk_bytes, num_bytes)) for start in range(0, num_bytes, chunk_bytes)]


def check_tensors(tensors: Sequence[TensorInfo]) -> None:
    """Raises: WeightsError unless names are unique, sizes fit shape and dtype, and spans ascend without
    overlap."""
    names: set[str] = set()
    end = 0
    for tensor in tensors:
        if len(tensor.shape) > _MAX_DIMENSIONS:
            raise WeightsError(
                f"tensor {tensor.name!r} has {len(tensor.shape)} dimensions; {_MAX_DIMENSIONS} are allowed"
            )
        expected = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if min(tensor.shape, default=0) < 0 or tensor.num_bytes != expected:
            raise WeightsError(
                f"tensor {tensor.name!r}: {tensor.num_bytes} bytes, but shape {tensor.shape} of "
                f"{tensor.dtype} needs {expected}"
            )
        if tensor.name in names:
            raise WeightsError(f"tensor {tensor.name!r} comes twice")
        if tensor.offset < end:
            raise WeightsError(
                f"tensor {tensor.name!r} at {tensor.offset} overlaps the previous one, which ends at {end}"
            )
        if tensor.offset - end >= ALIGNMENT:
            raise WeightsError(
                f"tensor {tensor.name!r} at {tensor.offset} leaves a gap after {end}; "
                f"each lies at the next multiple of {ALIGNMENT}"
            )
        names.add(tensor.name)
        end = tensor.offset + tensor.num_bytes


class VersionBytes(Protocol):
    """The bytes of a version. `[start:end]` gives a contiguous range, as a view where possible."""

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, index: slice, /) -> NDArray[np.uint8]: ...


class TensorBytes:
    """The bytes of a version, or of a part of it, whose tensors are separate in memory. A range that touches
    several tensors is copied, with the zeros between them.

    `span`: the `[start, end)` of the version that the tensors cover; by default, all of it.
    Raises: WeightsError if a tensor has other elements than those of the span.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        tensors: Sequence[HostTensor],
        *,
        span: tuple[int, int] | None = None,
    ) -> None:
        self.nbytes = span_bytes(infos)
        self._low, self._high = (0, self.nbytes) if span is None else span
        self._starts: list[int] = []
        self._arrays: list[NDArray[np.uint8]] = []
        for info, tensor in zip(infos, tensors, strict=True):
            first, last = elements_in(info, self._low, self._high)
            width = ITEM_BYTES[info.dtype]
            if (tensor.first_idx, tensor.data.nbytes) != (first, (last - first) * width):
                raise WeightsError(
                    f"tensor {info.name!r} of shape {info.shape}: {tensor.data.nbytes} bytes starting at "
                    f"element {tensor.first_idx}; expected {(last - first) * width} starting at {first}"
                )
            if last > first:
                self._starts.append(info.offset + first * width)
                self._arrays.append(tensor.data)

    def __getitem__(self, index: slice, /) -> NDArray[np.uint8]:
        start, end, _ = index.indices(self.nbytes)
        if start >= end:
            return np.zeros(0, np.uint8)
        assert self._low <= start <= end <= self._high, "a range outside the span"
        first = max(bisect_right(self._starts, start) - 1, 0)
        low = start - self._starts[first]
        array = self._arrays[first]
        if 0 <= low <= low + end - start <= array.nbytes:
            return array[low : low + end - start]
        data = np.zeros(end - start, np.uint8)
        for offset, array in zip(self._starts[first:], self._arrays[first:], strict=True):
            if offset >= end:
                break
            some = array[max(start - offset, 0) : end - offset]
            at = max(offset - start, 0)
            data[at : at + some.nbytes] = some
        return data


class VersionDigest:
    """Digest of the bytes of a version, computed from the hashes of its segments. Several threads may share
    the work in any order.

    Example: `d = VersionDigest(buffer); d.take(0, 8 << 20); d.hexdigest()`.
    """

    def __init__(self, data: VersionBytes) -> None:
        self._data = data
        self._hashes = [b""] * -(-data.nbytes // SEGMENT_BYTES)  # empty until the segment is hashed

    def take(self, start: int, end: int) -> None:
        """Hashes the segments that lie entirely within `[start, end)` of the version, each at most once."""
        last = len(self._hashes) if end >= self._data.nbytes else end // SEGMENT_BYTES
        for idx in range(-(-start // SEGMENT_BYTES), last):
            self._hashes[idx] = self._hashes[idx] or self._hash(idx)

    def hexdigest(self) -> str:
        """32 hexadecimal digits. Hashes the segments that no range covered."""
        return digest_of_hashes(self.hashes(0, len(self._hashes)))

    def hashes(self, first: int, last: int) -> bytes:
        """The hashes of the segments `[first, last)`, joined. Hashes those that no range covered."""
        return b"".join(self._hashes[idx] or self._hash(idx) for idx in range(first, last))

    def _hash(self, idx: int) -> bytes:
        segment = self._data[idx * SEGMENT_BYTES : (idx + 1) * SEGMENT_BYTES]
        return xxhash.xxh3_128_digest(segment.data)


def digest_of_hashes(hashes: bytes) -> str:
    """The digest of a version, from the joined hashes of all its segments."""
    return xxhash.xxh3_128_hexdigest(hashes)


def digest_of(data: VersionBytes) -> str:
    """The digest of the bytes of a version. Several threads share the work for a large one."""
    digest = VersionDigest(data)
    if data.nbytes >= _THREADS_FROM:
        pool = shared_threads()
        for done in [pool.submit(digest.take, *span) for span in cut(data.nbytes, _THREADS_FROM)]:
            done.result()
    return digest.hexdigest()


# --- manifests ------------------------------------------------------------------------------------


def pack(tensors: Sequence[HostTensor]) -> NDArray[np.uint8]:
    """The bytes of a full version in one array."""
    infos = lay_out(tensors)
    buffer = np.zeros(span_bytes(infos), dtype=np.uint8)
    for info, tensor in zip(infos, tensors, strict=True):
        buffer[info.offset : info.offset + info.num_bytes] = tensor.data
    return buffer


def build_manifest(
    policy: str,
    version: int,
    tensors: Sequence[HostTensor],
    *,
    chunk_bytes: int,
    files: tuple[FileInfo, ...] = (),
    created_s: float = 0.0,
) -> Manifest:
    """The manifest of a full version whose bytes are `pack(tensors)`, without sources."""
    buffer = pack(tensors)
    infos = lay_out(tensors)
    spans = cut(buffer.nbytes, chunk_bytes)
    chunks = tuple(Chunk(hash=hash_bytes(buffer.data[a:b]), num_bytes=b - a) for a, b in spans)
    return Manifest(
        policy=policy,
        version=version,
        kind="full",
        tensors=infos,
        chunks=chunks,
        digest=digest_of(buffer),
        files=files,
        num_bytes=sum(c.num_bytes for c in chunks) + sum(f.chunk.num_bytes for f in files),
        created_s=created_s,
    )


def check_manifest(manifest: Manifest) -> None:
    """Raises: WeightsError, naming policy and version, unless the manifest is consistent."""
    try:
        check_policy_name(manifest.policy)
        check_tensors(manifest.tensors)
        for info in manifest.files:
            check_file_name(info.name)
        chunks = (*manifest.chunks, *(f.chunk for f in manifest.files))
        for chunk in (*chunks, *(manifest.shortcut.chunks if manifest.shortcut else ())):
            if not _HASH.fullmatch(chunk.hash) or not 0 <= chunk.num_bytes <= MAX_CHUNK_BYTES:
                raise WeightsError(
                    f"chunk {chunk.hash!r} of {chunk.num_bytes} bytes: expected 32 hexadecimal digits and at "
                    f"most {MAX_CHUNK_BYTES} bytes"
                )
        _check_counts(manifest)
        if (total := sum(c.num_bytes for c in chunks)) != manifest.num_bytes:
            raise WeightsError(f"chunks hold {total} bytes, num_bytes says {manifest.num_bytes}")
        held = sum(c.num_bytes for c in manifest.chunks)
        needed = span_bytes(manifest.tensors)
        if manifest.kind == "full" and held != needed:
            raise WeightsError(f"chunks hold {held} bytes, the tensors need {needed}")
        delta = delta_of(manifest)
        if delta is not None and not 0 <= delta.base < delta.version:
            raise WeightsError(f"its base is version {delta.base}; expected an older version, at least 0")
        size = sum(c.num_bytes for c in delta.chunks) if delta is not None else 0
        if size > (most := 2 * needed + _MAX_DELTA_EXTRA):
            raise WeightsError(
                f"its delta has {size} bytes; between versions of {needed} bytes, at most {most} are allowed"
            )
    except WeightsError as err:
        raise WeightsError(f"manifest of {manifest.policy!r} version {manifest.version}: {err}") from err


def _check_counts(manifest: Manifest) -> None:
    """Raises: WeightsError if there are more chunks or files than a version can have."""
    shortcut = manifest.shortcut.chunks if manifest.shortcut else ()
    for chunks in (manifest.chunks, shortcut):
        if len(chunks) > _MAX_CHUNKS or not all(chunk.num_bytes for chunk in chunks):
            raise WeightsError(
                f"{len(chunks)} chunks; at most {_MAX_CHUNKS} are allowed, and none may be empty"
            )
    num_bytes = sum(info.chunk.num_bytes for info in manifest.files)
    if len(manifest.files) > _MAX_FILES or num_bytes > _MAX_FILE_BYTES:
        raise WeightsError(
            f"{len(manifest.files)} files of {num_bytes} bytes in total; at most {_MAX_FILES} files of "
            f"{_MAX_FILE_BYTES} bytes are allowed"
        )


def base_name(digest: str, table: Sequence[TensorInfo]) -> str:
    """The name under which the base of adapters is published, which identifies its bytes and its table."""
    return f"base-{hash_bytes((digest + table_digest(table)).encode())}"


def read_base(manifest: Manifest, content: bytes) -> Manifest:
    """The manifest of the base of a version that consists of adapters. `content`: its `BASE_FILE`.

    Raises: WeightsError unless it is a consistent full version under its own name.
    """
    try:
        base = wire.decode(content, Manifest, wire.JSON)
    except WireError as err:
        raise WeightsError(f"{name_of(manifest)}: the manifest of its base is damaged: {err}") from err
    check_manifest(base)
    if (base.kind, base.policy) != ("full", base_name(base.digest, base.tensors)):
        raise WeightsError(
            f"{name_of(manifest)}: its base is {base.kind} version {base.policy!r}; expected full version "
            f"{base_name(base.digest, base.tensors)!r}, as its digest and table say"
        )
    return base


def check_digest(manifest: Manifest, data: VersionBytes) -> None:
    """Raises: WeightsError unless these are the bytes of the manifest's version."""
    if (actual := digest_of(data)) != manifest.digest:
        raise WeightsError(f"{name_of(manifest)}: the tensors hash to {actual}, expected {manifest.digest}")


def name_of(manifest: Manifest) -> str:
    """The name of a version in messages."""
    return f"policy {manifest.policy!r} version {manifest.version}"


def tensors_of(manifest: Manifest, buffer: NDArray[np.uint8]) -> tuple[HostTensor, ...]:
    """The tensors of a full version, as views of its bytes, in manifest order."""
    return tuple(
        HostTensor(t.name, t.shape, t.dtype, buffer[t.offset : t.offset + t.num_bytes])
        for t in manifest.tensors
    )


def tensors_in(tensors: Sequence[TensorInfo], start: int, end: int) -> str:
    """The names of the tensors that `[start, end)` touches, for messages."""
    names = [t.name for t in tensors if t.offset < end and t.offset + t.num_bytes > start]
    if not names:
        return "no tensor"
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"


def delta_of(manifest: Manifest) -> Manifest | None:
    """The version as a delta: the manifest itself, or the shortcut of a full version; None without one."""
    if manifest.kind == "delta":
        return manifest
    if manifest.shortcut is None:
        return None
    chunks = manifest.shortcut.chunks
    return msgspec.structs.replace(
        manifest,
        kind="delta",
        base=manifest.shortcut.base,
        encoding=manifest.shortcut.encoding,
        chunks=chunks,
        num_bytes=sum(c.num_bytes for c in (*chunks, *(f.chunk for f in manifest.files))),
        shortcut=None,
    )


def plan_path(manifests: Sequence[Manifest], held: Collection[int]) -> tuple[Manifest, ...]:
    """The path to the newest version with the fewest bytes to fetch: a full version, deltas from a held
    version, or a full version and deltas.

    `manifests` belong to one policy, and `held` are the versions that the receiver has. Returns what to
    fetch, in order; nothing if the newest version is held. The shortcut of a full version appears as a delta.
    Model files do not count, since they are fetched only once.

    Raises: WeightsError if there is no path.
    """
    if not manifests:
        raise WeightsError("no manifests to plan with")
    # The cheapest cost and path to each version. A base is older than its delta, so one pass in the order of
    # versions finds them all.
    best: dict[int, tuple[int, tuple[Manifest, ...]]] = dict.fromkeys(held, (0, ()))
    for manifest in sorted(manifests, key=lambda m: m.version):
        delta = delta_of(manifest)
        ways: list[tuple[int, tuple[Manifest, ...]]] = []
        if manifest.kind == "full":
            ways.append((_cost(manifest), (manifest,)))
        if delta is not None and delta.base in best:
            cost, path = best[delta.base]
            ways.append((cost + _cost(delta), (*path, delta)))
        if manifest.version in best:
            ways.append(best[manifest.version])
        if ways:
            best[manifest.version] = min(ways, key=lambda way: way[0])
    newest = max(manifests, key=lambda m: m.version)
    if newest.version not in best:
        raise WeightsError(
            f"{newest.policy!r} version {newest.version} is a delta on {newest.base}, which no path reaches "
            f"from the held versions {sorted(held)}; ask for a full version"
        )
    return best[newest.version][1]


def _cost(manifest: Manifest) -> int:
    """Bytes of the version without its model files."""
    return manifest.num_bytes - sum(f.chunk.num_bytes for f in manifest.files)
