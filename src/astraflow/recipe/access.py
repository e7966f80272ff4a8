"""Access control of a run: the tokens that callers present, the TLS certificates of the services, and the
modules and commands that a rollout service runs for a recipe.
"""

import os
import shlex

from astraflow.config import Config
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.run_plan import scoring_tasks, uses
from astraflow.rollout.engine_config import EngineVariant
from astraflow.service.loopback import is_loopback
from astraflow.tasks.config import judges_of
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
"""Environment variable that names the file of trusted certificates; OpenSSL reads it too."""

ROLES = ("worker", "trainer", "viewer", "admin")
"""The roles of callers. Each role has its own token."""


def needs_tokens(recipe: Recipe) -> bool:
    """Returns whether every caller must present a token.

    This is the case if a service listens beyond loopback, or if programs that are not part of the run, such
    as an agent's command, share this machine with it.
    """
    is_reachable = not (is_loopback(recipe.dataflow.host) and is_loopback(recipe.weights.host))
    return is_reachable or any(workflow.commands for workflow in built_in_workflows(recipe))


def tokens_of(recipe: Recipe, folder: RunFolder) -> dict[str, str]:
    """Returns the role of each token, by token; empty if the run needs no tokens.

    The first call creates the tokens.
    """
    if not needs_tokens(recipe):
        return {}
    return {folder.token(role): role for role in ROLES}


def tls_files(recipe: Recipe) -> tuple[str, str] | None:
    """Returns the certificate and the key of the run's services; None without TLS."""
    tls = recipe.dataflow.tls
    return (tls.cert, tls.key) if tls.is_on else None


def own_token(recipe: Recipe, folder: RunFolder, role: str) -> str:
    """Returns a role's token for a service that has the run folder; empty if the run needs no tokens."""
    return folder.token(role) if needs_tokens(recipe) else ""


def own_ca_file(recipe: Recipe) -> str:
    """Returns the file of certificates that a service with access to the run folder trusts.

    Empty means the certificates that OpenSSL trusts; it reads `CA_VARIABLE`, which overrides the recipe.
    """
    return "" if os.environ.get(CA_VARIABLE) else recipe.dataflow.tls.ca_file


def network_modules(recipe: Recipe) -> tuple[str, ...]:
    """Returns what a rollout service runs for the recipe, sorted.

    These are the modules that it imports, the endpoints of judges, and the commands of agents and engines.
    """
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
    """Returns the workflows of training and of evaluation sets, without the user's own (`use:`)."""
    given = [recipe.workflow, *(config.workflow for config in recipe.eval.sets.values())]
    return [workflow for workflow in given if isinstance(workflow, WorkflowVariant)]
