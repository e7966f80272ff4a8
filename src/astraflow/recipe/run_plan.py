"""Derives from a recipe what the dataflow needs: the plan of its core, and what a joining service must know.

`astraflow plan`, which forecasts what a pool achieves, is in the package `astraflow-paced`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

import astraflow
from astraflow.config import Config, Use
from astraflow.dataflow.core.plan import BestRule, EvalPlan, EvalSetPlan, PolicyPlan, RunPlan, StopPlan
from astraflow.errors import ConfigError
from astraflow.recipe.cluster_config import LocalLauncherConfig
from astraflow.recipe.eval_config import BestConfig, EvalSetConfig, TrainingReward, TrainingWorkflow
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.rollout.config import EvalRules
from astraflow.rollout.engine_config import EngineVariant, ModelEngineConfig
from astraflow.tasks.config import TasksConfig
from astraflow.types import PROTOCOL_VERSION, Fingerprints, PolicyInfo, RunInfo, Sampling
from astraflow.user_input.own_sources import own_files
from astraflow.user_input.user_files import json_value, read_file

__all__ = [
    "best_plan",
    "code_fingerprint",
    "eval_rules",
    "fingerprints",
    "named_uses",
    "policy_info",
    "run_info",
    "run_plan",
    "scoring_tasks",
    "uses",
]

_NOT_ARCHITECTURE = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version"})
"""Keys of a config.json that say nothing about the architecture."""

_MAX_LOST = 16
"""Attempts at an episode that may be lost with their services, in addition to `dataflow.max_attempts`.

