"""Versions of the weights as folders that a server reads: safetensors with config and tokenizer.

The folders are in shared memory (`/dev/shm`) if it has enough room. A version is refused before anything is
written if its names or shapes differ from those of the first version, or if it contains non-finite values.

Services of one machine share the bytes of a version: who needs it first writes it, and the others link to its
files, which stay until the last link is gone. Equal content is found by its hash.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from astraflow.addons.inference_servers.start_turns import user_folder
from astraflow.errors import UnfitVersionError, WeightsError
from astraflow.models.adapters import merge_adapters
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.manifest import SEGMENT_BYTES, cut
from astraflow.weights.snapshot import snapshot_to_folder, write_model, write_safetensors
from astraflow.weights.threads import NUM_THREADS, cancel_and_wait, shared_threads

__all__ = ["WeightsFolder"]

_log = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_NUM_COPIES = 3
"""Number of copies of the weights that must fit in shared memory: the served version, the next one, and the
same amount as one of them for the server."""
_PART_BYTES = 16 * SEGMENT_BYTES
"""Bytes that a thread checks and hashes before it takes the next part."""
_FILE_BYTES = 1 << 26
"""Least size of a file if there are several."""
_INFINITY = {"float32": (4, 0x7F800000), "bfloat16": (2, 0x7F80), "float16": (2, 0x7C00)}
"""By dtype: bytes of a value, and the bits of positive infinity."""


class WeightsFolder:
    """A private folder with the versions that one server reads. Call `remove` at the end.

    Example: `folder = WeightsFolder("vllm-actor", snapshot)`, `path = folder.write(newer)`.
    """

    def __init__(self, name: str, snapshot: WeightSnapshot, *, parent: str = "") -> None:
        self._shapes = {tensor.name: tensor.shape for tensor in snapshot.tensors}
        num_bytes = sum(tensor.data.nbytes for tensor in snapshot.tensors)
        prefix = f"astraflow-{name}-"
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent or _parent(prefix, num_bytes)))

    def write(self, snapshot: WeightSnapshot) -> Path:
        """Writes a version and returns its folder. Blocks.

        Raises: WeightsError if the version does not fit or cannot be written.
        """
        self._check_shapes(snapshot)
        path = self.path / f"version-{snapshot.version}"
        shutil.rmtree(path, ignore_errors=True)
        try:
            with _turn_to_write(_content_key(snapshot, self.path)) as twin:
                if not _link_all(twin, path):
                    plain = replace(snapshot, tensors=merge_adapters(snapshot.tensors, is_rounded=True))
                    snapshot_to_folder(plain, path, write=_write_model)
                _point_to(twin, path)
        except OSError as err:
            raise WeightsError(
                f"version {snapshot.version} of {snapshot.policy!r} cannot be written to {path}: {err}"
            ) from err
        return path

    def keep_only(self, path: Path) -> None:
        """Deletes all versions but one. Blocks."""
        for other in self.path.glob("version-*"):
            if other != path:
                shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """Deletes everything. Blocks."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _check_shapes(self, snapshot: WeightSnapshot) -> None:
        """Raises: UnfitVersionError if a version doesn't have the tensors of the first one."""
        shapes = {tensor.name: tensor.shape for tensor in snapshot.tensors}
        wrong = sorted(
            name for name in shapes.keys() | self._shapes.keys() if shapes.get(name) != self._shapes.get(name)
        )
        if wrong:
            name = wrong[0]
            raise UnfitVersionError(
                f"version {snapshot.version} of {snapshot.policy!r} does not fit the model that is served: "
                f"tensor {name!r} has shape {shapes.get(name, 'none')}, expected "
                f"{self._shapes.get(name, 'none')} ({len(wrong)} tensors differ); is it another architecture?"
            )


def _parent(prefix: str, num_bytes: int) -> str:
    """Returns shared memory if it has enough room, else the temporary folder.

    Folders of other services that are there already are likely to share their bytes.
    """
    with contextlib.suppress(OSError):
        if os.access(_SHARED_MEMORY, os.W_OK):
            is_shared = any(path.stat().st_uid == os.getuid() for path in _SHARED_MEMORY.glob(f"{prefix}*"))
            need = (1 if is_shared else _NUM_COPIES) * num_bytes
            disk = shutil.disk_usage(_SHARED_MEMORY)
            if disk.free > need:
                return str(_SHARED_MEMORY)
            _log.warning(
                "%s has %.1f of %.1f GB free, but versions need %.1f GB, so they are written to %s; give it "
                "more room, or name a folder on a fast disk in rollout.engine.attach.weights_dir",
                *(_SHARED_MEMORY, disk.free / 1e9, disk.total / 1e9, need / 1e9, tempfile.gettempdir()),
            )
    return tempfile.gettempdir()


# --- the files of a version -----------------------------------------------------------------------


