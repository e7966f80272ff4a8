"""A model is opened without memory for its weights where its folder allows it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from astraflow.errors import DataError
from astraflow.models.loading import export_tensors, file_tensors, load_causal_lm
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.ranks import ALONE
from astraflow.trainer.torch.forward import ForwardEntryPoint
from astraflow.trainer.torch.parallel.grid import RankGrid
from astraflow.trainer.torch.parallel.sharding import ModelWeights
from astraflow.trainer.torch.side_models import Critic, FrozenModel
from astraflow.trainer.torch.torch_files import open_model
from drivers.model_gallery import save_hub_folder
from drivers.rank_runs import make_experts
from drivers.trainer_builders import VOCAB_SIZE, make_samples, make_tiny_model

ON_DEVICE = RankGrid(ALONE, ALONE, device="cpu:0")
"""Filled as on a GPU."""


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("make", [make_tiny_model, make_experts])
def test_a_model_without_memory_is_filled_to_the_same_weights(
    tmp_path: Path, make: object, is_tied: bool
) -> None:
    assert callable(make)
    make(tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    model, source = open_model(tmp_path, ON_DEVICE)
    assert source is not None
    assert all(parameter.is_meta for parameter in model.parameters())
    weights = ModelWeights(model, ON_DEVICE, source=source)
    weights.split(ForwardEntryPoint(model))
    expected = load_causal_lm(tmp_path).state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    ids = torch.tensor([[2, 3, 4]])
    assert torch.allclose(model(input_ids=ids).logits, load_causal_lm(tmp_path)(input_ids=ids).logits)


@pytest.mark.parametrize("model_type", ["qwen3_5", "llama4", "mistral3", "nemotron_h"])
def test_a_hub_folder_is_filled_and_gathered_with_all_of_its_tensors(model_type: str, tmp_path: Path) -> None:
    folder = save_hub_folder(model_type, tmp_path / "model")
    files = file_tensors(sorted(folder.glob("*.safetensors")))
    model, source = open_model(folder, ON_DEVICE)
    assert source is not None
    weights = ModelWeights(model, ON_DEVICE, source=source)
    weights.split(ForwardEntryPoint(model))
    gathered = dict(weights.gather())
    assert [*gathered] == [name for name, _ in weights.shapes]
    assert gathered.keys() == files.keys()
    assert all(torch.equal(gathered[name], tensor) for name, tensor in files.items())
    weights.install(files)
    ids = torch.tensor([[2, 3, 4]])
    expected = load_causal_lm(folder)(input_ids=ids, use_cache=False).logits
    assert torch.allclose(model(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("make", [make_tiny_model, make_experts])
@pytest.mark.parametrize("grid", [None, ON_DEVICE])
def test_a_frozen_model_has_the_digest_of_its_folder_whatever_holds_its_experts(
    tmp_path: Path, make: object, grid: RankGrid | None
) -> None:
    assert callable(make)
    make().save_pretrained(tmp_path)
    expected = xxhash.xxh3_128()
    for tensor in export_tensors(load_causal_lm(tmp_path)):
        expected.update(tensor.data.data)
    assert FrozenModel(tmp_path, TrainConfig(lr=0.1), grid).digest == expected.hexdigest()


def test_missing_files_are_named(tmp_path: Path) -> None:
    make_tiny_model().save_pretrained(tmp_path, max_shard_size="5KB")
    names = sorted(
        set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values())
    )
    assert len(names) > 2
    for name in names[::2]:
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match=rf"model folder .*: it lacks {names[0]}, .*is the download complete"):
        open_model(tmp_path, ON_DEVICE)


def test_tensors_of_files_are_views(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "a.safetensors")
    tensors = file_tensors([tmp_path / "a.safetensors"])
    tensors["a"].zero_()  # only of this process
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_critic_without_memory_is_filled_to_the_same_weights(tmp_path: Path, is_tied: bool) -> None:
    make_tiny_model(tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    columns = columns_from_samples(make_samples(), vocab_size=VOCAB_SIZE)
    found: list[dict[str, torch.Tensor]] = []
    for grid in (ON_DEVICE, RankGrid(ALONE, ALONE)):
        critic = Critic(TrainConfig(), tmp_path, grid)
        assert not np.any(critic.predictions(columns, critic.cut(columns, np.arange(len(columns.lengths)))))
        found.append({name: weight.clone() for name, weight in critic.weights.gather()})
    assert found[0].keys() == found[1].keys()
    assert found[0]["lm_head.weight"].shape == (1, 16)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
