"""Checks the model folders that a recipe names: whether they are whole, have a tokenizer and a chat template,
and are of a family that the engine and the trainer can run.

It reads files and loads no library of models, so it takes milliseconds.
"""

import json
import re
import shlex
from pathlib import Path
from typing import cast

from astraflow.errors import ConfigError, DataError
from astraflow.launch.config import PolicyConfig
from astraflow.models.chat_template import check_template_args
from astraflow.models.families import (
    engine_refusal,
    exact_refusal,
    family_of,
    length_refusal,
    quantization_of,
    shard_refusal,
)
from astraflow.models.weight_files import check_weight_files
from astraflow.rollout.config import RolloutConfig, ServerEngineConfig, TorchEngineConfig

__all__ = ["check_family", "check_model"]

_HUB_NAME = re.compile(r"[\w.-]*\w[\w.-]*/[\w.-]+")
"""A name on the Hugging Face Hub, `OWNER/NAME`; `./model` is none."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
"""One of them is in every folder with a tokenizer."""
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
"""Where a chat template is if tokenizer_config.json does not hold it."""


def check_model(name: str, policy: PolicyConfig) -> bool:
    """True. Raises: DataError if a model of a policy (own, reference, teacher) is not a Hugging Face folder,
    or its own has no tokenizer or chat template; ConfigError if the template does not read an argument."""
    auxiliary = policy.train.auxiliary
    where = f"policies.{name}.model = {policy.model!r}"
    _check_folder(where, policy.model)
    _check_tokenizer(where, policy.model_dir)
    check_template_args(policy.template_args, policy.model_dir, f"policies.{name}.template_args")
    for key, model in (("reference", auxiliary.reference), ("teacher", auxiliary.teacher)):
        if model:
            _check_folder(f"policies.{name}.train.auxiliary.{key} = {model!r}", model)
    return True


def check_family(name: str, policy: PolicyConfig, rollout: RolloutConfig, *, exact: bool) -> None:
    """Raises: ConfigError if the model is of a kind that the engine or the trainer cannot run exactly."""
    config = json.loads((policy.model_dir / "config.json").read_text(encoding="utf-8"))
    who = f"policies.{name}.model = {policy.model!r} ({family_of(config)})"
    if method := quantization_of(config):
        raise ConfigError(
            f"{who}: its weights are quantized ({method}); versions hold plain float32, float16 or bfloat16 "
            "numbers, so use the folder that it was quantized from"
        )
    if exact and (reason := exact_refusal(config)):
        raise ConfigError(f"{who}: exact: true is not promised for it: {reason}; leave exact out")
    shard = policy.train.shard
    reason = shard_refusal(config, tensor=shard.tensor, expert=shard.expert, context=shard.context)
    if exact and shard.context > 1:
        reason = f"context = {shard.context}: exact: true computes whole sequences; set context: 1"
    if policy.role == "trained" and reason:
        raise ConfigError(f"{who}: policies.{name}.train.shard.{reason}")
    engine = rollout.engine
    if not isinstance(engine, TorchEngineConfig | ServerEngineConfig):
        return
    if isinstance(engine, TorchEngineConfig) and (reason := engine_refusal(config)):
        raise ConfigError(
            f"{who} cannot generate with rollout.engine `torch`: {reason}. Use rollout.engine `vllm` or "
            "`sglang` (docs/models.md says what was tried)"
        )
    if reason := length_refusal(config, max_context=engine.max_context):
        raise ConfigError(f"{who}: {reason}")


def _check_folder(where: str, model: str) -> None:
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise DataError(f"{where}: no such folder. {_how_to_get(model)}")
    config = folder / "config.json"
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise DataError(f"{where}: it has no config.json, so it is not a Hugging Face model folder") from err
    except ValueError as err:
        raise DataError(f"{where}: its config.json is broken: {err}") from err
    if not isinstance(content, dict):
        raise DataError(f"{where}: its config.json is broken: it holds no mapping")
    try:
        check_weight_files(folder)
    except DataError as err:
        raise DataError(f"{where}: {err}") from err


def _check_tokenizer(where: str, folder: Path) -> None:
    """Raises: DataError if the folder has no file of a tokenizer, or no chat template."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise DataError(
            f"{where}: it has no tokenizer (tokenizer.json); copy the tokenizer's files from the model that "
            "it was made from"
        )
    settings = folder / "tokenizer_config.json"
    try:
        content: object = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    except ValueError as err:
        raise DataError(f"{where}: its {settings.name} is broken: {err}") from err
    has_template = isinstance(content, dict) and bool(cast("dict[str, object]", content).get("chat_template"))
    if not has_template and not any((folder / name).is_file() for name in _TEMPLATE_FILES):
        raise DataError(
            f"{where}: its tokenizer has no chat template, as those of base models; add chat_template.jinja "
            "to the folder, or use the model's instruct version"
        )


def _how_to_get(model: str) -> str:
    """What makes a model folder that does not exist."""
    first_part = Path(model).parts[0]
    if _HUB_NAME.fullmatch(model) and first_part != "models" and not Path(first_part).is_dir():
        folder = f"models/{Path(model).name}"
        return (
            "A model is a folder, and AstraFlow downloads nothing by itself. If this is its name on the "
            f"Hugging Face Hub, run `hf download {model} --local-dir {folder}` and put {folder} here"
        )
    folder = shlex.quote(str(Path(model).expanduser()))
    return (
        f"Build a tiny model with `astraflow model init SPEC.yaml --out {folder}` (for the quickstart, "
        "SPEC.yaml is recipes/models/quickstart.yaml), or download one from the Hugging Face Hub with "
        f"`hf download OWNER/NAME --local-dir {folder}`"
    )
