"""Deltas whose checksums hold, but whose blocks belong to no tensor."""

import pytest

from astraflow.errors import WeightsError
from astraflow.weights.delta.delta import parse_delta
from astraflow.weights.delta.layout import BLOCK, DENSE, HEADER, LENGTH, MAGIC, checksum_of


def delta_of_one_block(*, width: int) -> bytes:
    """A dense block of one element at the first byte of a version without tensors."""
    header = HEADER.pack(MAGIC, bytes(16), bytes(16), 0)
    payload = LENGTH.pack(0) * (width + 2)
    block = BLOCK.pack(0, 1, 1, 0, 0, 0, width, DENSE, 0, len(payload))
    return header + checksum_of(header) + block + checksum_of(block, payload) + payload


@pytest.mark.parametrize("width", [0, 1, 2, 4])
def test_a_block_of_a_version_without_tensors_is_refused(width: int) -> None:
    with pytest.raises(WeightsError, match="a block fits no tensor"):
        parse_delta(delta_of_one_block(width=width), ())
