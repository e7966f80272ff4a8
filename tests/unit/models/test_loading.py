"""Models from folders, and host tensors into and out of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.errors import DataError, WeightsError
from astraflow.models.loading import (
    empty_causal_lm,
    export_tensors,
    fit_tensors,
    host_tensor,
    install_tensors,
    load_causal_lm,
    torch_tensor,
)
from astraflow.types.host_tensors import HostTensor
from drivers.engine_models import make_model_folder, make_random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_an_empty_model_filled_with_exported_tensors_is_the_same_model_bit_for_bit(folder: Path) -> None:
    source, target = make_random_model(), empty_causal_lm(folder)
    install_tensors(target, export_tensors(source))
    assert is_same(weights(source), weights(target))
    assert not target.training


def test_tied_weights_are_exported_once_and_stay_tied(folder: Path) -> None:
    names = [tensor.name for tensor in export_tensors(make_random_model())]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    model: Any = empty_causal_lm(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_untied_weights_are_exported_under_both_names() -> None:
    names = [tensor.name for tensor in export_tensors(make_random_model("llama"))]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" in names


def test_a_tied_weight_may_come_under_its_other_name(folder: Path) -> None:
    source, target = make_random_model(), empty_causal_lm(folder)
    tensors = [
        replace(t, name="lm_head.weight") if t.name == "model.embed_tokens.weight" else t
        for t in export_tensors(source)
    ]
    install_tensors(target, tensors)
    assert is_same(weights(source), weights(target))


def test_tied_weights_that_disagree_are_refused(folder: Path) -> None:
    tensors = export_tensors(make_random_model())
    embedding = next(t for t in tensors if t.name == "model.embed_tokens.weight")
    other = replace(embedding, name="lm_head.weight", data=np.zeros_like(embedding.data))
    with pytest.raises(WeightsError, match=r"embed_tokens.weight and lm_head.weight differ"):
        fit_tensors(empty_causal_lm(folder), [*tensors, other])


def spoilt(tensors: tuple[HostTensor, ...], kind: str) -> list[HostTensor]:
    first, *rest = tensors
    values = torch_tensor(first).clone()
    if kind == "missing":
        return rest
    if kind == "unknown":
        return [*tensors, replace(first, name="model.extra.weight")]
    if kind == "twice":
        return [*tensors, first]
    if kind == "shape":
        return [host_tensor(first.name, values[1:]), *rest]
    if kind == "bytes":
        return [replace(first, data=first.data[:-4]), *rest]
    if kind == "dtype":
        return [replace(first, dtype="int8"), *rest]
    values.view(-1)[3] = float(kind)
    return [host_tensor(first.name, values), *rest]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "missing model.embed_tokens.weight"),
        ("unknown", "unknown model.extra.weight"),
        ("twice", "model.embed_tokens.weight is given twice"),
        ("shape", r"shape \(42, 32\); the model has \(43, 32\)"),
        ("bytes", "5500 bytes for shape"),
        ("dtype", "dtype 'int8'; expected one of float32, float16, bfloat16"),
        ("nan", "1 values that are not finite"),
        ("inf", "1 values that are not finite"),
        ("-inf", "1 values that are not finite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_change_nothing(
    folder: Path, kind: str, message: str
) -> None:
    model = empty_causal_lm(folder)
    install_tensors(model, export_tensors(make_random_model(seed=1)))
    before = weights(model)
    with pytest.raises(WeightsError, match=message):
        install_tensors(model, spoilt(export_tensors(make_random_model(seed=2)), kind))
    assert is_same(before, weights(model))


def test_a_patch_writes_the_named_elements_and_refuses_what_is_not_finite(folder: Path) -> None:
    model, name = empty_causal_lm(folder), "model.layers.1.mlp.down_proj.weight"
    install_tensors(model, export_tensors(make_random_model(seed=1)))
    before = weights(model)
    new = {t.name: torch_tensor(t).clone() for t in export_tensors(make_random_model(seed=2))}
    given = [host_tensor(key, tensor) for key, tensor in new.items()]
    positions = np.array([5, 2, 5])
    fit_tensors(model, given, changed={name: positions}).install()
    expected = before | {name: before[name].clone()}
    expected[name].view(-1)[[2, 5]] = new[name].view(-1)[[2, 5]]
    assert is_same(expected, weights(model))

    new[name].view(-1)[2] = torch.nan
    given = [host_tensor(key, tensor) for key, tensor in new.items()]
    with pytest.raises(WeightsError, match=f"{name} holds 1 values that are not finite"):
        fit_tensors(model, given, changed={name: positions})
    fit_tensors(model, given, changed={name: np.array([3])})
    with pytest.raises(WeightsError, match="missing"):
        fit_tensors(model, given[1:], changed={})
    given[0] = replace(given[0], shape=given[0].shape[::-1])
    with pytest.raises(WeightsError, match="the model has"):
        fit_tensors(model, given, changed={})


def test_bytes_that_torch_cannot_share_are_copied() -> None:
    values = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    shifted = np.concatenate([np.zeros(1, np.uint8), host_tensor("w", values).data])[1:]
    shifted.flags.writeable = False
    assert torch.equal(torch_tensor(HostTensor("w", (2, 3), "float32", shifted)), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_tensor_survives_the_way_through_host_memory(dtype: torch.dtype) -> None:
    values = torch.randn(3, 5).to(dtype)
    assert torch.equal(torch_tensor(host_tensor("w", values)), values)


def test_a_host_tensor_is_a_copy() -> None:
    values = torch.ones(4)
    copy = host_tensor("w", values)
    values.zero_()
    assert torch_tensor(copy).tolist() == [1.0] * 4


def test_float32_weights_are_rounded_into_a_bfloat16_model(folder: Path) -> None:
    source, target = make_random_model(), empty_causal_lm(folder, dtype="bfloat16")
    install_tensors(target, export_tensors(source))
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in weights(source).items()}
    assert is_same(expected, weights(target))


def test_a_saved_folder_loads_with_its_weights(tmp_path: Path) -> None:
    source = make_random_model()
    source.save_pretrained(tmp_path)
    assert is_same(weights(source), weights(load_causal_lm(tmp_path)))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        load_causal_lm(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"nowhere does not exist"):
        empty_causal_lm(tmp_path / "nowhere")


def test_a_folder_without_config_or_weights_is_named(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(DataError, match=r"has no config.json \(found: notes.txt\)"):
        empty_causal_lm(tmp_path)
    with pytest.raises(DataError, match=r"has no \*\.safetensors"):
        load_causal_lm(folder)


def test_a_config_of_no_causal_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(DataError, match=r"config.json is not a causal language model"):
        empty_causal_lm(tmp_path)
