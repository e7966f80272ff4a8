"""Runs and times one run of either side of a race (`race_table.py`): AstraFlow with all its services, or TRL.

A run has a clock that starts with its first work, the CPU time of its processes between its first and its
last version, the time of the whole command, and the peak of its memory.
"""

import asyncio
import itertools
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file

from astraflow.addons.export.saved_versions import SavedVersions
from astraflow.config import parse_config
from astraflow.dataflow.audit import audit
from astraflow.losses.config import GrpoLossConfig
from astraflow.models.loading import host_tensor
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.run.run import launch
from astraflow.types.host_tensors import WeightSnapshot
from harness import Memory, OthersLoad, tree_cpu_s
from trl_side import StopRule, TrlJob, run_job, weights_file

__all__ = ["Curve", "Row", "Setting", "run"]

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Row:
    """What one row of the table runs."""

    side: Literal["astraflow", "trl"]
    has_equal_loss: bool = False
    """Uses TRL's loss, the clipped surrogate, instead of the recipe's loss."""
    skips: bool = True
    """Whether samples whose gradient is 0 are left out."""
    shares: bool = True
    """Whether the trainer computes identical samples once, and shared prompts. The engine always does."""
    max_staleness: int = 1
    is_tuned: bool = False
    """Runs TRL with prompts sorted by length and a static cache."""
    has_autocast: bool = False
    """Runs TRL with bfloat16 autocast; its weights stay in float32."""
    is_compact: bool = False
    """Lets TRL score only the positions of completions on a CPU too, as it does on a GPU."""
    has_vllm: bool = False
    """Lets TRL generate with vLLM in its own process (`vllm_mode="colocate"`)."""


@dataclass
class Curve:
    """One run: when each version was ready, and the scores of the evaluated ones."""

    row: str
    lr: float
    seed: int
    times_s: list[float]
    """Times at which versions 1, 2, ... were reached."""
    cpu_s: list[float]
    """CPU seconds of the side's processes at these times, since a fixed moment."""
    samples_per_step: int
    command_s: float
    """Seconds of the whole command: start of processes, imports, model, tasks, the run, and its end."""
    peak_mb: float
    """Largest sum of the memory of the side's processes; each shared page counts once."""
    others_load: float
    """Number of cores that other programs used during the run."""
    target: float
    """Held-out score that counts as reached."""
    scores: dict[int, float] = field(default_factory=dict[int, float])
    """Version -> held-out accuracy."""

    @property
    def completions_per_s(self) -> float:
        """Completions generated and committed, divided by the time of the last version."""
        return len(self.times_s) * self.samples_per_step / self.times_s[-1]

    @property
    def cpu_ms(self) -> float:
        """CPU time per completion, from the first version to the last."""
        num = (len(self.cpu_s) - 1) * self.samples_per_step
        return 1e3 * (self.cpu_s[-1] - self.cpu_s[0]) / num if num else math.nan

    def points(self) -> list[tuple[float, float]]:
        """(seconds, accuracy) of each evaluation."""
        return [(self.times_s[v - 1] if v else 0.0, score) for v, score in sorted(self.scores.items())]

    @property
    def reached_s(self) -> float:
        """Seconds until the second of two consecutive evaluations at the target; infinite if there are
        none."""
        points = self.points()
        hits = [b[0] for a, b in itertools.pairwise(points) if min(a[1], b[1]) >= self.target]
        return hits[0] if hits else math.inf


@dataclass(frozen=True)
class Setting:
    """What all rows share."""

    recipe: Recipe
    policy: str
    work: Path
    trl_pythons: Mapping[bool, Path]
    """Whether TRL uses vLLM -> the interpreter of the environment for it."""
    tasks_file: Path
    target: float
    stop: StopRule
    trl_threads: int = 1
    every: int = 1
    """Versions between two evaluations; TRL's side keeps no others."""

    @property
    def config(self) -> PolicyConfig:
        """The trained policy."""
        return self.recipe.policies[self.policy]

    @property
    def surrogate(self) -> GrpoLossConfig:
        """TRL's loss, with the bounds of the recipe's loss if that is `grpo`, otherwise with its defaults."""
        loss = self.config.train.loss
        return loss if isinstance(loss, GrpoLossConfig) else GrpoLossConfig()

    @property
    def samples_per_step(self) -> int:
        """Completions per step."""
        return self.config.table.groups_per_batch * self.config.table.group_size

    def recipe_of(self, row: Row, lr: float, seed: int) -> Recipe:
        """Makes the recipe of one run."""
        mapping = self.recipe.model_dump(mode="json")
        policy = mapping["policies"][self.policy]
        mapping["seed"] = seed
        policy["train"]["lr"] = lr
        policy["table"]["max_staleness"] = row.max_staleness
        policy["train"]["loss"] = self._loss(row)
        if not row.shares:
            policy["train"]["backend"]["share_prefixes"] = False
        return parse_config(mapping, Recipe)

    def _loss(self, row: Row) -> dict[str, Any]:
        loss = self.surrogate if row.has_equal_loss else self.config.train.loss
        fields: dict[str, Any] = loss.model_dump(mode="json")
        if row.skips:
            return fields
        return {"name": "use", "use": f"unskipped:{fields.pop('name')}", "args": fields}


