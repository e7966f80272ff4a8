"""Where `exact: true` is guaranteed, and where a recipe with it is refused by name."""

import json
from pathlib import Path

import pytest

from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.run.preflight import check_recipe
from drivers.weight_files import SIZES, write_config, write_model_folder


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    model = write_model_folder(tmp_path / "model")
    tasks = [json.dumps({"prompt": f"{n}", "answer": str(n)}) for n in range(10)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks) + "\n")
    fields = {
        "name": "demo",
        "exact": True,
        "tasks": {"sources": {"train": {"name": "jsonl", "path": str(tmp_path / "tasks.jsonl")}}},
        "policies": {
            "actor": {"model": str(model), "table": {"groups_per_batch": 4}, "sampling": {"max_tokens": 64}}
        },
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(fields))  # JSON is YAML
    return path


def load(path: Path, *overrides: str) -> Recipe:
    return load_recipe(path, overrides)


def test_it_is_off_unless_asked_for(recipe_file: Path) -> None:
    assert load(recipe_file).exact
    assert not load(recipe_file, "exact=false").exact
    assert not Recipe.model_fields["exact"].default


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("rollout.engine=vllm", "rollout.engine.name = 'vllm'; set it to 'torch'"),
        ("rollout.engine.device=cuda:0", "rollout.engine.device = 'cuda:0'; set it to 'cpu'"),
        ("rollout.engine.dtype=bfloat16", "rollout.engine.dtype = 'bfloat16'; set it to 'float32'"),
        ("rollout.engine.num_threads=2", "rollout.engine.num_threads = 2; set it to 1"),
        ("policies.actor.train.ranks=2", "policies.actor.train.ranks = 2; set it to 1"),
        (
            "policies.actor.train.backend.device=cuda:0",
            "policies.actor.train.backend.device = 'cuda:0'; set it to 'cpu'",
        ),
        (
            "policies.actor.train.backend.dtype=bfloat16",
            "policies.actor.train.backend.dtype = 'bfloat16'; set it to 'float32'",
        ),
        (
            "policies.actor.train.backend.publish_dtype=bfloat16",
            "policies.actor.train.backend.publish_dtype = 'bfloat16'; set it to 'float32'",
        ),
        (
            "policies.actor.train.backend.num_threads=2",
            "policies.actor.train.backend.num_threads = 2; set it to 1",
        ),
        (
            "policies.actor.train.backend.lora.rank=4",
            "policies.actor.train.backend.lora.rank = 4; set it to 0",
        ),
        (
            "policies.actor.train.backend={name: own_loop, loop: {use: 'mine:loop'}}",
            "policies.actor.train.backend.name = 'own_loop'; set it to 'torch'",
        ),
    ],
)
def test_a_setting_for_which_it_is_not_guaranteed_is_named(
    recipe_file: Path, override: str, problem: str
) -> None:
    load(recipe_file, "exact=false", override)
    with pytest.raises(ConfigError, match="exact: true is not guaranteed with") as caught:
        load(recipe_file, override)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "qwen3_moe"}, r"\(qwen3_moe\): exact: true is not guaranteed .*only llama, mistral"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "its activation is 'gelu'"),
        ({"model_type": "mistral", "sliding_window": 512}, "a window of 512 positions"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            r"rotary embeddings \(dynamic\)",
        ),
    ],
)
def test_a_model_for_which_it_is_not_guaranteed_is_named(
    recipe_file: Path, config: dict[str, object], problem: str
) -> None:
    write_config(recipe_file.parent / "model", {**SIZES, **config})
    check_recipe(load(recipe_file, "exact=false"))
    with pytest.raises(ConfigError, match=problem):
        check_recipe(load(recipe_file))


def test_a_qwen2_that_names_a_window_and_does_not_use_it_is_taken(recipe_file: Path) -> None:
    config = {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    write_config(recipe_file.parent / "model", {**SIZES, **config})
    check_recipe(load(recipe_file))


def test_a_frozen_policy_is_looked_at_too(recipe_file: Path, tmp_path: Path) -> None:
    frozen = write_config(write_model_folder(tmp_path / "frozen"), {"model_type": "gpt2"})
    with pytest.raises(ConfigError, match=r"policies\.judge.*\(gpt2\): exact: true"):
        check_recipe(load(recipe_file, f"policies.judge={{model: {frozen}, role: frozen}}"))
