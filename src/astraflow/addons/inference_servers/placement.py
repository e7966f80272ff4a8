"""Checks the servers of a recipe: what they compute, where they run, and which GPUs of a service they use."""

from astraflow.addons.inference_servers.config import ServerEngineConfig
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.run.checks import Check, Examined, Finding
from astraflow.trainer.backend_config import torch_settings
from astraflow.user_input.mistakes import as_written, hint

__all__ = ["BUILD_CHECK", "check_servers", "gpus_per_service"]


def _check_build(examined: Examined) -> Finding | None:
    engine = examined.recipe.rollout.engine
    if not isinstance(engine, ServerEngineConfig) or not examined.recipe.has_services_here:
        return None
    text = engine.check_machine()
    return Finding("ok", "server of the engine", text) if text else None


BUILD_CHECK = Check("server of the engine", ("recipe", "parts"), _check_build)


def check_servers(recipe: Recipe) -> None:
    """Checks the heads of engine and trainer, and `rollout.engine.servers`. Raises: ConfigError."""
    _check_heads(recipe)
    engine = recipe.rollout.engine
    if isinstance(engine, ServerEngineConfig) and engine.servers:
        _check_gpus(recipe, engine)


def _check_heads(recipe: Recipe) -> None:
    """Raises: ConfigError if one of engine and trainer has a float32 head, and the other rounds its logits.

    They would differ more than if both rounded alike.
    """
    engine = recipe.rollout.engine
    if not isinstance(engine, ServerEngineConfig | TorchEngineConfig):
        return
    head = engine.head_dtype if isinstance(engine, ServerEngineConfig) else "model"
    for name, policy in recipe.trained.items():
        if (backend := torch_settings(policy.train.backend)) is None:
            continue
        where = as_written(f"policies.{name}.train.backend")
        sides = {"rollout.engine": (engine.dtype, head), where: (backend.dtype, backend.head_dtype)}
        rounding = [side for side, dtypes in sides.items() if "float32" not in dtypes]
        if rounding and "float32" in (head, backend.head_dtype):
            raise ConfigError(
                f"{rounding[0]} rounds its logits to {sides[rounding[0]][0]}, but the other side has "
                "head_dtype: float32; set that on both sides (torch engine: dtype: float32) or on neither"
            )


def _check_gpus(recipe: Recipe, engine: ServerEngineConfig) -> None:
    """Raises: ConfigError if `rollout.engine.servers` names another policy, or GPUs that a service doesn't
    have, or leaves one unused."""
    where = "rollout.engine.servers"
    for name in engine.servers:
        if name not in recipe.policies:
            raise ConfigError(f"{where}.{name}: there is no such policy{hint(name, list(recipe.policies))}")
    if engine.attach.url:
        raise ConfigError(
            f"{where} places servers that the engine starts, but attach.url names one; drop either"
        )
    for num in gpus_per_service(recipe):
        used = {gpu for own in engine.servers.values() for gpu in own.gpus}
        if beyond := sorted(gpu for gpu in used if gpu >= num):
            raise ConfigError(
                f"{where} uses GPU {beyond[0]} of a service that has {num}, counted from 0; give each "
                "service more (rollout.gpus, or cluster.rollout.gpus with a launcher), or use lower numbers"
            )
        is_spread = all(name in engine.servers and engine.servers[name].gpus for name in recipe.policies)
        if is_spread and len(used) < num:
            unused = ", ".join(str(gpu) for gpu in range(num) if gpu not in used)
            raise ConfigError(
                f"{where}: GPU {unused} of a service with {num} has no server; give it to a policy"
            )


def gpus_per_service(recipe: Recipe) -> set[int]:
    """Returns how many GPUs a service has: several numbers if services differ, none if it isn't stated."""
    lists = recipe.rollout.gpus
    if lists:
        return {len(text.split(",")) for text in lists}
    num = recipe.cluster.rollout.gpus
    return {int(num)} if num >= 1 else set()
