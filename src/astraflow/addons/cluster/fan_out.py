"""Whether the publishers of one machine can serve all rollout services of a large pool."""

from astraflow.errors import ConfigError, DataError
from astraflow.models.weight_files import weight_paths
from astraflow.recipe.recipe import Recipe

__all__ = ["check_fan_out", "check_served"]

_MANY_SERVICES = 100
"""With fewer services, the watchdog's `slow_link` says during the run that versions arrive too late."""
_MOST_BYTES = 60e9
"""What a machine sends in a minute at 1 GB/s."""


def check_fan_out(recipe: Recipe) -> None:
    """Raises: ConfigError if the services that a launcher starts on other machines would fetch too much from
    this one."""
    if not recipe.has_services_here:
        check_served(recipe, remedy="weights.peers=true, or weights.store to a place that all of them reach")


def check_served(recipe: Recipe, *, remedy: str) -> None:
    """Raises: ConfigError with the remedy if one version for every service is too much for the publishers."""
    num = recipe.max_services
    if num < _MANY_SERVICES or recipe.weights.peers or recipe.weights.store:
        return
    try:
        paths = {path for policy in recipe.published.values() for path in weight_paths(policy.model_dir)}
        each = sum(path.stat().st_size for path in paths)
    except (DataError, OSError):
        return  # the model's own check says what is wrong
    if num * each > _MOST_BYTES:
        size = f"{num * each / 1e9:.0f} GB or more per version ({each / 1e6:.0f} MB each)"
        raise ConfigError(
            f"{num} rollout services would fetch {size} from the publishers of one machine, which takes "
            f"minutes; set {remedy}"
        )
