"""Chooses the code that computes deltas: compiled by numba if it is worth loading, else numpy."""

import contextlib
import functools
import importlib.util
import logging

from astraflow import added
from astraflow.errors import ConfigError
from astraflow.weights.delta import planes
from astraflow.weights.delta.planes import Kernel

__all__ = ["NUMPY", "choose_kernel"]

_log = logging.getLogger(__name__)

NUMPY: Kernel = planes
"""The kernel that is always available. It gives the same bytes as numba, about half as fast."""

_WORTH_BYTES = 64 * 1024 * 1024
"""Loading numba takes a second, in which numpy encodes this much."""


def choose_kernel(num_bytes: int) -> Kernel:
    """The kernel for versions of this size."""
    return _best() if num_bytes >= _WORTH_BYTES else NUMPY


@functools.cache
def _best() -> Kernel:
    if importlib.util.find_spec("numba") is not None:
        with contextlib.suppress(ConfigError):  # this installation leaves the code out
            return added.compiled
    _log.info("without numba, numpy encodes deltas about half as fast; pip install 'astraflow[fast]'")
    return NUMPY
