"""Who may do what in a run: the tokens that callers show, the certificates of the services, and the modules
and commands that a rollout service runs for a recipe.
"""

import os
import shlex

from astraflow.config import Config
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.run_plan import scoring_tasks, uses
from astraflow.rollout.engine_config import EngineVariant
from astraflow.rollout.judging import judges_of
from astraflow.service.server import is_loopback
from astraflow.workflows.variant import WorkflowVariant

__all__ = [
    "CA_VARIABLE",
    "ROLES",
    "built_in_workflows",
    "check_allowed",
    "needs_tokens",
    "network_modules",
    "own_ca_file",
    "own_token",
    "tls_files",
    "tokens_of",
]

CA_VARIABLE = "SSL_CERT_FILE"
"""Environment variable with the certificates by which a process checks others; OpenSSL reads it too."""

ROLES = ("worker", "trainer", "viewer", "admin")
"""Who may call: each role has a token of its own."""


def needs_tokens(recipe: Recipe) -> bool:
    """Whether every caller must show a token: something listens beyond loopback, or programs that are not
    part of the run share this machine with it."""
    is_reachable = not (is_loopback(recipe.dataflow.host) and is_loopback(recipe.weights.host))
    return is_reachable or any(workflow.commands for workflow in built_in_workflows(recipe))


def tokens_of(recipe: Recipe, folder: RunFolder) -> dict[str, str]:
    """Token -> role. The tokens are made at first use; a run that needs none has none."""
    if not needs_tokens(recipe):
        return {}
    return {folder.token(role): role for role in ROLES}


def tls_files(recipe: Recipe) -> tuple[str, str] | None:
    """Certificate and key of the run's services; None without TLS."""
    tls = recipe.dataflow.tls
    return (tls.cert, tls.key) if tls.is_on else None


def own_token(recipe: Recipe, folder: RunFolder, role: str) -> str:
    """The token of a role for a service that has the run folder; empty if the run needs none."""
    return folder.token(role) if needs_tokens(recipe) else ""


def own_ca_file(recipe: Recipe) -> str:
    """The certificates by which a service that has the run folder checks the others; empty: those that
    OpenSSL trusts, as its variable says."""
    return "" if os.environ.get(CA_VARIABLE) else recipe.dataflow.tls.ca_file


def network_modules(recipe: Recipe) -> tuple[str, ...]:
    """What a rollout service runs for the recipe: modules that it imports, an agent's command, and the
    commands of the engine."""
    parts: list[Config] = [recipe.workflow, recipe.tasks.without_curators, recipe.rollout, recipe.eval]
    used = {use.use.partition(":")[0] for part in parts for use in uses(part)}
    engine = recipe.rollout.engine
    if isinstance(engine, EngineVariant):
        used.update(engine.commands)
    judges = [judge for tasks in scoring_tasks(recipe).values() for judge in judges_of(tasks).values()]
    used.update(judge.endpoint for judge in judges if judge.endpoint)
    for workflow in built_in_workflows(recipe):
        used.update(workflow.commands)
    return tuple(sorted(used))


def check_allowed(recipe: Recipe, allow: tuple[str, ...]) -> None:
    """Raises ConfigError unless every module and command that the recipe would run here is allowed."""
    missing = [module for module in network_modules(recipe) if module not in allow]
    if missing:
        flags = " ".join(f"--allow {shlex.quote(module)}" for module in missing)
        raise ConfigError(
            f"this run's recipe runs or imports {', '.join(missing)} here; if you trust that code and have "
            f"it installed, join again with {flags}"
        )


def built_in_workflows(recipe: Recipe) -> list[WorkflowVariant]:
    """The workflows of training and of evaluation sets, but those of the user's own."""
    given = [recipe.workflow, *(config.workflow for config in recipe.eval.sets.values())]
    return [workflow for workflow in given if isinstance(workflow, WorkflowVariant)]
