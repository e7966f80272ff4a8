"""Makes a run in one process under a deterministic schedule, so that other load never changes its results.

The parts are the real ones: the dataflow's core (tickets, credit, samplers), the torch engine's lane, the
torch trainer, and the weights that pass from one to the other. The run leaves out what would make its course
depend on the machine: processes, HTTP, the journal, and the clock. Time is virtual: an episode and a training
step take as long as the `Pace` says, no matter how long the machine takes.
"""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from astraflow import wire
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
from astraflow.rollout.engines.lane import Lanes
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
from virtual_core import VirtualCore

__all__ = ["ExactRun", "Pace", "Problem", "Setting", "sums"]

_POLICY = "actor"
_HELDOUT_FRAC = 0.1
_MAX_TOKENS = 20
_MAX_CONTEXT = 48
_NUM_SLOTS = 512
_RESOLUTION_S = 0.125
"""Durations are rounded up to multiples of this."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum and its result."""

    prompt: str
    answer: str


def sums(num: int, *, digits: int, seed: int, carries: bool, split: str = "train") -> list[Problem]:
    """Makes `num` different sums of two numbers of `digits` digits. `carries`: whether the sums have carries.

    Prompts of the split `heldout` never occur in `train`.
    """
    rng = random.Random(f"{seed}/{digits}/{carries}/{split}")
    found = dict[str, Problem]()
    while len(found) < num:
        a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        has_carry = any(int(x) + int(y) > 9 for x, y in zip(str(a), str(b), strict=True))
        prompt = f"Calculate {a} + {b}."
        if carries == has_carry and is_heldout(prompt, frac=_HELDOUT_FRAC) == (split == "heldout"):
            found[prompt] = Problem(prompt, str(a + b))
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take, in units of an episode's median duration."""

    num_slots: int
    """Episodes that run at the same time."""
    step_s: float
    """Duration of a training step."""
    sigma: float
    """Episodes take exp(N(0, sigma)). Larger values give a heavier tail."""
    factors: tuple[float, ...]
    """For each problem, the factor by which the duration of an episode is multiplied."""

    def duration_s(self, lease: LeaseView, seed: int) -> float:
        """Returns the duration of a lease's episode, which is the same for every sampler."""
        drawn = math.exp(random.Random(f"{seed}/{lease.id}").gauss(0.0, self.sigma))
        drawn *= self.factors[lease.task_idx]
        return math.ceil(drawn / _RESOLUTION_S) * _RESOLUTION_S


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that determines a run, except for its seed."""

    table: TableConfig
    train: TrainConfig
    problems: tuple[Problem, ...]
    heldout: tuple[Problem, ...]
    pace: Pace
    eval_every: int


@dataclass
class ExactRun:
    """One run. Example: `ExactRun(setting, model_dir, seed=0).run()`, and then read its fields."""

    setting: Setting
    model_dir: Path
    seed: int
    accuracies: list[float] = field(default_factory=list[float])
    """Accuracy of each evaluation."""
    staleness_max: int = 0
    end_s: float = 0.0
    """Virtual time of the whole run."""
    durations_s: dict[int, float] = field(default_factory=dict[int, float])
    """Group -> virtual time of its longest episode."""
    problem_of: dict[int, int] = field(default_factory=dict[int, int])
    """Group -> its problem."""
    stale_groups: list[int] = field(default_factory=list[int])
    """Groups that were dropped because they had become stale."""
    trained_groups: list[int] = field(default_factory=list[int])

    def run(self) -> "ExactRun":
        """Makes the whole run."""
        torch.set_num_threads(1)
        setting = self.setting
        self._clock = VirtualCore(
            RunPlan(
                seed=self.seed,
                group_size=setting.table.group_size,
                policies={_POLICY: PolicyPlan(table=setting.table, num_steps=setting.train.steps)},
                sources={"sums": len(setting.problems)},
                curators=(),
                eval=EvalPlan(sets={}, every=1, deadline_s=300.0),
                max_attempts=1,
            )
        )
        self._learner = make_learner(setting.train, model_dir=self.model_dir, seed=self.seed)
        base = WeightSnapshot(_POLICY, 0, export_tensors(load_causal_lm(self.model_dir)), self.model_dir)
        lanes = Lanes(TorchEngineConfig(num_slots=_NUM_SLOTS, max_context=_MAX_CONTEXT), base)
        self._model = lanes.live.model
        self._lane = lanes.live.lane
        self._renderer = load_renderer(self.model_dir)
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._payloads: list[Trajectory] = []
        self._version = 0
        self._clock.apply(AddWorker(worker_id="w", name="w", hosts=(_POLICY,)))
        self._epoch = self._clock.attach(_POLICY).epoch
        self._clock.publish(_POLICY, self._epoch, 0, 0)
        self._evaluate(0)
        self._play()
        return self

    def _play(self) -> None:
        pace = self.setting.pace
        step = 0
        due: list[tuple[float, int, int, LeaseView]] = []
        running = dict[str, LeaseView]()
        done = dict[str, Episode]()
        busy_until = math.inf
        while True:
            while due and due[0][0] <= self._clock.now_s:
                lease = heapq.heappop(due)[-1]
                if lease.id not in done:
                    self._make(running, done)
                self._record(lease, done.pop(lease.id))
            if busy_until <= self._clock.now_s:
                self._make(running, done)  # the rest of what the previous version had to generate
                self._publish(step + 1)
                step = step + 1
                busy_until = math.inf
                if step == self.setting.train.steps:
                    break
            if busy_until == math.inf and (view := self._take(step)):
                busy_until = self._clock.now_s + pace.step_s
                self._train(view)
            for lease in self._lease(pace.num_slots - len(due)):
                running[lease.id] = lease
                duration_s = pace.duration_s(lease, self.seed)
                longest_s = max(duration_s, self.durations_s.get(lease.group_id, 0.0))
                self.durations_s[lease.group_id] = longest_s
                self.problem_of[lease.group_id] = lease.task_idx
                until = self._clock.now_s + duration_s
                heapq.heappush(due, (until, lease.group_id, lease.episode_idx, lease))
            self._clock.now_s = min(busy_until, due[0][0] if due else math.inf)
        self.end_s = self._clock.now_s

    def _make(self, running: dict[str, LeaseView], done: dict[str, Episode]) -> None:
        """Generates everything that runs and has not been generated yet, with the version it began with."""
        leases = list(running.values())
        done.update(zip(running, self._generate(leases), strict=True))
        running.clear()

    # --- what the services do ---------------------------------------------------------------------

    def _lease(self, num_free: int) -> tuple[LeaseView, ...]:
        if num_free == 0:
            return ()
        served = (ServedVersions(policy=_POLICY, versions=(self._version,)),)
        return self._clock.apply(IssueLeases(worker_id="w", num_free=num_free, served=served))

    def _generate(self, leases: Sequence[LeaseView]) -> list[Episode]:
        problems = [self.setting.problems[lease.task_idx] for lease in leases]
        made = self._sample(problems, [lease.seed for lease in leases])
        return [self._episode(*item) for item in zip(problems, made, strict=True)]

    def _sample(self, problems: Sequence[Problem], seeds: Sequence[int]) -> list[Generation]:
        made: dict[int, Generation] = {}
        for idx, (problem, seed) in enumerate(zip(problems, seeds, strict=True)):
            self._lane.submit(
                Job(
                    prompt=self._prompt(problem),
                    sampling=Sampling(max_tokens=_MAX_TOKENS, seed=seed),
                    max_new=_MAX_TOKENS,
                    stop=None,
                    resolve=lambda outcome, idx=idx: made.__setitem__(idx, _generation(outcome)),
                )
            )
        with torch.inference_mode():
            while self._lane.has_work:
                self._lane.step()
        return [made[idx] for idx in range(len(problems))]

    def _prompt(self, problem: Problem) -> tuple[int, ...]:
        if problem.prompt not in self._prompts:
            rendered = self._renderer.render((Message(role="user", content=problem.prompt),))
            self._prompts[problem.prompt] = rendered
        return self._prompts[problem.prompt]

    def _score(self, problem: Problem, generation: Generation) -> float:
        text = self._renderer.parse(generation.token_ids).content
        return float(extract_answer(text, mode="after_equals") == problem.answer)

    def _episode(self, problem: Problem, generation: Generation) -> Episode:
        prompt = self._prompt(problem)
        score = self._score(problem, generation)
        num = len(generation.token_ids)
        start = len(prompt)
        trajectory = Trajectory(
            policy=_POLICY,
            role=_POLICY,
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
        facts = facts_of(episode, {_POLICY}, lambda _: self._store(episode.trajectories[0]))
        self._clock.apply(RecordResult(lease_id=lease.id, worker_id="w", outcome=facts))

    def _store(self, trajectory: Trajectory) -> PayloadRef:
        self._payloads.append(trajectory)
        return PayloadRef(segment=0, offset=len(self._payloads) - 1, length=0)

    def _take(self, step: int) -> BatchView | None:
        command = TakeBatch(policy=_POLICY, epoch=self._epoch, step=step)
        decision = self._clock.core.apply(command, self._clock.now_s)
        self.stale_groups += [
            event.group_id
            for event in decision.events
            if isinstance(event, FateDecided) and event.fate == "stale"
        ]
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
            policy=_POLICY,
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

    def _publish(self, step: int) -> None:
        """Commits the step that made a version, and installs the version in the engine."""
        self._clock.commit(_POLICY, self._epoch, step - 1, step)
        self._version = step
        self._lane.replace(fit_tensors(self._model, self._learner.export()), step)
        if step % self.setting.eval_every == 0 or step == self.setting.train.steps:
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        heldout = self.setting.heldout
        made = self._sample(heldout, [step * len(heldout) + idx for idx in range(len(heldout))])
        scores = [self._score(problem, text) for problem, text in zip(heldout, made, strict=True)]
        self.accuracies.append(sum(scores) / len(scores))


def _generation(outcome: Outcome) -> Generation:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
