"""Tokenizer settings whose names end in `_token` but aren't special tokens, such as `add_bos_token`."""

import json
from pathlib import Path

from astraflow.recipe.recipe import load_recipe
from astraflow.run.preflight import check_recipe
from drivers.chat_folders import make_folder
from drivers.weight_files import SIZES, write_config


def test_a_dry_run_renders_the_template_of_a_tokenizer_that_adds_its_first_token(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write_config(folder, {**SIZES, "model_type": "qwen3", "vocab_size": 100, "eos_token_id": 7})
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True}))
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 8)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: demo\n"
        f"tasks: {{sources: {{sums: {{name: jsonl, path: {tmp_path / 'tasks.jsonl'}}}}}}}\n"
        f"policies: {{actor: {{model: {folder}, table: {{groups_per_batch: 4}}}}}}\n"
        "rollout: {engine: {max_context: 512}}\n"
    )
    # This raises an error if the dry run takes the setting for a token.
    check_recipe(load_recipe(recipe), with_trials=True)
