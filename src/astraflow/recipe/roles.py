"""Which policies act: the mistakes in a recipe's roles that need no model, no task and no code to be seen."""

from astraflow.config import Use
from astraflow.errors import ConfigError
from astraflow.recipe.eval_config import TrainingWorkflow
from astraflow.recipe.recipe import Recipe
from astraflow.user_input.mistakes import hint, nearest_hint
from astraflow.workflows.config import WorkflowConfig

__all__ = ["check_roles"]


def check_roles(recipe: Recipe) -> None:
    """Nothing is known of workflows of the user's own.

    Raises: ConfigError if no policy is trained, a role is no policy, or a trained policy has no role.
    """
    if not recipe.trained:
        raise ConfigError("policies: none has `role: trained`, so nothing would be trained")
    for name, config in recipe.eval.sets.items():
        if not isinstance(config.workflow, TrainingWorkflow):
            _acting(config.workflow, recipe, f"eval.sets.{name}.workflow")
    acting = _acting(recipe.workflow, recipe, "workflow")
    if isinstance(recipe.workflow, Use):
        return
    idle = [name for name in recipe.trained if name not in acting]
    if idle:
        listed = ", ".join(repr(name) for name in dict.fromkeys(acting))
        raise ConfigError(
            f"policies.{idle[0]} is trained, but the workflow {recipe.workflow.name} lets only {listed} act, "
            "so its table could never fill a batch; give it `role: frozen`, or name a workflow that uses it"
            f"{nearest_hint(idle[0], acting)}"
        )


def _acting(workflow: WorkflowConfig, recipe: Recipe, where: str) -> list[str]:
    """The policy of each role. Raises: ConfigError if it does not exist."""
    if isinstance(workflow, Use):
        return []
    acting = workflow.acting(tuple(recipe.policies))
    for role, name in acting.items():
        if name not in recipe.policies:
            known = hint(name, list(recipe.policies))
            raise ConfigError(f"{where}.{role} = {name!r} is not a policy{known}")
    return list(acting.values())
