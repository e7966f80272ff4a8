"""Checks which GPUs of a service the servers of each policy use."""

from astraflow.addons.inference_servers.config import ServerEngineConfig
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe
from astraflow.user_input.mistakes import hint

__all__ = ["check_servers", "gpus_per_service"]


def check_servers(recipe: Recipe) -> None:
    """Checks `rollout.engine.servers`.

    Raises: ConfigError if it names another policy, or GPUs that a service doesn't have, or leaves one unused.
    """
    engine = recipe.rollout.engine
    if not isinstance(engine, ServerEngineConfig) or not engine.servers:
        return
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
