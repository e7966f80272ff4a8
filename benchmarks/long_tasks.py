"""Compares EDF with FIFO if long tasks are the hard ones: speed, accuracy, and durations of dropped groups.

The quickstart's model learns sums of three digits, half of them with carries (which it must learn) and half
without (which it knows). An episode of a sum with carries takes `--factor` times as long.

A run is in one process under a deterministic schedule, so that other load never changes its results. Its
parts are the real ones: the dataflow's core, the torch engine's lane, the torch trainer, and the weights that
pass from one to the other. Time is virtual: an episode takes `exp(N(0, 0.6))` units times its factor, a
training step takes 5 units, 192 episodes run at the same time, and `max_staleness` is 4.

`fifo` drops nothing and waits for the oldest group. `edf` takes complete groups, those with the oldest tokens
first, and drops groups that have become stale. `sweep` takes groups as they complete, like the `fifo` of
AstraFlow's prototype. A sampler that drops
long groups drops hard ones: the table shows how long the dropped and the trained groups were, and how many of
them were hard.

    python benchmarks/long_tasks.py [--seeds 0 1 2] [--steps 100] [--picture FILE]
"""

import argparse
import heapq
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from astraflow import wire
from astraflow.config import parse_config
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import (
    AddWorker,
    BatchView,
    FateDecided,
    IssueLeases,
    LeaseView,
    PayloadRef,
    RecordResult,
    TakeBatch,
)
from astraflow.dataflow.core.plan import EvalPlan, PolicyPlan, RunPlan
from astraflow.dataflow.service.ingest import facts_of
from astraflow.models.loading import export_tensors, fit_tensors, load_causal_lm
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.jobs import Job, Outcome
from astraflow.rollout.engines.lanes import Lanes
from astraflow.rollout.renderer import load_renderer
from astraflow.tasks.answers import extract_answer
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.config import TrainConfig
from astraflow.types import (
    AdvantageSpan,
    Batch,
    Episode,
    Generation,
    Message,
    Sample,
    Sampling,
    ServedVersions,
    Trajectory,
    Turn,
    VersionSpan,
)
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.user_input.splits import is_heldout
from harness import report, show_table
from plots import use_style
from virtual_core import VirtualCore

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "recipes" / "models" / "quickstart.yaml"
SAMPLERS = ("fifo", "edf", "sweep")
POLICY = "actor"
NUM_TASKS = 2000
"""Number of tasks of each kind. The easy ones come first."""
NUM_HELDOUT = 512
HELDOUT_FRAC = 0.1
NUM_EVALS = 4
SIGMA = 0.6
RESOLUTION_S = 0.125
"""Durations are rounded up to multiples of this."""
NUM_SLOTS = 192
STEP_S = 5.0
MAX_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum and its result."""

    prompt: str
    answer: str


def sums(num: int, *, carries: bool, seed: int, split: str = "train") -> list[Problem]:
    """Makes `num` different sums of two numbers of three digits. Prompts of the split `heldout` never occur
    in `train`."""
    rng = random.Random(f"{seed}/3/{carries}/{split}")
    problems = dict[str, Problem]()
    while len(problems) < num:
        a, b = (rng.randrange(100, 1000) for _ in range(2))
        has_carry = any(int(x) + int(y) > 9 for x, y in zip(str(a), str(b), strict=True))
        prompt = f"Calculate {a} + {b}."
        if has_carry == carries and is_heldout(prompt, frac=HELDOUT_FRAC) == (split == "heldout"):
            problems[prompt] = Problem(prompt, str(a + b))
    return list(problems.values())


# --- one run --------------------------------------------------------------------------------------


class Run:
    """One run. Example: `run = Run("edf", model, seed=0, steps=100, factor=6.0); run.play()`."""

    def __init__(self, sampler: str, model_dir: Path, *, seed: int, steps: int, factor: float) -> None:
        torch.set_num_threads(1)
        self._seed = seed
        self._steps = steps
        self._factor = factor
        easy, hard = (sums(NUM_TASKS, carries=carries, seed=seed) for carries in (False, True))
        self._problems = [*easy, *hard]
        self._heldout = sums(NUM_HELDOUT, carries=True, seed=0, split="heldout")
        table = {"groups_per_batch": 8, "max_staleness": 4, "engine_lag": 0, "sampler": {"name": sampler}}
        train = {
            "steps": steps,
            "lr": 3e-4,
            "loss": {"name": "m2po"},
            "optimizer": {"warmup_steps": 10, "max_grad_norm": 0.5},
        }
        parsed = parse_config(table, TableConfig, where="table")
        plan = RunPlan(
            seed=seed,
            group_size=parsed.group_size,
            policies={POLICY: PolicyPlan(table=parsed, num_steps=steps)},
            sources={"sums": len(self._problems)},
            curators=(),
            eval=EvalPlan(sets={}, every=1, deadline_s=300.0),
            max_attempts=1,
        )
        self._clock = VirtualCore(plan)
        self._clock.apply(AddWorker(worker_id="w", name="w", hosts=(POLICY,)))
        self._epoch = self._clock.attach(POLICY).epoch
        self._clock.publish(POLICY, self._epoch, 0, 0)
        config = parse_config(train, TrainConfig, where="train")
        self._learner = make_learner(config, model_dir=model_dir, seed=seed)
        base = WeightSnapshot(POLICY, 0, export_tensors(load_causal_lm(model_dir)), model_dir)
        lanes = Lanes(TorchEngineConfig(num_slots=512, max_context=48), base)
        self._model = lanes.live.model
        self._lane = lanes.live.lane
        self._renderer = load_renderer(model_dir)
        self._payloads: list[Trajectory] = []
        self._version = 0
        self.end_s = 0.0
        """Virtual time of the whole run."""
        self.staleness_max = 0
        self.accuracies: list[float] = []
        """Accuracy of each evaluation."""
        self.durations_s: dict[int, float] = {}
        """Group -> virtual time of its longest episode."""
        self.hard_groups: set[int] = set()
        self.stale_groups: list[int] = []
        """Groups that were dropped because they had become stale."""
        self.trained_groups: list[int] = []

    def play(self) -> None:
        """Makes the whole run."""
        due: list[tuple[float, int, int, LeaseView]] = []
        running = dict[str, LeaseView]()
        done = dict[str, Episode]()
        busy_until_s = math.inf
        self._evaluate()
        while True:
            while due and due[0][0] <= self._clock.now_s:
                lease = heapq.heappop(due)[-1]
                if lease.id not in done:
                    self._generate(running, done)
                self._record(lease, done.pop(lease.id))
            if busy_until_s <= self._clock.now_s:
                self._generate(running, done)  # the rest of what the previous version had to generate
                self._finish_step()
                busy_until_s = math.inf
                if self._version == self._steps:
                    break
            if busy_until_s == math.inf and (view := self._take()):
                busy_until_s = self._clock.now_s + STEP_S
                self._train(view)
            for lease in self._lease(NUM_SLOTS - len(due)):
                running[lease.id] = lease
                until_s = self._clock.now_s + self._duration_s(lease)
                heapq.heappush(due, (until_s, lease.group_id, lease.episode_idx, lease))
            self._clock.now_s = min(busy_until_s, due[0][0] if due else math.inf)
        self.end_s = self._clock.now_s

    def _lease(self, num_free: int) -> tuple[LeaseView, ...]:
        if num_free == 0:
            return ()
        served = (ServedVersions(policy=POLICY, versions=(self._version,)),)
        return self._clock.apply(IssueLeases(worker_id="w", num_free=num_free, served=served))

    def _duration_s(self, lease: LeaseView) -> float:
        """Returns the duration of a lease's episode, which is the same for every sampler."""
        duration_s = math.exp(random.Random(f"{self._seed}/{lease.id}").gauss(0.0, SIGMA))
        if lease.task_idx >= NUM_TASKS:
            self.hard_groups.add(lease.group_id)
            duration_s *= self._factor
        duration_s = math.ceil(duration_s / RESOLUTION_S) * RESOLUTION_S
        self.durations_s[lease.group_id] = max(duration_s, self.durations_s.get(lease.group_id, 0.0))
        return duration_s

    # --- what the services do ---------------------------------------------------------------------

    def _generate(self, running: dict[str, LeaseView], done: dict[str, Episode]) -> None:
        """Generates everything that runs and has not been generated yet, with the version it began with."""
        problems = [self._problems[lease.task_idx] for lease in running.values()]
        generations = self._sample(problems, [lease.seed for lease in running.values()])
        done.update(zip(running, map(self._episode, problems, generations), strict=True))
        running.clear()

    def _sample(self, problems: Sequence[Problem], seeds: Sequence[int]) -> list[Generation]:
        outcomes: dict[int, Outcome] = {}
        for idx, (problem, seed) in enumerate(zip(problems, seeds, strict=True)):
            job = Job(
                prompt=self._prompt(problem),
                sampling=Sampling(max_tokens=MAX_TOKENS, seed=seed),
                max_new=MAX_TOKENS,
                stop=None,
                resolve=lambda outcome, idx=idx: outcomes.__setitem__(idx, outcome),
            )
            self._lane.submit(job)
        with torch.inference_mode():
            while self._lane.has_work:
                self._lane.step()
        generations = [each for _, each in sorted(outcomes.items()) if isinstance(each, Generation)]
        assert len(generations) == len(problems), outcomes
        return generations

    def _prompt(self, problem: Problem) -> tuple[int, ...]:
        return self._renderer.render((Message(role="user", content=problem.prompt),))

    def _score(self, problem: Problem, generation: Generation) -> float:
        text = self._renderer.parse(generation.token_ids).content
        return float(extract_answer(text, mode="after_equals") == problem.answer)

    def _episode(self, problem: Problem, generation: Generation) -> Episode:
        prompt = self._prompt(problem)
        score = self._score(problem, generation)
        num = len(generation.token_ids)
        start = len(prompt)
        trajectory = Trajectory(
            policy=POLICY,
            role=POLICY,
            token_ids=wire.column([*prompt, *generation.token_ids], "int32"),
            mask=bytes(start) + b"\x01" * num,
            behavior_logprobs=wire.column([0.0] * start + list(generation.logprobs), "float32"),
            versions=(VersionSpan(start, num, self._version),),
            temperature=1.0,
            finish_reason=generation.finish_reason,
            turns=(Turn(start=start, end=start + num, reward=score),),
            reward=score,
        )
        return Episode(trajectories=(trajectory,), score=score)

    def _record(self, lease: LeaseView, episode: Episode) -> None:
        self._payloads.append(episode.trajectories[0])
        payload = PayloadRef(segment=0, offset=len(self._payloads) - 1, length=0)
        facts = facts_of(episode, {POLICY}, lambda _: payload)
        self._clock.apply(RecordResult(lease_id=lease.id, worker_id="w", outcome=facts))

    def _take(self) -> BatchView | None:
        command = TakeBatch(policy=POLICY, epoch=self._epoch, step=self._version)
        decision = self._clock.core.apply(command, self._clock.now_s)
        fates = [event for event in decision.events if isinstance(event, FateDecided)]
        self.stale_groups += [event.group_id for event in fates if event.fate == "stale"]
        return decision.answer

    def _train(self, view: BatchView) -> None:
        self.staleness_max = max(self.staleness_max, view.staleness_max)
        self.trained_groups += dict.fromkeys(s.group_id for s in view.samples)
        samples = tuple(
            Sample(
                group_id=s.group_id,
                episode_idx=s.episode_idx,
                task_id=s.task_id,
                trajectory=self._payloads[s.payload.offset],
                advantages=tuple(AdvantageSpan(*span) for span in s.advantages),
            )
            for s in view.samples
        )
        batch = Batch(
            policy=POLICY,
            step=view.step,
            rank=0,
            world=1,
            samples=samples,
            totals=view.totals,
            trainer_version=view.trainer_version,
            staleness_mean=view.staleness_mean,
            staleness_max=view.staleness_max,
        )
        self._learner.train_step(batch)

    def _finish_step(self) -> None:
        """Commits the step, and installs its version in the engine."""
        self._clock.commit(POLICY, self._epoch, self._version, self._version + 1)
        self._version += 1
        self._lane.replace(fit_tensors(self._model, self._learner.export()), self._version)
        if self._version % max(1, self._steps // NUM_EVALS) == 0 or self._version == self._steps:
            self._evaluate()

    def _evaluate(self) -> None:
        first_seed = self._version * NUM_HELDOUT
        generations = self._sample(self._heldout, range(first_seed, first_seed + NUM_HELDOUT))
        self.accuracies.append(statistics.fmean(map(self._score, self._heldout, generations)))


# --- all runs -------------------------------------------------------------------------------------


def lengths(runs: Sequence[Run], *, is_trained: bool) -> list[float]:
    """Returns the durations of the trained groups, or of the dropped groups."""
    return [
        run.durations_s[group]
        for run in runs
        for group in (run.trained_groups if is_trained else run.stale_groups)
    ]


def hard_frac(runs: Sequence[Run], *, is_trained: bool) -> float:
    """Returns the share of hard problems among the trained groups, or among the dropped groups."""
    return mean(
        [
            float(group in run.hard_groups)
            for run in runs
            for group in (run.trained_groups if is_trained else run.stale_groups)
        ]
    )


def mean(values: Sequence[float]) -> float:
    """Returns the mean, or nan if there are no values."""
    return statistics.fmean(values) if values else float("nan")


def draw(found: Mapping[str, Sequence[Run]], image: Path) -> None:
    """Plots how long trained and dropped groups were, with a panel per sampler."""
    use_style()
    figure, panels = plt.subplots(1, len(found), figsize=(9, 3), sharey=True)
    top = max(max(lengths(runs, is_trained=True)) for runs in found.values())
    bins = np.geomspace(0.1, top * 1.1, 30)
    for axes, (sampler, runs) in zip(panels, found.items(), strict=True):
        axes.hist(lengths(runs, is_trained=True), bins=bins, alpha=0.6, label="trained")
        axes.hist(lengths(runs, is_trained=False), bins=bins, alpha=0.8, label="dropped")
        axes.set(xscale="log", title=sampler, xlabel="longest episode (units)")
    panels[0].set_ylabel("groups")
    panels[-1].legend()
    figure.tight_layout()
    figure.savefig(image)
    plt.close(figure)


def main(given: argparse.Namespace, model: Path) -> None:
    """Runs all samplers with all seeds."""
    found: dict[str, list[Run]] = {sampler: [] for sampler in SAMPLERS}
    for seed in given.seeds:
        for sampler in SAMPLERS:
            print(f"+ {sampler}, seed {seed}", file=sys.stderr, flush=True)
            run = Run(sampler, model, seed=seed, steps=given.steps, factor=given.factor)
            run.play()
            found[sampler].append(run)
    rows: list[tuple[object, ...]] = []
    figures: dict[str, object] = {"num_seeds": len(given.seeds), "factor": given.factor}
    for sampler, runs in found.items():
        num_stale = sum(len(run.stale_groups) for run in runs)
        num_trained = sum(len(run.trained_groups) for run in runs)
        values = {
            "virtual_s": mean([run.end_s for run in runs]),
            "hard_accuracy": mean([mean(run.accuracies[-2:]) for run in runs]),
            "dropped_frac": num_stale / (num_stale + num_trained),
            "trained_length": mean(lengths(runs, is_trained=True)),
            "dropped_length": mean(lengths(runs, is_trained=False)),
            "trained_hard_frac": hard_frac(runs, is_trained=True),
            "dropped_hard_frac": hard_frac(runs, is_trained=False),
        }
        rows.append((sampler, *values.values(), max(run.staleness_max for run in runs)))
        figures |= {f"{sampler}_{name}": None if v != v else v for name, v in values.items()}
    header = (
        "sampler", "units", "hard accuracy", "dropped", "length trained", "dropped", "hard trained",
        "dropped", "staleness max",
    )  # fmt: skip
    show_table(
        f"{given.steps} steps, hard tasks take {given.factor:g} times as long, VIRTUAL time", header, rows
    )
    if given.picture is not None:
        draw(found, given.picture)
    walls = {sampler: mean([run.end_s for run in runs]) for sampler, runs in found.items()}
    report({**figures, "edf_speedup_vs_fifo": walls["fifo"] / walls["edf"]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--factor", type=float, default=6.0, help="time of a hard task, in easy ones")
    parser.add_argument("--picture", type=Path)
    with tempfile.TemporaryDirectory(prefix="astraflow-long-") as scratch:
        folder = ROOT / "models" / "quickstart"
        options = parser.parse_args()
        if not folder.is_dir():
            folder = Path(scratch) / "model"
            command = [sys.executable, "-m", "astraflow.cli.main", "model", "init", str(SPEC)]
            subprocess.run([*command, "--out", str(folder)], check=True, stdout=sys.stderr)
        main(options, folder)