def _write_model(folder: Path, tensors: Sequence[HostTensor]) -> None:
    """Writes the weights with several threads. Each has its own file, because a file has one writer at a
    time."""
    num_bytes = sum(tensor.data.nbytes for tensor in tensors)
    num_files = min(NUM_THREADS, num_bytes // _FILE_BYTES)
    parts: dict[int, list[HostTensor]] = {}
    start = 0
    for tensor in tensors:
        parts.setdefault(start * num_files // (num_bytes + 1), []).append(tensor)
        start += tensor.data.nbytes
    if len(parts) < 2:
        write_model(folder, tensors)
        return
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    with ThreadPoolExecutor(len(parts), thread_name_prefix="versions") as pool:
        list(pool.map(write_safetensors, [folder / name for name in names], parts.values()))
    files = {tensor.name: name for name, part in zip(names, parts.values(), strict=True) for tensor in part}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


# --- finite values, and the hash of a version -----------------------------------------------------


def _tensor_hashes(snapshot: WeightSnapshot) -> bytes:
    """The joined hashes of the parts of all tensors. Several threads check and hash them in one pass.

    Raises: UnfitVersionError for values that aren't finite.
    """
    parts = [(tensor, span) for tensor in snapshot.tensors for span in cut(tensor.data.nbytes, _PART_BYTES)]
    hashing = [shared_threads().submit(_hash_if_finite, tensor, *span) for tensor, span in parts]
    try:
        hashes = [future.result() for future in hashing]
    finally:
        cancel_and_wait(hashing)
    for (tensor, _), known in zip(parts, hashes, strict=True):
        if not known:
            raise UnfitVersionError(
                f"version {snapshot.version} of {snapshot.policy!r}: tensor {tensor.name} holds "
                f"{_num_not_finite(tensor)} values that are not finite"
            )
    return b"".join(hashes)


def _hash_if_finite(tensor: HostTensor, start: int, end: int) -> bytes:
    """The hash of a part of a tensor; empty if a value isn't finite.

    The part is read in pieces that stay in the core's cache between the check and the hash.
    """
    digest = xxhash.xxh3_128()
    for low in range(start, end, SEGMENT_BYTES):
        piece = tensor.data[low : min(low + SEGMENT_BYTES, end)]
        if not _is_finite(piece, tensor.dtype):
            return b""
        digest.update(piece.data)
    return digest.digest()


def _is_finite(data: NDArray[np.uint8], dtype: str) -> bool:
    """Whether no value is infinite or NaN, which means that all bits of its exponent are set.

    NumPy doesn't have bfloat16, so all types are read as integers. As signed integers, positive values are
    the largest; as unsigned ones, negative values. Both ascend with their magnitude, so two maxima suffice.
    """
    width, infinity = _INFINITY[dtype]
    sign = 1 << (8 * width - 1)
    return bool(data.view(f"<i{width}").max() < infinity and data.view(f"<u{width}").max() < sign + infinity)


def _num_not_finite(tensor: HostTensor) -> int:
    """Counts the values that are infinite or NaN."""
    width, infinity = _INFINITY[tensor.dtype]
    values = tensor.data.view(f"<u{width}")
    return int(np.count_nonzero((values & infinity) == infinity))


# --- one copy for the services of a machine -------------------------------------------------------


def _content_key(snapshot: WeightSnapshot, folder: Path) -> str:
    """A hash of all that a version's folder will have, and of its disk: links can't cross disks.

    Raises: UnfitVersionError for values that aren't finite.
    """
    hashes = _tensor_hashes(snapshot)
    digest = xxhash.xxh3_128(str(folder.stat().st_dev).encode())
    for path in sorted(snapshot.model_dir.iterdir()):
        digest.update(f"{path.name}\n".encode())
        digest.update(path.read_bytes())
    for tensor in snapshot.tensors:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.dtype}\n".encode())
    digest.update(hashes)
    return digest.hexdigest()


@contextmanager
def _turn_to_write(key: str) -> Generator[Path]:
    """Waits while another process writes the same content. Yields a link, which points to its folder if there
    is one. Blocks."""
    index = user_folder("versions")
    for link in index.iterdir():
        if link.is_symlink() and not link.exists():  # the folder was deleted
            link.unlink(missing_ok=True)
            link.with_suffix(".lock").unlink(missing_ok=True)
    with (index / f"{key}.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield index / key


def _link_all(twin: Path, path: Path) -> bool:
    """Makes `path` a folder with the same files as `twin`. Returns whether that was possible."""
    aside = path.with_name(f".{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        shutil.copytree(twin.resolve(strict=True), aside, copy_function=os.link)
    except (OSError, shutil.Error):  # there is none, or its owner deletes it right now
        shutil.rmtree(aside, ignore_errors=True)
        return False
    aside.rename(path)
    return True


def _point_to(twin: Path, path: Path) -> None:
    """Lets further services find the newest folder with a content."""
    fresh = twin.with_suffix(f".{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(path)
    fresh.rename(twin)
