"""A version's weights in the memory of one host: what a trainer exports and an engine loads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["HostTensor", "WeightChanges", "WeightSnapshot"]


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor in host memory: `data` is its raw little-endian bytes as uint8 [num_bytes], C order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """`float32`, `float16` or `bfloat16`."""
    data: NDArray[np.uint8]
    first_idx: int = 0
    """Number of elements of the tensor before those in `data`. If several ranks share a version, each has a
    part of some tensors and nothing of others; otherwise `data` has all elements."""


@dataclass(frozen=True, slots=True)
class WeightChanges:
    """The positions at which a version can differ from version `base` of the same policy.

    An engine that serves `base` may write only these positions; all others are equal.

    Example: `for name, positions in changes.find().items(): weights[name].flat[positions] = ...`.
    """

    base: int
    find: Callable[[], Mapping[str, NDArray[np.int64]]]
    """Returns tensor name -> flat positions, in any order. Other tensors are equal. Blocks: use a thread."""


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """One verified version in host memory."""

    policy: str
    version: int
    tensors: tuple[HostTensor, ...]
    """In the order of the manifest."""
    model_dir: Path
    """Folder with the model's config and tokenizer."""
    changes: WeightChanges | None = None
    """The changes since an older version; None if they are unknown, or too many to be useful."""
    base: str = ""
    """Identifies the weights that the adapters among the tensors change, as `base-DIGEST`; empty if there are
    no adapters, or if nothing is known about their base."""
