"""Folders of models and tasks for rehearsals of recipes of full size.

Nothing is loaded: a model's folder has its published config, a tokenizer trained on this repository's
docs, and a chat template of its family.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.terminal.terminal_folders import folder_of, make_errand, write_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from astraflow.addons.sandbox.shell import BoxFile
from astraflow.recipe.recipe import load_recipe
from astraflow.user_input.yaml_files import load_mapping
from drivers.docs_driver import tool
from drivers.minecraft_files import write_minecraft
from drivers.system_driver import ROOT

__all__ = ["TEMPLATES", "fixture_overrides", "make_tokenizer", "write_model_folders", "write_tasks"]

TEMPLATES = {
    "Llama": "llama3", "Qwen2": "qwen2_5", "Qwen3-VL": "qwen3_vl", "Qwen3": "qwen3", "gemma": "gemma4",
    "GLM": "glm4_5", "gpt-oss": "gpt_oss",
}  # fmt: skip
"""Template in tests/chat_templates by the beginning of a model's name; the first that fits counts."""
_SPECIAL = {
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
    "qwen2_5": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"],
    "qwen3_vl": ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"],
    "gemma4": ["<bos>", "<|turn>", "<turn|>", "<|think|>", "<|tool>", "<tool|>"],
    "glm4_5": ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    "gpt_oss": ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"],
}
_OWN_ENDS = {"llama3": "<|eot_id|>", "gemma4": "<turn|>", "glm4_5": "<|user|>", "gpt_oss": "<|return|>"}
_ENDS = {name: _OWN_ENDS.get(name, "<|im_end|>") for name in _SPECIAL}
_IMAGE = "<|image_pad|>"
_READING = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""How Qwen3-VL reads images, by its published preprocessor_config.json."""
_VOCAB = 4_000
_REQUIREMENT = '- Write `/app/out.json`: {"name": "...", "count": 3}, sorted, without a trailing line.\n'
_NUM_REQUIREMENTS = 60
"""Lines that make an instruction 5,000 characters long, which few of Terminal-Bench are."""
_NUM_FOLDERS = 8
"""Enough that some are for training."""


def make_tokenizer(family: str) -> Tokenizer:
    """A tokenizer trained on the docs, with the special tokens of a family."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [(ROOT / "docs" / page).read_text() for page in ("bundled.md", "tutorial.md", "algorithms.md")]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=_SPECIAL[family],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_model_folders(root: Path) -> None:
    """Writes a folder for each published model below `root`, with weights that take no disk space."""
    tool("full_recipes").model_folders(root)
    tokenizers = {name: make_tokenizer(name) for name in _SPECIAL}
    for folder in root.iterdir():
        family = next(name for start, name in TEMPLATES.items() if folder.name.startswith(start))
        tokenizers[family].save(str(folder / "tokenizer.json"))
        template = (ROOT / "tests" / "chat_templates" / f"{family}.jinja").read_text(encoding="utf-8")
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _ENDS[family]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        end = tokenizers[family].token_to_id(_ENDS[family])
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        if family == "qwen3_vl":
            (folder / "preprocessor_config.json").write_text(json.dumps(_READING))
            config = json.loads((folder / "config.json").read_text())
            config["image_token_id"] = tokenizers[family].token_to_id(_IMAGE)
            (folder / "config.json").write_text(json.dumps(config))


def fixture_overrides(path: Path, models: Path, tasks: Path) -> dict[str, Any]:
    """Overrides by which a recipe has the models below a folder, and a few rows of its data sets. `tasks`: a
    folder of task folders."""
    mapping = load_mapping(path)
    found: dict[str, Any] = {}
    for name, policy in load_recipe(path).policies.items():
        found[f"policies.{name}.model"] = str(models / Path(policy.model).name)
    sections: Mapping[str, Any] = {
        **{f"tasks.sources.{name}": each for name, each in mapping["tasks"]["sources"].items()},
        **{f"eval.sets.{name}.source": each["source"] for name, each in mapping["eval"]["sets"].items()},
    }
    for where, section in sections.items():
        if section.get("name") == "prepared":
            found[f"{where}.folder"] = str(ROOT / "recipes" / "fixtures" / section["dataset"])
    if "bench" in mapping["tasks"].get("environments", {}):
        found["tasks.environments.bench.args.path"] = str(tasks)
    craft = mapping["tasks"].get("environments", {}).get("craft", {"args": {}})
    if "path" in craft["args"]:
        found["tasks.environments.craft.args.path"] = str(tasks.with_name("minecraft"))
    workflow = mapping.get("workflow", {})
    if workflow.get("name") == "search":
        reader = "astraflow.addons.search.retrieval.documents:read_documents"
        documents = ROOT / "recipes" / "fixtures" / "asearcher-corpus" / "documents.jsonl"
        use = {"use": reader, "args": {"path": str(documents)}}
        found["workflow.index"] = {"name": "memory", "documents": use, "path": None}
    return found


def write_tasks(folder: Path) -> None:
    """Writes task folders as Terminal-Bench has them: an image, limits, and a long instruction.
    A folder next to them gets Minecraft's recipes."""
    write_minecraft(folder.with_name("minecraft"))
    for idx in range(_NUM_FOLDERS):
        files = folder_of(make_errand(random.Random(idx)), f"errand-{idx}")
        toml = 'version = "1.0"\n[metadata]\ndifficulty = "hard"\n[verifier]\ntimeout_sec = 3600.0\n'
        toml += "[agent]\ntimeout_sec = 12000.0\n[environment]\nbuild_timeout_sec = 600.0\ncpus = 1\n"
        files["task.toml"] = BoxFile(f'{toml}memory = "2G"\nstorage = "10G"\n'.encode())
        text = files["instruction.md"].content.decode()
        files["instruction.md"] = BoxFile((f"{text}\n" + _REQUIREMENT * _NUM_REQUIREMENTS).encode())
        files["environment/Dockerfile"] = BoxFile(b"FROM ubuntu:24.04\nWORKDIR /app\nCOPY files .\n")
        write_folder(files, folder / f"errand-{idx}")
