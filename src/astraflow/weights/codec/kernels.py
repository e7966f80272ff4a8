"""Chooses who does the arithmetic of deltas: numba where it is installed and worth its start, else numpy."""

import functools
import importlib
import importlib.util
import logging
from typing import cast

from astraflow.weights.codec import planes
from astraflow.weights.codec.planes import Kernel

__all__ = ["NUMPY", "choose_kernel"]

_log = logging.getLogger(__name__)

NUMPY: Kernel = planes
"""Always there; the same bytes as numba, five times slower."""

_WORTH_BYTES = 64 * 1024 * 1024
"""Numpy codes this much in the second that loading numba costs."""


def choose_kernel(num_bytes: int) -> Kernel:
    """The kernel for versions of this size."""
    return _best() if num_bytes >= _WORTH_BYTES else NUMPY


@functools.cache
def _best() -> Kernel:
    if importlib.util.find_spec("numba") is None:
        _log.info("numba is not installed: deltas are coded by numpy, slower; pip install 'astraflow[fast]'")
        return NUMPY
    return cast("Kernel", importlib.import_module("astraflow.weights.codec.jit"))
