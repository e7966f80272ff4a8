"""Versions of the weights as folders that a server reads: safetensors with config and tokenizer.

The folders are in shared memory (`/dev/shm`) if it has enough room. A version is refused before anything is
written if its names or shapes differ from those of the first version, or if it contains non-finite values.
"""

import contextlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from astraflow.errors import WeightsError
from astraflow.models.adapters import merge_adapters
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.snapshot import snapshot_to_folder

__all__ = ["WeightsFolder"]

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
        self.path = Path(tempfile.mkdtemp(prefix=f"astraflow-{name}-", dir=parent or _parent(num_bytes)))

    def write(self, snapshot: WeightSnapshot) -> Path:
        """Writes a version and returns its folder. Blocks.

        Raises: WeightsError if the version does not fit or cannot be written.
        """
        self._check(snapshot)
        plain = replace(snapshot, tensors=merge_adapters(snapshot.tensors, is_rounded=True))
        path = self.path / f"version-{snapshot.version}"
        shutil.rmtree(path, ignore_errors=True)
        try:
            snapshot_to_folder(plain, path)
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
        """Checks a version. Raises: WeightsError if it doesn't match the first one or isn't finite."""
        where = f"version {snapshot.version} of {snapshot.policy!r}"
        shapes = {tensor.name: tensor.shape for tensor in snapshot.tensors}
        wrong = sorted(
            name for name in shapes.keys() | self._shapes.keys() if shapes.get(name) != self._shapes.get(name)
        )
        if wrong:
            name = wrong[0]
            raise WeightsError(
                f"{where} does not fit the model that is served: tensor {name!r} has shape "
                f"{shapes.get(name, 'none')}, expected {self._shapes.get(name, 'none')} ("
                f"{len(wrong)} tensors differ); is it another architecture?"
            )
        for tensor in snapshot.tensors:
            if num_bad := _num_not_finite(tensor):
                raise WeightsError(
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


def _parent(num_bytes: int) -> str:
    """Returns shared memory if it has enough room, else the temporary folder."""
    with contextlib.suppress(OSError):
        if os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free > (
            _NUM_COPIES * num_bytes
        ):
            return str(_SHARED_MEMORY)
    return tempfile.gettempdir()
