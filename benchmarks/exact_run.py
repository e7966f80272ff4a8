"""Makes a run in one process under a deterministic schedule, so that other load never changes its results.

The parts are the real ones: the dataflow's core (curators, tickets, filters, credit, samplers, replay), the
torch engine's lane, the torch trainer, and the weights that pass from one to the other. The run leaves out
what would make its course depend on the machine: processes, HTTP, the journal, and the clock. Time is
virtual: an episode and a training step take as long as the `Pace` says, no matter how long the machine takes.

Without a pace, rollout is as fast as possible: everything that has a ticket is rolled out before the next
batch is taken. With `fifo` and no filters, every batch is then exactly `max_staleness` versions old, after
the first `max_staleness` versions.
"""

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from astraflow import wire
from astraflow.algorithms.curation import CuratorConfig
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import (
    AddWorker,
    AttachTrainer,
    BatchView,
    CommitStep,
    FateDecided,
    IssueLeases,
    LeaseView,
    PayloadRef,
    PublishVersion,
    RecordResult,
    TakeBatch,
)
from astraflow.dataflow.core.core import Core
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
    FateCounts,
    Generation,
    Manifest,
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

__all__ = ["ExactRun", "Pace", "Point", "Problem", "Setting", "sums"]

_POLICY = "actor"
_HELDOUT_FRAC = 0.1
_MAX_TOKENS = 20
_MAX_CONTEXT = 48
_NUM_SLOTS = 512


@dataclass(frozen=True, slots=True)
class Problem:
    """A sum and its result."""

    prompt: str
    answer: str


