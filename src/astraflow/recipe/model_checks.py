"""Checks the model folders that a recipe names: whether their weights are those of their config, they have a
tokenizer and a chat template, and belong to a family that the engine and the trainer can run.

The checks import no model library into this process; see `models.model_folder`.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from astraflow import added
from astraflow.errors import ConfigError, DataError
from astraflow.losses.config import ValueModelConfig
from astraflow.models.chat_template import check_template_args, folder_prints_date
from astraflow.models.families import (
    engine_refusal,
    exact_refusal,
    family_of,
    length_refusal,
    shard_refusal,
)
from astraflow.models.hub import is_cached, is_hub_name, model_path
from astraflow.models.model_folder import check_model_folder, has_tokenizer
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.rollout.config import RolloutConfig
from astraflow.rollout.engine_config import ModelEngineConfig, TorchEngineConfig
from astraflow.user_input.mistakes import as_written, near_path

__all__ = ["check_family", "check_model", "date_notes", "is_to_be_fetched", "models_of"]

_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
"""Files with the chat template if tokenizer_config.json does not contain it."""


def date_notes(recipe: Recipe) -> Iterator[str]:
    """Yields a message for each policy whose chat template prints today's date."""
    for name, policy in recipe.policies.items():
        if folder_prints_date(policy.model_dir):
            yield (
                f"policies.{name}: the chat template of {policy.model} prints today's date; in a run, that "
                "is always the day (UTC) on which the run began"
            )


def check_model(name: str, policy: PolicyConfig) -> bool:
    """Checks all models of a policy, and returns True. Models that are still to be downloaded pass.

    Raises: DataError if a model of the policy (its own, reference, teacher or critic) is not a Hugging Face
    folder, or its own model has no tokenizer or chat template; ConfigError if the template does not read an
    argument.
    """
    for key, model in models_of(name, policy).items():
        if is_to_be_fetched(model):
            continue
        where = f"{as_written(key)} = {model!r}"
        _check_folder(where, model)
        if key == f"policies.{name}.model":
            args = policy.template_args
            library = added.library_renderer(policy.model_dir, policy.renderer, args, where)
            _check_tokenizer(where, policy.model_dir, needs_template=library is None)
            if library is None:
                check_template_args(args, policy.model_dir, as_written(f"policies.{name}.template_args"))
    return True


def models_of(name: str, policy: PolicyConfig) -> dict[str, str]:
    """Returns all models that a policy names, by their place in the recipe: folders, and names on the hub."""
    auxiliary = policy.train.auxiliary
    critic = auxiliary.critic
    side = {
        "reference": auxiliary.reference,
        "teacher": auxiliary.teacher,
        "critic.model": critic.model if isinstance(critic, ValueModelConfig) else "",
    }
    named = {f"policies.{name}.train.auxiliary.{key}": model for key, model in side.items() if model}
    return {f"policies.{name}.model": policy.model, **named}


def is_to_be_fetched(model: str) -> bool:
    """Returns whether a model is a name on the hub that is not in the cache yet."""
    return is_hub_name(model) and not is_cached(model)


def check_family(name: str, policy: PolicyConfig, rollout: RolloutConfig, *, exact: bool) -> None:
    """Checks that the engine and the trainer can run the policy's model, and exactly if `exact` is set.

    Raises: ConfigError if they can't.
    """
    config = json.loads((policy.model_dir / "config.json").read_text(encoding="utf-8"))
    who = f"{as_written(f'policies.{name}.model')} = {policy.model!r} ({family_of(config)})"
    if exact:
        added.require("InvariantForward")
        if reason := exact_refusal(config):
            raise ConfigError(f"{who}: exact: true is not guaranteed for it: {reason}; leave exact out")
    shard = policy.train.shard
    reason = shard_refusal(config, tensor=shard.tensor, expert=shard.expert, context=shard.context)
    if exact and shard.context > 1:
        reason = f"context = {shard.context}: exact: true computes whole sequences; set context: 1"
    if policy.role == "trained" and reason:
        raise ConfigError(f"{who}: {as_written(f'policies.{name}.train.shard')}.{reason}")
    engine = rollout.engine
    if isinstance(engine, TorchEngineConfig) and (reason := engine_refusal(config)):
        raise ConfigError(
            f"{who} cannot generate with rollout.engine `torch`: {reason}. Use rollout.engine `vllm` or "
            "`sglang` (docs/models.md says what was tried)"
        )
    if isinstance(engine, ModelEngineConfig) and (
        reason := length_refusal(config, max_context=engine.context)
    ):
        raise ConfigError(f"{who}: {reason}")


def _check_folder(where: str, model: str) -> None:
    folder = model_path(model)
    if not folder.is_dir():
        raise DataError(f"{where}: no such folder{near_path(folder)}. {_how_to_get(model)}")
    try:
        check_model_folder(folder)
    except DataError as err:
        raise DataError(f"{where}: {err}") from err


def _check_tokenizer(where: str, folder: Path, *, needs_template: bool) -> None:
    """Checks a folder for a tokenizer and a chat template. Raises: DataError if either is missing."""
    if not has_tokenizer(folder):
        raise DataError(
            f"{where}: it has no tokenizer (tokenizer.json); copy the tokenizer's files from the model that "
            "it was made from"
        )
    settings = folder / "tokenizer_config.json"
    try:
        content: object = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    except (ValueError, RecursionError) as err:
        raise DataError(f"{where}: its {settings.name} is broken: {err}") from err
    has_template = isinstance(content, dict) and bool(cast("dict[str, object]", content).get("chat_template"))
    if needs_template and not has_template and not any((folder / name).is_file() for name in _TEMPLATE_FILES):
        raise DataError(
            f"{where}: its tokenizer has no chat template, as those of base models; add chat_template.jinja "
            "to the folder, or use the model's instruct version"
        )


def _how_to_get(model: str) -> str:
    """Returns how the user gets a model folder that does not exist."""
    folder = shlex.quote(str(Path(model).expanduser()))
    return (
        f"Download a model with `hf download OWNER/NAME --local-dir {folder}`, name it as OWNER/NAME, or "
        f"build a tiny one with `astraflow model init SPEC.yaml --out {folder}` (recipes/models has specs)"
    )
