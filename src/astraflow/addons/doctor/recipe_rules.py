"""Checks settings by rules that an expert knows: corrections, data types on GPUs, room for each turn."""

from importlib.util import find_spec

from astraflow.addons.doctor.memory import num_parameters
from astraflow.addons.inference_servers.config import ServerEngineConfig
from astraflow.config import Use
from astraflow.losses.config import NoCorrectionConfig
from astraflow.recipe.recipe import Recipe
from astraflow.rollout.engine_config import ModelEngineConfig, TorchEngineConfig
from astraflow.run.checks import Check, Examined, Finding
from astraflow.trainer.backend_config import torch_settings
from astraflow.trainer.config import TrainConfig
from astraflow.user_input.mistakes import as_written
from astraflow.workflows.config import EnvironmentWorkflowConfig

__all__ = ["RULES_CHECK"]

_LARGE = 100_000_000
"""Number of parameters from which the data type decides how long a step takes."""


def _check_rules(examined: Examined) -> None:
    for train in (policy.train for policy in examined.recipe.trained.values()):
        own = {part.use for part in (train.loss, train.auxiliary.correction) if isinstance(part, Use)}
        if own.isdisjoint(examined.broken):
            examined.collect("corrections", _check_correction, train)
    models = [policy.model_dir for name, policy in examined.recipe.policies.items() if name in examined.sound]
    if max(map(num_parameters, models), default=_LARGE) >= _LARGE:
        for where in _float32_places(examined.recipe):
            text = f"{where}.dtype = float32 on a GPU, which computes 16-bit numbers many times as fast"
            examined.add(Finding("warn", "data types", text, "set it to bfloat16"))
    examined.collect("room for turns", _check_turns, examined.recipe)


RULES_CHECK = Check("rules of recipes", ("recipe",), _check_rules)


def _check_correction(train: TrainConfig) -> None:
    """Raises: ConfigError if a loss doesn't go with its correction."""
    if not isinstance(train.auxiliary.correction, NoCorrectionConfig) and find_spec("torch"):
        from astraflow.losses.factory import make_loss  # imports torch, which takes seconds

        make_loss(train.loss, train.auxiliary)


def _float32_places(recipe: Recipe) -> list[str]:
    """Returns the place of each backend and engine that computes in float32 on a GPU."""
    backends = {name: torch_settings(policy.train.backend) for name, policy in recipe.trained.items()}
    used = {as_written(f"policies.{name}.train.backend"): b for name, b in backends.items() if b}
    places = [where for where, b in used.items() if b.device.startswith("cuda") and b.dtype == "float32"]
    engine = recipe.rollout.engine
    has_gpus = bool(recipe.rollout.gpus) or recipe.cluster.rollout.gpus > 0
    if isinstance(engine, TorchEngineConfig):
        has_gpus = engine.device.startswith("cuda")
    if isinstance(engine, ServerEngineConfig | TorchEngineConfig) and has_gpus and engine.dtype == "float32":
        places.append("rollout.engine")
    return places


def _check_turns(recipe: Recipe) -> Finding | None:
    """Warns if the context has room for only a quarter of a turn's longest reply."""
    engine = recipe.rollout.engine
    workflow = recipe.workflow
    if not (isinstance(workflow, EnvironmentWorkflowConfig) and isinstance(engine, ModelEngineConfig)):
        return None
    most = recipe.policies[workflow.policy or next(iter(recipe.policies))].sampling.max_tokens
    each = engine.context // workflow.max_turns
    if engine.max_context == "auto" or 4 * each >= most:
        return None
    text = f"{workflow.max_turns} turns have {each} tokens each, but a reply alone may have {most}"
    remedy = "raise rollout.engine.max_context, or lower workflow.max_turns or sampling.max_tokens"
    return Finding("warn", "room for turns", text, remedy)