def sums(
    num: int, *, digits: int, seed: int, carries: bool | None = None, split: str = "train"
) -> list[Problem]:
    """Makes `num` different sums of two numbers of `digits` digits. `carries`: whether the sums have carries,
    if given.

    Prompts of the split `heldout` never occur in `train`.
    """
    rng = random.Random(f"{seed}/{digits}/{carries}/{split}")
    found = dict[str, Problem]()
    while len(found) < num:
        a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        has_carry = any(int(x) + int(y) > 9 for x, y in zip(str(a), str(b), strict=True))
        prompt = f"Calculate {a} + {b}."
        if carries in (None, has_carry) and is_heldout(prompt, frac=_HELDOUT_FRAC) == (split == "heldout"):
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
    resolution_s: float = 0.125
    """Durations are rounded up to multiples of this."""

    factors: tuple[float, ...] = ()
    """For each problem, the factor by which the duration of an episode is multiplied; empty: 1."""

    def duration_s(self, lease: LeaseView, seed: int) -> float:
        """Returns the duration of a lease's episode, which is the same for every sampler."""
        drawn = math.exp(random.Random(f"{seed}/{lease.id}").gauss(0.0, self.sigma))
        if self.factors:
            drawn *= self.factors[lease.task_idx]
        return math.ceil(drawn / self.resolution_s) * self.resolution_s


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that determines a run, except for its seed."""

    table: TableConfig
    train: TrainConfig
    problems: tuple[Problem, ...]
    heldout: tuple[Problem, ...]
    curators: tuple[CuratorConfig, ...] = ()
    pace: Pace | None = None
    eval_every: int = 20


@dataclass(slots=True)
class Point:
    """The state of a run after some steps."""

    step: int
    rollouts: int
    accuracy: float


@dataclass
class ExactRun:
    """One run. Example: `ExactRun(setting, model_dir, seed=0).run()`, and then read its fields."""

    setting: Setting
    model_dir: Path
    seed: int
    points: list[Point] = field(default_factory=list[Point])
    metrics: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    """Metrics of each step, as the trainer reports them."""
    staleness: list[float] = field(default_factory=list[float])
    """Mean staleness of each batch."""
    staleness_max: int = 0
    rollouts: int = 0
    """Number of generated episodes."""
    idle_s: float = 0.0
    """Virtual time in which the trainer waited for a batch, since its first one."""
    end_s: float = 0.0
    begin_s: float = 0.0
    durations_s: dict[int, float] = field(default_factory=dict[int, float])
    """Group -> virtual time of its longest episode, with a pace."""
    problem_of: dict[int, int] = field(default_factory=dict[int, int])
    """Group -> its problem, with a pace."""
    stale_groups: list[int] = field(default_factory=list[int])
    """Groups that were dropped because they had become stale."""
    trained_groups: list[int] = field(default_factory=list[int])

    def run(self) -> "ExactRun":
        """Makes the whole run."""
        torch.set_num_threads(1)
        setting = self.setting
        self._core = Core(
            RunPlan(
                seed=self.seed,
                group_size=setting.table.group_size,
                policies={_POLICY: PolicyPlan(table=setting.table, num_steps=setting.train.steps)},
                sources={"sums": len(setting.problems)},
                curators=setting.curators,
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
        self._now_s = 0.0
        self._version = 0
        self._core.apply(AddWorker(worker_id="w", name="w", hosts=(_POLICY,)), 0.0)
        session = self._core.apply(AttachTrainer(policy=_POLICY, trainer_id="t", durable_step=0), 0.0).answer
        self._epoch = session.epoch
        self._publish(0)
        self._evaluate(0)
        (self._unpaced if setting.pace is None else self._paced)()
        return self

    def fates(self) -> FateCounts:
        """Returns the accounting so far."""
        return self._core.policy_status()[0].fates

    def curation(self) -> dict[str, float]:
        """Returns the curators' metrics so far."""
        return {item.name: item.value for item in self._core.curation()}

    # --- schedules --------------------------------------------------------------------------------

    def _unpaced(self) -> None:
        for step in range(self.setting.train.steps):
            while leases := self._lease(_NUM_SLOTS):
                for lease, episode in zip(leases, self._generate(leases), strict=True):
                    self._record(lease, episode)
            view = self._take(step)
            if view is None:
                raise RuntimeError(
                    f"step {step} has no batch though all tickets are used; is the table stuck?"
                )
            self._train(view)
            self._publish(step + 1)
            self._commit(step)

    def _paced(self) -> None:
        pace = self.setting.pace
        step = 0
        assert pace is not None
        due: list[tuple[float, int, int, LeaseView]] = []
        running = dict[str, LeaseView]()
        done = dict[str, Episode]()
        busy_until = math.inf
        waits_since = 0.0
        while True:
            while due and due[0][0] <= self._now_s:
                lease = heapq.heappop(due)[-1]
                if lease.id not in done:
                    self._make(running, done)
                self._record(lease, done.pop(lease.id))
            if busy_until <= self._now_s:
                self._make(running, done)  # the rest of what the previous version had to generate
                self._publish(step + 1)
                self._commit(step)
                step = step + 1
                busy_until = math.inf
                waits_since = self._now_s
                if step == self.setting.train.steps:
                    break
            if busy_until == math.inf and (view := self._take(step)):
                if step == 0:
                    self.begin_s = waits_since = self._now_s
                self.idle_s += self._now_s - waits_since
                busy_until = self._now_s + pace.step_s
                self._train(view)
            for lease in self._lease(pace.num_slots - len(due)):
                running[lease.id] = lease
                duration_s = pace.duration_s(lease, self.seed)
                longest_s = max(duration_s, self.durations_s.get(lease.group_id, 0.0))
                self.durations_s[lease.group_id] = longest_s
                self.problem_of[lease.group_id] = lease.task_idx
                until = self._now_s + duration_s
                heapq.heappush(due, (until, lease.group_id, lease.episode_idx, lease))
            self._now_s = min(busy_until, due[0][0] if due else math.inf)
        self.end_s = self._now_s

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
        return self._core.apply(
            IssueLeases(worker_id="w", num_free=num_free, served=served), self._now_s
        ).answer

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
        self.rollouts += 1
        facts = facts_of(episode, {_POLICY}, lambda _: self._store(episode.trajectories[0]))
        self._core.apply(RecordResult(lease_id=lease.id, worker_id="w", outcome=facts), self._now_s)

    def _store(self, trajectory: Trajectory) -> PayloadRef:
        self._payloads.append(trajectory)
        return PayloadRef(segment=0, offset=len(self._payloads) - 1, length=0)

    def _take(self, step: int) -> BatchView | None:
        command = TakeBatch(policy=_POLICY, epoch=self._epoch, step=step)
        decision = self._core.apply(command, self._now_s)
        self.stale_groups += [
            event.group_id
            for event in decision.events
            if isinstance(event, FateDecided) and event.fate == "stale"
        ]
        return decision.answer

    def _train(self, view: BatchView) -> None:
        self.staleness.append(view.staleness_mean)
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
        result = self._learner.train_step(batch)
        self.metrics.append({item.name: item.value for item in result.metrics})

    def _publish(self, step: int) -> None:
        manifest = Manifest(
            policy=_POLICY, version=step, kind="full", tensors=(), chunks=(), digest="0", num_bytes=0
        )
        command = PublishVersion(policy=_POLICY, epoch=self._epoch, step=step, manifest=manifest)
        self._core.apply(command, self._now_s)
        self._version = step
        if step:
            self._lane.replace(fit_tensors(self._model, self._learner.export()), step)

    def _commit(self, step: int) -> None:
        command = CommitStep(policy=_POLICY, epoch=self._epoch, step=step, version=step + 1, metrics=())
        self._core.apply(command, self._now_s)
        if (step + 1) % self.setting.eval_every == 0 or step + 1 == self.setting.train.steps:
            self._evaluate(step + 1)

    def _evaluate(self, step: int) -> None:
        heldout = self.setting.heldout
        made = self._sample(heldout, [step * len(heldout) + idx for idx in range(len(heldout))])
        scores = [self._score(problem, text) for problem, text in zip(heldout, made, strict=True)]
        self.points.append(Point(step, self.rollouts, sum(scores) / len(scores)))


def _generation(outcome: Outcome) -> Generation:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
