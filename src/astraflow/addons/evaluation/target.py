"""The targets of `astraflow eval`: a run folder, a model folder, or an endpoint, as hosted policies."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from astraflow.addons.export.saved_versions import SavedVersions
from astraflow.addons.one_process.hosting import host_models
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.derived import derive_numbers
from astraflow.recipe.model_checks import check_model
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.run_plan import policy_info
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.service.client import check_url
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.weights.snapshot import read_model

__all__ = ["Target", "TargetEndpoint", "find_target", "hosting"]


@dataclass(frozen=True, slots=True)
class TargetEndpoint:
    """An OpenAI-compatible server; an empty `model` means the first one that it lists."""

    base_url: str
    model: str = ""
    api_key: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """What replaces `policy` in `recipe`. Version -1 is the newest one of a run."""

    recipe: Recipe
    policy: str
    where: str
    kind: str
    """`run`, `model`, or `endpoint`."""
    version: int = -1
    endpoint: TargetEndpoint | None = None


def find_target(
    where: str,
    recipe: Recipe | None,
    *,
    policy: str = "",
    version: int = -1,
    endpoint: TargetEndpoint | None = None,
) -> Target:
    """Finds out what `where` is. `recipe` replaces the recipe of a run, and is required for anything else.

    Raises: ConfigError or DataError if `where` cannot be evaluated, or the recipe is missing.
    """
    kind = _kind(where)
    if kind != "run" and version >= 0:
        raise ConfigError(f"--version names a version of a run; {where} has only one")
    if recipe is None and kind != "run":
        raise ConfigError(f"{where} says nothing about tasks and scoring; pass --recipe RECIPE")
    known = derive_numbers(recipe or RunFolder(Path(where)).load_recipe())
    endpoint = (endpoint or TargetEndpoint(where)) if kind == "endpoint" else None
    return Target(known, known.choose_policy(policy), where, kind, version, endpoint)


def _kind(where: str) -> str:
    if where.startswith(("http://", "https://")):
        check_url(where)
        return "endpoint"
    path = Path(where)
    if (path / "recipe.yaml").is_file():
        return "run"
    if (path / "config.json").is_file():
        return "model"
    if not path.exists():
        raise DataError(f"{where} does not exist; pass a run folder, a Hugging Face model folder or a URL")
    raise DataError(
        f"{where} is neither a run folder (no recipe.yaml) nor a model folder (no config.json) nor a URL"
    )


@asynccontextmanager
async def hosting(target: Target) -> AsyncGenerator[tuple[Mapping[str, HostedPolicy], int]]:
    """Yields the recipe's policies, ready to generate, and the version of the target (-1: it has none).

    If the target is a run, the other policies have their newest versions; otherwise, they have the models of
    the recipe.
    Raises: DataError, WeightsError, ConfigError, or UnavailableError if a policy cannot be loaded.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="astraflow-eval-")))
        snapshots = {
            name: await asyncio.to_thread(_snapshot, target, name, folder / name)
            for name in target.recipe.policies
            if target.endpoint is None or name != target.policy
        }
        hosted = await stack.enter_async_context(host_models(target.recipe, snapshots, date=_date(target)))
        if target.endpoint is not None:
            hosted = {**hosted, target.policy: await stack.enter_async_context(_calling(target))}
        version = snapshots[target.policy].version if target.kind == "run" else -1
        yield {name: hosted[name] for name in target.recipe.policies}, version


@asynccontextmanager
async def _calling(target: Target) -> AsyncGenerator[HostedPolicy]:
    from astraflow.addons.inference_servers.openai_engine import OpenAiEngine, TextRenderer

    assert target.endpoint is not None
    recipe = target.recipe
    endpoint = target.endpoint
    engine = OpenAiEngine(
        endpoint.base_url,
        model=endpoint.model,
        api_key=endpoint.api_key,
        max_requests=recipe.rollout.max_episodes,
        timeout_s=recipe.rollout.episode_timeout_s,
        template_args=recipe.policies[target.policy].template_args,
    )
    try:
        await engine.check()
        info = policy_info(target.policy, recipe.policies[target.policy])
        yield HostedPolicy(info, engine, TextRenderer())
    finally:
        await engine.close()


def _date(target: Target) -> str:
    """The day on which a run began, for chat templates; empty for other targets."""
    journal = RunFolder(Path(target.where)).journal
    if target.kind != "run" or not journal.is_dir():
        return ""
    with JournalReader(journal) as reader:
        return reader.date


def _snapshot(target: Target, name: str, cache: Path) -> WeightSnapshot:
    """Loads the weights of one policy. Blocks."""
    policy = target.recipe.policies[name]
    if target.kind == "run" and policy.role == "trained":
        version = target.version if name == target.policy else -1
        store = SavedVersions(RunFolder(Path(target.where)).weights / name, name)
        return store.read(version).snapshot(cache)
    if target.kind == "model" and name == target.policy:
        folder = Path(target.where)
    else:
        check_model(name, policy)
        folder = policy.model_dir
    return WeightSnapshot(name, 0, read_model(folder), folder)
