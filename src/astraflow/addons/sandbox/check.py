"""Checks before a run whether this machine has a sandbox for the programs of a recipe."""

import asyncio

from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.errors import Error
from astraflow.recipe.access import built_in_workflows
from astraflow.recipe.run_plan import eval_rules
from astraflow.run.checks import Check, Examined, Finding
from astraflow.tasks.rewards import needs_sandbox

__all__ = ["SANDBOX_CHECK", "sandbox_finding"]


async def sandbox_finding(*, is_needed: bool, has_agents: bool = False) -> Finding:
    """Finds which backends of the sandbox can run a program here, and why the others can't. One is enough.

    `has_agents` means that the recipe has agent programs, whose sandboxes need more from the machine.
    """
    from astraflow.addons.sandbox.backends import (
        BACKENDS,
        advice,
        tried_maker,
    )  # here: no run needs it at its start

    programs = f"programs of a model {'and agent programs ' if has_agents else ''}"
    works: list[str] = []
    problems: list[str] = []
    for backend in BACKENDS:
        try:
            tried = await tried_maker(backend, SandboxConfig(), for_agents=has_agents)
        except Error as err:
            tried = str(err)
        if isinstance(tried, str):
            problems.append(f"{backend}: {tried}")
        else:
            works.append(f"{backend} ({tried.weakness})" if tried.weakness else backend)
    if not works:
        remedy = (
            f"{advice()}. Only rewards that run programs of a model, such as code_tests, and agents with "
            "box: sandbox need one"
        )
        level = "fail" if is_needed or has_agents else "warn"
        return Finding(
            level, "sandbox", f"no sandbox works, so {programs}cannot run ({'; '.join(problems)})", remedy
        )
    spare = f"; the alternative is not needed ({'; '.join(problems)})" if problems else ""
    return Finding("ok", "sandbox", f"{programs}run by {' or '.join(works)}{spare}")


def _check_sandbox(examined: Examined) -> Finding | None:
    """Runs a program in a sandbox, if the recipe's programs run in one on this machine."""
    recipe = examined.recipe
    rules = eval_rules(recipe)
    of_sets = [
        (rules[name].tasks or recipe.tasks).model_copy(update={"sources": {name: config.source}})
        for name, config in recipe.eval.sets.items()
    ]
    is_needed = any(map(needs_sandbox, [recipe.tasks, *of_sets]))
    has_agents = any(flow.needs_sandbox for flow in built_in_workflows(recipe))
    if not (is_needed or has_agents) or not recipe.has_services_here:
        return None
    return asyncio.run(sandbox_finding(is_needed=is_needed, has_agents=has_agents))


SANDBOX_CHECK = Check("sandbox", ("trial",), _check_sandbox)