async def run(
    setting: Setting, name: str, row: Row, lr: float, seed: int
) -> tuple[Curve, list[WeightSnapshot]]:
    """Makes one run of a row. Returns its curve and the weights of every `setting.every`-th version."""
    if row.side == "trl":
        return await asyncio.to_thread(_run_trl, setting, name, row, lr, seed)
    return await _run_astraflow(setting, name, row, lr, seed)


# --- AstraFlow --------------------------------------------------------------------------------------


async def _run_astraflow(
    setting: Setting, name: str, row: Row, lr: float, seed: int
) -> tuple[Curve, list[WeightSnapshot]]:
    """Trains with all real services."""
    recipe = setting.recipe_of(row, lr, seed)
    run_dir = setting.work / f"{name.replace(' ', '-')}-{lr:g}-{seed}"
    rewards: list[float] = []
    commits: list[float] = []
    cpu_s: list[float] = []
    load = OthersLoad()
    command_s = _import_s()
    start = time.perf_counter()
    memory = Memory(os.getpid(), counts_root=False)
    async with launch(recipe, run_dir, module_path=(str(ROOT), str(ROOT / "benchmarks"))) as launched:
        async for step in launched.steps(setting.policy):
            rewards.append(step.reward_mean)
            commits.append(step.at_s)
            cpu_s.append(tree_cpu_s())
            if setting.stop.is_over(rewards):
                break
    command_s += time.perf_counter() - start
    memory.close()
    folder = RunFolder(run_dir)
    began_s = audit(folder.journal).first_lease_s
    curve = Curve(
        row=name,
        lr=lr,
        seed=seed,
        times_s=[at_s - began_s for at_s in commits],
        cpu_s=cpu_s,
        samples_per_step=setting.samples_per_step,
        command_s=command_s,
        peak_mb=memory.peak_mb,
        others_load=load.lap(),
        target=setting.target,
    )
    saved = SavedVersions(folder.weights / setting.policy, setting.policy)
    versions = [
        WeightSnapshot(setting.policy, version, saved.read(version).tensors, setting.config.model_dir)
        for version in range(setting.every, len(commits) + 1, setting.every)
    ]
    shutil.rmtree(folder.weights)
    return curve, versions


def _import_s() -> float:
    """Measures how long a command takes to import what this process has already imported."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import astraflow.cli.main, astraflow.run.run"], check=True)
    return time.perf_counter() - start


# --- TRL --------------------------------------------------------------------------------------------


def _run_trl(
    setting: Setting, name: str, row: Row, lr: float, seed: int
) -> tuple[Curve, list[WeightSnapshot]]:
    """Trains in TRL's own environment, in a separate process."""
    out_dir = setting.work / f"{name.replace(' ', '-')}-{lr:g}-{seed}"
    out_dir.mkdir(parents=True)
    config = setting.config
    train = config.train
    if train.denominator != "tokens" or train.optimizer.schedule != "constant":
        sys.exit(
            "TRL's side divides by tokens and keeps the learning rate after the warm-up; the recipe does not"
        )
    job = TrlJob(
        model_dir=str(config.model_dir.resolve()),
        tasks_file=str(setting.tasks_file),
        reward=setting.recipe.tasks.without_curators.model_dump_json(),
        out_dir=str(out_dir),
        stop=setting.stop,
        seed=seed,
        lr=lr,
        warmup_steps=train.optimizer.warmup_steps,
        betas=train.optimizer.betas,
        eps=train.optimizer.eps,
        weight_decay=train.optimizer.weight_decay,
        max_grad_norm=train.optimizer.max_grad_norm,
        group_size=config.table.group_size,
        groups_per_batch=config.table.groups_per_batch,
        minibatches=train.minibatches,
        clip_low=setting.surrogate.clip_low,
        clip_high=setting.surrogate.clip_high,
        max_tokens=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        num_threads=setting.trl_threads,
        is_tuned=row.is_tuned,
        has_autocast=row.has_autocast,
        is_compact=row.is_compact,
        has_vllm=row.has_vllm,
        max_context=setting.recipe.rollout.engine.max_context,
        keep_every=setting.every,
    )
    load = OthersLoad()
    start = time.perf_counter()
    memory = Memory(os.getpid(), counts_root=False)
    result = run_job(setting.trl_pythons[row.has_vllm], job, ROOT / "src")
    memory.close()
    curve = Curve(
        row=name,
        lr=lr,
        seed=seed,
        times_s=result.times_s,
        cpu_s=result.cpu_s,
        samples_per_step=setting.samples_per_step,
        command_s=time.perf_counter() - start,
        peak_mb=memory.peak_mb,
        others_load=load.lap(),
        target=setting.target,
    )
    kept = range(setting.every, len(result.times_s) + 1, setting.every)
    versions = [_trl_weights(setting, out_dir, version) for version in kept]
    shutil.rmtree(out_dir)
    return curve, versions


def _trl_weights(setting: Setting, out_dir: Path, version: int) -> WeightSnapshot:
    tensors = tuple(host_tensor(name, t) for name, t in load_file(weights_file(out_dir, version)).items())
    return WeightSnapshot(setting.policy, version, tensors, setting.config.model_dir)
