"""Which policies share a base, and the engines that a rollout service makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.lora.engine import AdapterView
from astraflow.addons.lora.sharing import SharedBases, base_notes, shared_bases
from astraflow.recipe.recipe import Recipe
from astraflow.rollout.engines.factory import engine_maker
from astraflow.types.host_tensors import WeightSnapshot
from drivers.engine_models import make_model_folder, make_random_model, snapshot_of


def make_recipe(model: Path, policies: dict[str, Any], **sections: Any) -> Recipe:
    """A recipe whose policies have this model unless they name another one."""
    recipe = {
        "name": "r",
        "tasks": {"sources": {"train": {"name": "jsonl", "path": "tasks.jsonl"}}},
        "policies": {name: {"model": str(model), **policy} for name, policy in policies.items()},
        "rollout": {"engine": {"name": "torch", "num_slots": 4, "max_context": 96}},
    }
    return Recipe.model_validate_json(json.dumps(recipe | sections))


def adapter(**lora: Any) -> dict[str, Any]:
    return {"train": {"backend": {"name": "torch", "lora": {"rank": 4, **lora}}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def test_policies_that_train_adapters_of_one_model_share_it(model: Path) -> None:
    recipe = make_recipe(
        model,
        {
            "solver": adapter(),
            "whole": {},  # trains all parameters, so its weights are its own
            "verifier": adapter(rank=8, rslora=True),
            "past": {"role": "follower", "follows": "solver", "lag": 1},
            "judge": {"role": "frozen"},
            "merged": adapter(publish="merged"),
            "other": {"model": "elsewhere", **adapter()},
        },
    )
    assert shared_bases(recipe) == {str(model): ["solver", "verifier", "past"]}
    (note,) = base_notes(recipe)
    assert note.startswith(f"solver, verifier, past: train adapters of one base, {model}")


@pytest.mark.parametrize(
    ("policies", "sections"),
    [
        ({"solver": adapter(), "verifier": {}}, {}),
        (
            {"solver": adapter(), "verifier": adapter()},
            {"rollout": {"engine": {"name": "vllm"}}},
        ),
        (
            {"solver": adapter(), "verifier": adapter()},
            {"rollout": {"engine": {"name": "torch", "record_experts": True}}},
        ),
    ],
)
def test_others_keep_an_engine_each(model: Path, policies: dict[str, Any], sections: dict[str, Any]) -> None:
    recipe = make_recipe(model, policies, **sections)
    assert shared_bases(recipe) == {}
    assert [*base_notes(recipe)] == []


async def test_a_service_makes_one_engine_per_base_and_a_view_per_policy(model: Path, tmp_path: Path) -> None:
    policies = {"solver": adapter(), "past": {"role": "follower", "follows": "solver"}, "verifier": adapter()}
    recipe = make_recipe(model, {**policies, "whole": {}})
    make = SharedBases(recipe, engine_maker(recipe.rollout.engine))
    plain = snapshot_of(make_random_model(), model)

    def engine_of(policy: str, base: str) -> Any:
        return make(WeightSnapshot(policy, 0, plain.tensors, plain.model_dir, base=base))

    views = [engine_of(policy, "base-1") for policy in ("solver", "solver", "verifier")]
    assert all(isinstance(view, AdapterView) for view in views)
    assert len({id(view.shared) for view in views}) == 1
    others = [engine_of("solver", "base-2"), engine_of("solver", ""), engine_of("whole", "")]
    assert others[0].shared is not views[0].shared
    assert not any(isinstance(engine, AdapterView) for engine in others[1:])
    for engine in (*views, *others):
        await engine.close()
    again = engine_of("solver", "base-1")
    assert again.shared is not views[0].shared
    await again.close()


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_mixtures_of_experts_keep_an_engine_each(model: Path, tmp_path: Path, key: str) -> None:
    folder = tmp_path / "moe"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: 4}))
    recipe = make_recipe(folder, {"solver": adapter(), "verifier": adapter()})
    assert [*base_notes(recipe)] == []
    made: list[WeightSnapshot] = []

    def note(snapshot: WeightSnapshot) -> Any:
        made.append(snapshot)

    SharedBases(recipe, note)(WeightSnapshot("solver", 0, (), folder, base="base-1"))
    assert len(made) == 1