An episode of an hour on machines that are taken away every few minutes loses fewer attempts than this. The
limit ends an episode that kills every service that runs it.
"""


def run_plan(recipe: Recipe, sources: Mapping[str, int]) -> RunPlan:
    """Returns everything that the core needs for its decisions; `sources` has the sizes of the sources."""
    lags = [(policy.follows, policy.lag) for policy in recipe.policies.values()]
    return RunPlan(
        seed=recipe.seed,
        group_size=recipe.group_size,
        policies={
            name: PolicyPlan(
                p.table,
                p.train.steps,
                max((lag for followed, lag in lags if followed == name), default=0),
                _longest_trajectory(recipe, p),
            )
            for name, p in recipe.trained.items()
        },
        frozen=tuple(name for name, policy in recipe.policies.items() if policy.role == "frozen"),
        sources=dict(sources),
        curators=recipe.tasks.curators,
        eval=EvalPlan(
            sets={name: EvalSetPlan(s.num_tasks, s.samples) for name, s in recipe.eval.sets.items()},
            every=recipe.eval.every,
            deadline_s=recipe.eval.deadline_s,
            best=best_plan(recipe.eval.best),
            max_per_service=recipe.eval.max_per_service,
        ),
        max_attempts=recipe.dataflow.max_attempts,
        max_lost=_MAX_LOST,
        admission=recipe.dataflow.admission,
        stop=StopPlan(**recipe.stop.model_dump()),
        max_pushed=recipe.dataflow.max_pushed,
        max_waiting_pushed=recipe.dataflow.max_waiting_pushed,
    )


def best_plan(best: BestConfig) -> BestRule | None:
    """Returns the rule by which the dataflow keeps the best version; None if it keeps none."""
    return BestRule(best.eval_set, best.figure, best.mode) if best.metric else None


def eval_rules(recipe: Recipe) -> dict[str, EvalRules]:
    """Returns how the episodes of each evaluation set run, where that differs from training."""
    return {
        name: EvalRules(
            sampling=recipe.eval.sampling_of(name),
            workflow=None if isinstance(config.workflow, TrainingWorkflow) else config.workflow,
            tasks=_eval_tasks(recipe, config),
        )
        for name, config in recipe.eval.sets.items()
    }


def scoring_tasks(recipe: Recipe) -> dict[str, TasksConfig]:
    """Returns the `tasks` sections that score training and the sets with their own reward, by their place in
    the recipe."""
    own = {
        f"eval.sets.{name}": rule.tasks for name, rule in eval_rules(recipe).items() if rule.tasks is not None
    }
    return {"tasks": recipe.tasks.without_curators, **own}


def _eval_tasks(recipe: Recipe, config: EvalSetConfig) -> TasksConfig | None:
    """Returns the `tasks` section by which a set is scored; None if it is that of training."""
    is_own = not isinstance(config.reward, TrainingReward)
    if not is_own and config.extract in {"training", recipe.tasks.extract}:
        return None
    changes: dict[str, Any] = {"reward": config.reward, "format": ""} if is_own else {}
    if config.extract != "training":
        changes["extract"] = config.extract
    return recipe.tasks.without_curators.model_copy(update=changes)


def run_info(recipe: Recipe) -> RunInfo:
    """Returns what a joining service needs in addition to URL and token.

    The dataflow fills in the run's id and state.
    """
    workflow = recipe.workflow
    return RunInfo(
        name=recipe.name,
        run_id="",
        state="running",
        policies=tuple(policy_info(name, policy) for name, policy in recipe.policies.items()),
        workflow=workflow.use if isinstance(workflow, Use) else workflow.name,
        fingerprints=fingerprints(recipe),
        recipe=recipe.model_dump_json(),
    )


def policy_info(name: str, policy: PolicyConfig) -> PolicyInfo:
    """Returns what a rollout service must know about a policy."""
    sampling = policy.sampling
    return PolicyInfo(
        name=name,
        is_trained=policy.role == "trained",
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
        ),
        max_lag=policy.table.engine_lag,
        follows=policy.follows,
        lag=policy.lag,
        agent_overrides=sampling.agent_overrides,
        template_args=json.dumps(policy.template_args),
        renderer=policy.renderer,
    )


def _longest_trajectory(recipe: Recipe, policy: PolicyConfig) -> int:
    """Returns the number of tokens of the longest possible trajectory.

    This is the context of the policy's model, or of the recipe's engine if that is longer; 0 if neither is
    known.
    """
    config = _model_config(policy.model_dir)
    text: dict[str, Any] = config.get("text_config") or {}  # multimodal models have one
    sizes: list[Any] = [part.get("max_position_embeddings") for part in (config, text)]
    engine = recipe.rollout.engine
    if isinstance(engine, ModelEngineConfig | EngineVariant):
        sizes.append(engine.context)
    return max((size for size in sizes if isinstance(size, int)), default=0)


def fingerprints(recipe: Recipe) -> Fingerprints:
    """Returns digests of everything that must agree between the services of a run. Raises: DataError."""
    models: dict[str, str] = {}
    tokenizers: dict[str, str] = {}
    for name, policy in recipe.policies.items():
        config = _model_config(policy.model_dir)
        architecture = {key: value for key, value in config.items() if key not in _NOT_ARCHITECTURE}
        models[name] = _digest(json.dumps(architecture, sort_keys=True).encode())
        tokenizer = policy.model_dir / "tokenizer.json"
        tokenizers[name] = _digest(tokenizer.read_bytes()) if tokenizer.is_file() else ""
    return Fingerprints(
        recipe=_digest(recipe.model_dump_json().encode()),
        code=code_fingerprint(recipe),
        models=models,
        tokenizers=tokenizers,
    )


def code_fingerprint(recipe: Recipe) -> str:
    """Returns a digest of the code that must agree between the services of a run.

    It covers the versions of the package and of the protocol, and the sources of the modules that the recipe
    names, with the user's own modules that these import. A launcher does not count, because the services that
    it starts don't need its module. No module is imported, because the recipe may come over the network.

    Raises: ConfigError if a module is not installed.
    """
    parts = [f"astraflow {astraflow.__version__}, protocol {PROTOCOL_VERSION}".encode()]
    of_services = recipe.model_copy(update={"launcher": LocalLauncherConfig()})
    places = {use.use.partition(":")[0]: where for where, use in named_uses(of_services)}
    for module in sorted(places):
        files = own_files(module)
        if not files:
            raise ConfigError(
                f"{places[module]}.use: module {module!r}, which the recipe names, is not installed here as "
                "a file; install it, or put its file into the current folder or the recipe's"
            )
        parts += [file.read_bytes() for file in files]
    return _digest(b"\0".join(parts))


def uses(config: Config) -> Iterator[Use]:
    """Yields every component in a config that the user wrote (`use:`)."""
    for _, use in named_uses(config):
        yield use


def named_uses(config: Config, where: str = "") -> Iterator[tuple[str, Use]]:
    """Yields every component that the user wrote, with its place in the recipe: `policies.actor.train.loss`.

    `where` is the place of `config` itself.
    """
    if isinstance(config, Use):
        yield where, config
        return
    for key in type(config).model_fields:
        yield from _uses_in(getattr(config, key), f"{where}.{key}" if where else key)


def _uses_in(value: object, where: str) -> Iterator[tuple[str, Use]]:
    if isinstance(value, Config):
        yield from named_uses(value, where)
    elif isinstance(value, dict):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType] - any mapping of a recipe
            yield from _uses_in(item, f"{where}.{key}")  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, tuple):
        for idx, item in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield from _uses_in(item, f"{where}.{idx}")  # pyright: ignore[reportUnknownArgumentType]


def _model_config(folder: Path) -> dict[str, Any]:
    """Reads the model's config.json. Raises: DataError."""
    path = folder / "config.json"
    return json_value(read_file(path, "the model's"), str(path))


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
