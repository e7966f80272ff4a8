"""A tiny model that half knows how to add digits, and recipes for it that take seconds in one process."""

from pathlib import Path

import yaml

from astraflow.addons.tiny_models.spec import ModelSpec
from astraflow.addons.tiny_models.tiny import init_model
from astraflow.recipe.recipe import Recipe, load_recipe

__all__ = ["make_digit_model", "make_digit_recipe"]

_SPEC = {
    "name": "digits",
    "architecture": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_size": 32},
    "tokenizer": {"characters": "0123456789+=., ", "words": ["Calculate "]},
    "demonstrations": {"name": "addition", "max_digits": 1},
    "warm_start": {"steps": 120, "batch_size": 64, "lr": 0.02},
}


def make_digit_model(folder: Path) -> Path:
    """A Hugging Face folder, built in about two seconds."""
    spec = ModelSpec.model_validate_json(ModelSpec.model_validate(_SPEC, strict=False).model_dump_json())
    return init_model(spec, folder)


def make_digit_recipe(folder: Path, model: Path, *overrides: str) -> Recipe:
    """Writes `folder/recipe.yaml` with one policy, 3 steps and a held-out set of 24 tasks; returns it."""
    (folder / "tasks.jsonl").write_text(
        "".join(
            f'{{"prompt": "Calculate {a} + {b}.", "answer": "{a + b}"}}\n' for a in range(8) for b in range(8)
        )
    )
    (folder / "heldout.jsonl").write_text(
        "".join(
            f'{{"prompt": "Calculate {a} + {b}.", "answer": "{a + b}"}}\n'
            for a in range(8)
            for b in (8, 9, 0)
        )
    )
    recipe = {
        "name": "digits",
        "tasks": {
            "sources": {"sums": {"name": "jsonl", "path": str(folder / "tasks.jsonl")}},
            "reward": {"name": "exact"},
            "extract": "after_equals",
        },
        "policies": {
            "actor": {
                "model": str(model),
                "sampling": {"max_tokens": 8},
                "table": {"group_size": 4, "groups_per_batch": 4},
                "train": {"steps": 3, "lr": 1e-3, "minibatches": 2},
            }
        },
        "rollout": {"services": 2, "max_episodes": 16, "engine": {"name": "torch", "max_context": 48}},
        "eval": {
            "sets": {
                "heldout": {
                    "num_tasks": 24,
                    "samples": 2,
                    "source": {"name": "jsonl", "path": str(folder / "heldout.jsonl")},
                }
            }
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return load_recipe(path, overrides)
