"""Checks a recipe with the backend `megatron` before a run, without loading anything."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

from astraflow.addons.megatron import python_report
from astraflow.addons.megatron.config import MegatronBackendConfig
from astraflow.addons.megatron.shape import ModelShape, read_shape
from astraflow.errors import ConfigError
from astraflow.losses.config import ValueModelConfig
from astraflow.models.hub import model_path
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.trainer.config import TrainConfig
from astraflow.user_input.interpreters import OWN_MODULES_HIDDEN, ask_program, find_interpreter, last_line
from astraflow.user_input.mistakes import as_written

__all__ = ["DEVICE_KINDS", "check_megatron", "open_shape"]

DEVICE_KINDS = ["cuda"]
"""Kinds of devices on which megatron-core computes."""


def check_megatron(recipe: Recipe) -> None:
    """Checks all policies that Megatron trains. Models that are not there yet are checked when they are
    loaded.

    Raises: ConfigError if one can't be trained by it as the recipe says.
    """
    for name, policy in recipe.trained.items():
        if not isinstance(policy.train.backend, MegatronBackendConfig):
            continue
        try:
            _check_policy(policy)
        except ConfigError as err:
            above = as_written(f"policies.{name}.train").removesuffix("train")
            raise ConfigError(f"{above}{err}") from err


def _check_policy(policy: PolicyConfig) -> None:
    train = policy.train
    assert isinstance(train.backend, MegatronBackendConfig)
    has_library = find_spec("megatron") is not None
    if (kind := train.backend.device.partition(":")[0]) not in DEVICE_KINDS:
        raise ConfigError(
            f"train.backend.device = {train.backend.device!r}: megatron-core computes on NVIDIA GPUs only, "
            f"not on {kind!r}; set it to cuda:0, or use train.backend.name: torch"
        )
    others = [model_path(other) for other in (train.auxiliary.reference, train.auxiliary.teacher) if other]
    for folder in (policy.model_dir, *others):
        if (folder / "config.json").is_file():
            open_shape(train, folder)
    if train.backend.python:
        _check_python(train, train.backend.python)
    elif not has_library:
        raise ConfigError(
            'train.backend.name: megatron needs megatron-core; run pip install "astraflow[megatron]", or '
            "name the Python of an environment that has it in train.backend.python"
        )


def _check_python(train: TrainConfig, named: str) -> None:
    """Raises: ConfigError that says what the trainer's own Python lacks."""
    where = "train.backend.python"
    if train.nodes > 1:
        raise ConfigError(
            f"{where} with train.nodes = {train.nodes}: other machines start ranks in their own Python; "
            "leave it out, and install megatron-core there"
        )
    python = find_interpreter(named, where)
    where = f"{where} = {named!r}"
    try:
        asked = ask_program([python, "-P", python_report.__file__], env={**os.environ, **OWN_MODULES_HIDDEN})
    except OSError as err:
        raise ConfigError(f"{where} cannot be run: {err.strerror}") from err
    if asked.returncode:
        raise ConfigError(f"{where} is not a usable Python >= 3.11: {last_line(asked.stderr)}")
    theirs = json.loads(last_line(asked.stdout))
    ours = python_report.python_report()
    if theirs["problem"]:
        raise ConfigError(
            f"{where} has no astraflow ({theirs['problem']}); install the same version there: "
            f'{python} -m pip install "astraflow[megatron]=={ours["version"]}"'
        )
    if theirs["version"] != ours["version"]:
        raise ConfigError(
            f"{where} has astraflow {theirs['version']}, but this is {ours['version']}; install the same "
            "version there"
        )
    if theirs["source"] != ours["source"]:
        raise ConfigError(
            f"{where} has astraflow {theirs['version']} with other source files than this one; install it "
            "there from the same source"
        )
    if not theirs["has_megatron"]:
        raise ConfigError(f'{where} has no megatron-core; run {python} -m pip install "astraflow[megatron]"')


def open_shape(train: TrainConfig, folder: Path) -> ModelShape:
    """Reads the shape of a model that Megatron is to train or score with.

    Raises: ConfigError if it can't; DataError if the folder has no model.
    """
    backend = train.backend
    assert isinstance(backend, MegatronBackendConfig)
    if isinstance(train.auxiliary.critic, ValueModelConfig):
        raise ConfigError(
            "train.auxiliary.critic: the backend `megatron` trains no critic; use a credit without one, or "
            "train.backend.name: torch"
        )
    shape = read_shape(folder)
    shape.check_cut(tensor=backend.tensor, pipeline=backend.pipeline, context=backend.context)
    return shape
