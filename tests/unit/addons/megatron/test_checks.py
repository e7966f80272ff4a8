"""What the backend `megatron` can't train is refused before a run, by the name of what is in the way."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from astraflow.addons.doctor.memory import num_parameters
from astraflow.addons.megatron.checks import check_megatron
from astraflow.addons.megatron.memory import rank_need
from astraflow.addons.megatron.shape import read_shape
from astraflow.config import Use
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.trainer.config import TrainConfig
from drivers.megatron_runs import make_decoder
from drivers.system_driver import ROOT

MEGATRON = {"name": "megatron", "tensor": 2, "pipeline": 2}


def shape_of(folder: Path, **changes: Any) -> Path:
    """A folder whose config has these values."""
    config = {
        "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 100, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def train_of(**settings: Any) -> TrainConfig:
    return TrainConfig.model_validate_json(json.dumps(settings))


def recipe_of(folder: Path, **overrides: Any) -> Recipe:
    backend = {"train.backend": {"name": "megatron"}}
    return load_recipe(ROOT / "recipes" / "quickstart.yaml", {"model": str(folder), **backend, **overrides})


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        ({"tensor": 8}, "tensor = 8 does not divide the model's num_key_value_heads = 4"),
        ({"pipeline": 4}, "pipeline = 4 does not divide the model's num_hidden_layers = 6"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path: Path, cut: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_shape(shape_of(tmp_path)).check_cut(**{"tensor": 1, "pipeline": 1, **cut})


@pytest.mark.parametrize("key", ["intermediate_size", "vocab_size"])
def test_an_odd_mlp_or_vocabulary_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = 97"):
        read_shape(shape_of(tmp_path, **{key: 97})).check_cut(tensor=2, pipeline=1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2', but mapped are llama, qwen2, qwen3"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, "Transformer Engine"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = 'sliding_attention'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters"),
    ],
)
def test_models_that_are_not_mapped_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_shape(shape_of(tmp_path, **changes))


def test_a_folder_without_sizes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DataError, match="does not describe a model"):
        read_shape(tmp_path)


def test_ranks_that_share_a_model_copy_get_one_slice() -> None:
    train = train_of(ranks=8, backend=MEGATRON)
    assert (train.num_model_ranks, train.data_ranks) == (4, 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ranks": 6, "backend": MEGATRON}, "ranks = 6 cannot be divided into groups of 4"),
        ({"ranks": 4, "backend": MEGATRON, "shard": {"tensor": 2}}, "shard is for backend.name: torch"),
        (
            {"ranks": 2, "backend": {"name": "own_loop", "loop": {"use": "x:y"}}},
            "needs train.backend.name: torch",
        ),
    ],
)
def test_ranks_that_do_not_fit_the_backend_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        train_of(**settings)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_weights_of_a_model_are_counted_without_it(tmp_path: Path, family: str, is_tied: bool) -> None:
    folder = make_decoder(family, tmp_path, tie_word_embeddings=is_tied, head_dim=8)
    shape = read_shape(folder)
    assert shape.num_weights() == num_parameters(folder)
    whole = [shape.num_weights(stage=stage, pipeline=2) for stage in range(2)]
    assert sum(whole) == shape.num_weights() + is_tied * shape.vocab_size * shape.width


def test_a_rank_needs_its_stage_its_gradients_and_a_share_of_the_optimizer(tmp_path: Path) -> None:
    folder = make_decoder("llama", tmp_path, num_hidden_layers=8)
    shape = read_shape(folder)
    backend = {**MEGATRON, "dtype": "bfloat16", "activations": "recompute", "publish_dtype": "bfloat16"}
    need = rank_need(train_of(ranks=8, backend=backend), folder)
    num = shape.num_weights(stage=1, tensor=2, pipeline=2)  # with the last norm
    assert need.lasting == {"weights": 2.0 * num, "gradients": 4.0 * num, "optimizer": 6.0 * num}
    assert need.savings["train.backend.activations: recompute"] == 0


def test_a_backend_of_ones_own_has_one_rank() -> None:
    with pytest.raises(ValidationError, match="brings its own processes"):
        TrainConfig(ranks=2, backend=Use(use="x:y"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"train.backend.tensor": 3, "train.ranks": 3}, r"policies\.actor\.train\.backend\.tensor = 3"),
        (
            {
                "train.auxiliary": {"critic": {"name": "value_model"}},
                "table.credit": {"name": "gae"},
                "table.normalize": "none",
            },
            "trains no critic",
        ),
        ({"train.backend.device": "cpu"}, r"device = 'cpu': megatron-core computes on NVIDIA GPUs only"),
        (
            {"train.backend.context": 8, "train.ranks": 8},
            r"tensor x context = 1 x 8 does not divide the model's num_key_value_heads = 4",
        ),
    ],
)
def test_a_recipe_is_refused_with_its_policy(tmp_path: Path, overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_megatron(recipe_of(shape_of(tmp_path), **overrides))


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    recipe = recipe_of(shape_of(tmp_path))
    if find_spec("megatron") is not None:
        check_megatron(recipe)
        return
    with pytest.raises(ConfigError, match=r"astraflow\[megatron\]"):
        check_megatron(recipe)
