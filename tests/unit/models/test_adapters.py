"""What adapters make of the weights beside them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from astraflow.models.adapters import merge_adapters, merge_weight, peft_names
from astraflow.types.host_tensors import HostTensor


def make_tensor(name: str, *shape: int, seed: int) -> HostTensor:
    values = np.random.default_rng(seed).normal(size=shape).astype("<f4")
    return HostTensor(name, shape, "float32", values.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("span", [(0, 5), (5, 77), (77, 91), (13, 13), (0, 91)])
def test_a_part_of_a_weight_is_merged_to_the_bits_of_the_whole(span: tuple[int, int]) -> None:
    first, last = span
    weight = make_tensor("w.weight", 7, 13, seed=0)
    down, up = peft_names(weight.name)
    factors = {down: make_tensor(down, 3, 13, seed=1), up: make_tensor(up, 7, 3, seed=2)}
    whole = merge_weight(weight, factors)
    part = replace(weight, data=weight.data[4 * first : 4 * last], first_idx=first)
    found = merge_weight(part, factors)
    assert found.data.tobytes() == whole.data[4 * first : 4 * last].tobytes()
    assert (found.first_idx, found.shape, found.dtype) == (first, (7, 13), "float32")


@pytest.mark.parametrize(("dtype", "wide"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_merged_weights_are_rounded_to_the_dtype_of_their_base_as_torch_rounds(
    dtype: str, wide: torch.dtype
) -> None:
    values = torch.cat([torch.randn(90), torch.tensor([65504.0, -0.0, 1e-40, 3e38, float("nan"), -1.0])])
    base = torch.zeros(8, 12).to(wide)
    down, up = peft_names("w.weight")
    tensors = (
        HostTensor("w.weight", (8, 12), dtype, base.view(torch.uint8).reshape(-1).numpy()),
        HostTensor(down, (8, 12), "float32", values.numpy().view(np.uint8)),
        HostTensor(up, (8, 8), "float32", np.eye(8, dtype="<f4").reshape(-1).view(np.uint8)),
    )
    (whole,) = merge_adapters(tensors)
    (found,) = merge_adapters(tensors, is_rounded=True)
    expected = torch.from_numpy(whole.data.view("<f4").copy()).to(wide).reshape(8, 12)
    assert (found.name, found.shape, found.dtype) == ("w.weight", (8, 12), dtype)
    rounded = torch.from_numpy(found.data.copy()).view(wide).reshape(8, 12)
    assert torch.equal(rounded.nan_to_num(nan=1234.0), expected.nan_to_num(nan=1234.0))
    assert rounded.isnan().any()
