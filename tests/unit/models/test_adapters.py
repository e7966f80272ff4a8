"""What adapters make of the weights beside them."""

from dataclasses import replace

import numpy as np
import pytest

from astraflow.host_tensors import HostTensor
from astraflow.models.adapters import merged_weight, peft_names


def make_tensor(name: str, *shape: int, seed: int) -> HostTensor:
    values = np.random.default_rng(seed).normal(size=shape).astype("<f4")
    return HostTensor(name, shape, "float32", values.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("span", [(0, 5), (5, 77), (77, 91), (13, 13), (0, 91)])
def test_a_part_of_a_weight_is_merged_to_the_bits_of_the_whole(span: tuple[int, int]) -> None:
    first, last = span
    weight = make_tensor("w.weight", 7, 13, seed=0)
    down, up = peft_names(weight.name)
    factors = {down: make_tensor(down, 3, 13, seed=1), up: make_tensor(up, 7, 3, seed=2)}
    whole = merged_weight(weight, factors)
    part = replace(weight, data=weight.data[4 * first : 4 * last], first_idx=first)
    found = merged_weight(part, factors)
    assert found.data.tobytes() == whole.data[4 * first : 4 * last].tobytes()
    assert (found.first_idx, found.shape, found.dtype) == (first, (7, 13), "float32")
