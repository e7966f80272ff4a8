"""Checks, with a learning rate of 0, whether engine and trainer compute the same logprobs.

In a short run in one process, versions are published and loaded as usual, but all have the same weights. Any
difference between the logprob that the engine recorded and the one that the trainer computes is therefore an
error of one of them: a different template, temperature, mask or dtype, or stale weights.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import xxhash

from astraflow.addons.one_process.in_process import run_in_process
from astraflow.errors import ConfigError, DeadlineError
from astraflow.protocols import Learner, StepResult, Write
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.rollout.engine_config import ModelEngineConfig
from astraflow.run.checks import Finding
from astraflow.run.preflight import check_recipe
from astraflow.trainer.backend_config import BackendVariant, TorchBackendConfig
from astraflow.trainer.backend_factory import make_learner
from astraflow.types import Batch, Item
from astraflow.types.host_tensors import HostTensor

__all__ = ["LIMIT", "PolicyDrift", "drift_finding", "measure_drift"]

LIMIT = 1e-4
"""In nats: far above the rounding errors of a float32 forward pass (about 1e-6), and far below what changes a
ratio."""

_LIMIT_BF16 = 0.5
"""In nats: in bfloat16, rounding alone changes a token's logprob by 0.1 or more, on each side."""


class PolicyDrift(Item, frozen=True, kw_only=True):
    """|logprob of the engine - logprob of the trainer| over one policy's trained tokens, in nats."""

    policy: str
    steps: int
    num_tokens: int
    gap_mean: float
    """Mean over the steps."""
    gap_max: float
    limit: float
    """`gap_max` must stay below this. It is `LIMIT`, or more if engine and trainer both compute in bfloat16.
    With `exact` it is 0, and `gap_max` must be 0, too."""
    are_weights_unchanged: bool
    """Whether the steps with lr=0 left every bit of the weights unchanged."""

    @property
    def is_ok(self) -> bool:
        """Whether engine and trainer agree."""
        return (self.gap_max < self.limit or self.gap_max == 0) and self.are_weights_unchanged


async def measure_drift(
    recipe: Recipe, *, steps: int = 3, deadline_s: float = 600.0
) -> tuple[PolicyDrift, ...]:
    """Runs `steps` steps of every trained policy with lr=0, and keeps nothing.

    Raises: ConfigError if a backend does not report the gap; DeadlineError; the error of a part that fails.
    """
    short = _with_lr_0(recipe, steps)
    checked = check_recipe(short)
    short = checked.recipe
    probes = {
        name: _Probe(
            name, make_learner(policy.train, model_dir=policy.model_dir, seed=short.seed, exact=short.exact)
        )
        for name, policy in short.trained.items()
    }
    with tempfile.TemporaryDirectory(prefix="astraflow-drift-") as folder:
        try:
            async with asyncio.timeout(deadline_s):
                await run_in_process(
                    short, checked.sources, probes, folder=Path(folder), stop=asyncio.Event()
                )
        except TimeoutError as err:
            done = ", ".join(f"{name}: {len(probe.results)}" for name, probe in probes.items())
            raise DeadlineError(
                f"{steps} steps took longer than {deadline_s:.0f} s (done: {done}); lower "
                "policies.*.sampling.max_tokens for this check, or run it on a faster machine"
            ) from err
    return tuple(_drift(name, probe, _limit(short, short.policies[name])) for name, probe in probes.items())


def drift_finding(drift: PolicyDrift) -> Finding:
    """Returns the measurement as a line of the doctor's report."""
    check = f"drift of {drift.policy}"
    text = (
        f"max {drift.gap_max:.2g}, mean {drift.gap_mean:.2g} nats between engine and trainer over "
        f"{drift.num_tokens:,} tokens of {drift.steps} steps with lr=0 (limit {drift.limit:g})"
    )
    if not drift.are_weights_unchanged:
        return Finding(
            "fail", check, text, "the backend changes weights although lr is 0: correct this first"
        )
    if not drift.is_ok:
        remedy = "engine and trainer disagree: compare their dtype, temperature, attention and loaded weights"
        return Finding("fail", check, text, remedy)
    return Finding("ok", check, text)


def _with_lr_0(recipe: Recipe, steps: int) -> Recipe:
    """Returns the recipe for `steps` steps without learning.

    The backend that computes for the user's own training loop replaces the loop.
    """
    policies = dict(recipe.policies)
    for name, policy in policies.items():
        backend = policy.train.backend
        if isinstance(backend, BackendVariant):
            backend = backend.computes_with or backend
        train = policy.train.model_copy(update={"lr": 0.0, "steps": steps, "backend": backend})
        policies[name] = policy.model_copy(update={"train": train})
    return recipe.model_copy(update={"policies": policies, "eval": recipe.eval.without_sets})


class _Probe:
    """Wraps a learner and keeps what each of its steps reports. Implements `Learner`."""

    def __init__(self, policy: str, learner: Learner) -> None:
        self._policy = policy
        self._learner = learner
        self.results: list[dict[str, float]] = []
        self.num_tokens = 0
        self.digests = {_digest(tuple(learner.export()))}

    def train_step(self, batch: Batch) -> StepResult:
        result = self._learner.train_step(batch)
        self.num_tokens += batch.totals.num_trained_tokens
        self.results.append({item.name: item.value for item in result.metrics})
        return result

    def export(self) -> Sequence[HostTensor]:
        tensors = tuple(self._learner.export())
        self.digests.add(_digest(tensors))
        return tensors

    def save(self, folder: Path) -> Write | None:
        return self._learner.save(folder)

    def load(self, folder: Path) -> None:
        self._learner.load(folder)


def _drift(name: str, probe: _Probe, limit: float) -> PolicyDrift:
    if any({"behavior_gap", "behavior_gap_max"} - result.keys() for result in probe.results):
        raise ConfigError(
            f"policies.{name}.train.backend reports no behavior_gap or no behavior_gap_max, so its drift is "
            "unknown"
        )
    return PolicyDrift(
        policy=name,
        steps=len(probe.results),
        num_tokens=probe.num_tokens,
        gap_mean=sum(result["behavior_gap"] for result in probe.results) / max(1, len(probe.results)),
        gap_max=max((result["behavior_gap_max"] for result in probe.results), default=0.0),
        limit=limit,
        are_weights_unchanged=len(probe.digests) == 1,
    )


def _limit(recipe: Recipe, policy: PolicyConfig) -> float:
    """Returns the limit of the gap, which allows for rounding if both sides compute in bfloat16.

    The user's own components must meet the strict limit.
    """
    if recipe.exact:
        return 0.0
    parts = (recipe.rollout.engine, policy.train.backend)
    # Every engine that computes with a dtype has it as a field, but the allowed values differ.
    dtypes = {p.model_dump()["dtype"] for p in parts if isinstance(p, ModelEngineConfig | TorchBackendConfig)}
    return _LIMIT_BF16 if dtypes == {"bfloat16"} else LIMIT


def _digest(tensors: Sequence[HostTensor]) -> str:
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(tensor.data.data)
    return digest.hexdigest()
