"""Versions of the weights as folders that a server reads: safetensors with config and tokenizer.

The folders are in shared memory (`/dev/shm`) if it has enough room. A version is refused before anything is
written if its names or shapes differ from those of the first version, or if it contains non-finite values.

Services of one machine share the bytes of a version: who needs it first writes it, and the others link to its
files, which stay until the last link is gone. Equal content is found by its hash.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from astraflow.addons.inference_servers.start_turns import user_folder
from astraflow.errors import UnfitVersionError, WeightsError
from astraflow.models.adapters import merge_adapters
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.snapshot import snapshot_to_folder

__all__ = ["WeightsFolder"]

_log = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_NUM_COPIES = 3
"""Number of copies of the weights that must fit in shared memory: the served version, the next one, and the
same amount as one of them for the server."""


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
        self._check(snapshot)
        path = self.path / f"version-{snapshot.version}"
        shutil.rmtree(path, ignore_errors=True)
        try:
            with _turn_to_write(_content_key(snapshot, self.path)) as twin:
                if not _link_all(twin, path):
                    plain = replace(snapshot, tensors=merge_adapters(snapshot.tensors, is_rounded=True))
                    snapshot_to_folder(plain, path)
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

    def _check(self, snapshot: WeightSnapshot) -> None:
        """Checks a version. Raises: UnfitVersionError if it doesn't match the first one or isn't finite."""
        where = f"version {snapshot.version} of {snapshot.policy!r}"
        shapes = {tensor.name: tensor.shape for tensor in snapshot.tensors}
        wrong = sorted(
            name for name in shapes.keys() | self._shapes.keys() if shapes.get(name) != self._shapes.get(name)
        )
        if wrong:
            name = wrong[0]
            raise UnfitVersionError(
                f"{where} does not fit the model that is served: tensor {name!r} has shape "
                f"{shapes.get(name, 'none')}, expected {self._shapes.get(name, 'none')} ("
                f"{len(wrong)} tensors differ); is it another architecture?"
            )
        for tensor in snapshot.tensors:
            if num_bad := _num_not_finite(tensor):
                raise UnfitVersionError(
                    f"{where}: tensor {tensor.name} holds {num_bad} values that are not finite"
                )


def _num_not_finite(tensor: HostTensor) -> int:
    """Counts the values that are infinite or NaN, which means that all their exponent bits are set.

    NumPy doesn't have bfloat16, so all types are read as integers.
    """
    if tensor.dtype == "float32":
        bits = np.frombuffer(tensor.data, "<u4") & np.uint32(0x7F800000)
        return int(np.count_nonzero(bits == np.uint32(0x7F800000)))
    exponent = np.uint16(0x7F80 if tensor.dtype == "bfloat16" else 0x7C00)
    return int(np.count_nonzero((np.frombuffer(tensor.data, "<u2") & exponent) == exponent))


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


# --- one copy for the services of a machine -------------------------------------------------------


def _content_key(snapshot: WeightSnapshot, folder: Path) -> str:
    """A hash of all that a version's folder will have, and of its disk: links can't cross disks."""
    digest = xxhash.xxh3_128(str(folder.stat().st_dev).encode())
    for path in sorted(snapshot.model_dir.iterdir()):
        digest.update(f"{path.name}\n".encode())
        digest.update(path.read_bytes())
    for tensor in snapshot.tensors:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.dtype}\n".encode())
        digest.update(tensor.data.data)
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
