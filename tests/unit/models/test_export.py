"""Weights that are copied for a version while training continues."""

import torch

from astraflow.models.export import begin_export, part_of
from astraflow.models.loading import torch_tensor


def test_a_version_holds_the_weights_as_they_were_rounded_to_its_dtype() -> None:
    weights = {"a": torch.linspace(0, 1, 6).reshape(2, 3), "b": torch.linspace(2, 3, 4)}
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    version = begin_export(weights.items(), "bfloat16", elements={"a": (0, 6), "b": (0, 4)})
    for tensor in weights.values():
        tensor.zero_()  # training continues
    exported = {tensor.name: tensor for tensor in version}
    assert list(exported) == ["a", "b"]
    assert [(each.shape, each.dtype, each.first_idx) for each in exported.values()] == [
        ((2, 3), "bfloat16", 0),
        ((4,), "bfloat16", 0),
    ]
    for name, tensor in wanted.items():
        assert torch.equal(torch_tensor(exported[name]), tensor)


def test_a_rank_copies_its_own_elements_also_of_a_view_that_is_not_contiguous() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    (own,) = begin_export([("w", whole.T)], "float32", elements={"w": (1, 4)})
    assert (own.shape, own.first_idx) == ((3, 2), 1)
    assert own.data.view("float32").tolist() == [3.0, 1.0, 4.0]
    (all_,) = begin_export([("w", whole.T)], "float32", elements={"w": (0, 6)})
    part = part_of(all_, 1, 4)
    assert (part.data.tobytes(), part.first_idx, part.shape) == (own.data.tobytes(), 1, (3, 2))
