"""Checks before a run that teachers have the policy's tokenizer, and that its loss fits the workflow."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from astraflow.addons.distillation.config import DistillConfig, DistillTopLossConfig
from astraflow.addons.distillation.endpoint import EndpointTeacher
from astraflow.addons.inference_servers.model_choice import ModelChoice
from astraflow.errors import ConfigError
from astraflow.losses.config import DistillLossConfig
from astraflow.recipe.access import built_in_workflows
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.renderer import load_tokenizer
from astraflow.run.checks import Check, Examined, Finding
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.workflows.roles import name_at

__all__ = ["DISTILLATION_CHECK"]

_PROBE = "2 + 3 = 5. Où est le café? 北京 def f(x):\n    return x\n"
"""A text that tokenizers split differently."""


def _check(examined: Examined) -> None:
    recipe = examined.recipe
    for workflow in built_in_workflows(recipe):
        name = (
            name_at(tuple(recipe.policies), workflow.policy, 0) if isinstance(workflow, DistillConfig) else ""
        )
        if isinstance(workflow, DistillConfig) and name in recipe.policies:  # else the check of roles says so
            examined.collect("distillation", _check_loss, recipe, name, workflow)
            _check_teachers(examined, recipe.policies[name], name, workflow)


def _check_teachers(examined: Examined, policy: PolicyConfig, name: str, workflow: DistillConfig) -> None:
    """Checks the teachers of a policy, as far as their models can be used."""
    for source, teacher in workflow.teachers.items():
        if {name, teacher.policy or name} <= set(examined.sound):
            where = f"workflow.teachers.{source}"
            examined.collect("distillation", _check_tokenizer, examined.recipe, policy, teacher, prefix=where)


DISTILLATION_CHECK = Check("distillation", ("recipe",), _check)


def _check_loss(recipe: Recipe, name: str, workflow: DistillConfig) -> None:
    """Raises: ConfigError if the policy's loss reads other numbers than the workflow records."""
    policy = recipe.policies[name]
    loss = policy.train.loss
    num = loss.num if isinstance(loss, DistillTopLossConfig) else 0
    if isinstance(loss, DistillTopLossConfig | DistillLossConfig) and num != workflow.top:
        what = f"compares {num} tokens in place of each" if num else "compares sampled tokens only"
        raise ConfigError(
            f"workflow.top = {workflow.top}: the loss {loss.name!r} of {name!r} {what}; set it to {num}"
        )
    if num and not isinstance(policy.train.backend, TorchBackendConfig):
        raise ConfigError(
            f"train.loss.name = 'distill_top' of {name!r} needs train.backend.name: torch; other backends "
            "compute sampled tokens only"
        )
    is_torch = isinstance(recipe.rollout.engine, TorchEngineConfig)
    if policy.sampling.temperature != 1 and (workflow.commands or not is_torch):
        raise ConfigError(
            f"sampling.temperature = {policy.sampling.temperature:g} of {name!r}: servers and endpoints "
            "score tokens at temperature 1 only; set it to 1, or use teachers in rollout.engine.name: torch"
        )


def _check_tokenizer(recipe: Recipe, policy: PolicyConfig, teacher: ModelChoice) -> Finding | None:
    """Raises: ConfigError if a teacher has another tokenizer, or an endpoint gives no prompt logprobs."""
    if teacher.policy:
        folder = recipe.policies[teacher.policy].model_dir
        if _tokenizer(folder) != _tokenizer(policy.model_dir):
            raise ConfigError(
                f"{teacher.policy!r} ({folder}) has another tokenizer than the policy ({policy.model_dir}); "
                "use a teacher with the same one"
            )
        return None
    if teacher.key_variable and teacher.key_variable not in os.environ:
        what = f"the tokenizer at {teacher.url} wasn't compared: {teacher.key_variable} is not set here"
        return Finding("warn", "distillation", what)
    ids = load_tokenizer(policy.model_dir).encode(_PROBE, add_special_tokens=False)

    async def ask() -> None:
        endpoint = EndpointTeacher(teacher)
        try:
            await endpoint.check_tokens(_PROBE, ids)
            await endpoint.check_scores(0)
        finally:
            await endpoint.close()

    with ThreadPoolExecutor(1) as pool:  # a loop may be running in this thread
        pool.submit(asyncio.run, ask()).result()
    return None


def _tokenizer(folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    return path.read_bytes() if path.is_file() else b""
