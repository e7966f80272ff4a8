"""Host memory for a version: lent to who uses the tensors, patched in place when nobody does any more."""

import weakref

import numpy as np
from numpy.typing import NDArray

__all__ = ["HostCopy"]


class HostCopy:
    """A buffer that knows whether somebody still looks at it.

    `lend` gives an array; every view of it, and every torch tensor on its memory, keeps the loan alive. The
    owner writes only while `is_free`.

    Example::

        copy = HostCopy(num_bytes)
        tensors = tensors_of(manifest, copy.lend())
        del tensors
        assert copy.is_free
    """

    def __init__(self, num_bytes: int) -> None:
        self.data: NDArray[np.uint8] = np.empty(num_bytes, dtype=np.uint8)
        """For the owner; never handed out."""
        self._loan: weakref.ref[NDArray[np.uint8]] | None = None

    @property
    def is_free(self) -> bool:
        """True if no view of what was lent lives."""
        return self._loan is None or self._loan() is None

    def lend(self) -> NDArray[np.uint8]:
        """The bytes, to look at. The loan's base is a memoryview, so that numpy gives views of it the loan
        itself as their base, not the buffer below."""
        assert self.is_free, "a host copy is lent once at a time"
        loan: NDArray[np.uint8] = np.asarray(self.data.data)
        self._loan = weakref.ref(loan)
        return loan

    def duplicate(self) -> "HostCopy":
        """The same bytes in memory of their own."""
        other = HostCopy(self.data.nbytes)
        other.data[:] = self.data
        return other
