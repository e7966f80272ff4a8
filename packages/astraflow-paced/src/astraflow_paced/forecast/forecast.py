"""Forecasts the throughput, staleness, waits and cost of a pool of rollout services, without running it.

The dataflow's core makes the same decisions as in a run (draws, tickets, leases, samplers, staleness,
batches, versions). Time is virtual, services are emulated devices, and trainers and publications take the
seconds that `forecast_inputs` gives. The core's own `plan` is unrelated: it says what a recipe means for the
core.

Evaluations, curators, failures, and services that start, join or leave are not simulated. The measured share
of the complete groups is filtered at random. The forecast assumes that each service has all the resources
that it needs. In reality, two services that share two cores are slower.
"""

import heapq
import itertools
import math
import random
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from astraflow.algorithms.credit import GroupRelativeCredit
from astraflow.algorithms.filters import ZeroVarianceFilter
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import (
    AddWorker,
    AttachTrainer,
    BatchView,
    Command,
    CommitStep,
    EpisodeFacts,
    IssueLeases,
    LeaseView,
    PayloadRef,
    PublishVersion,
    RecordResult,
    TakeBatch,
    TrajectoryMeta,
)
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import EvalPlan, PolicyPlan, RunPlan
from astraflow.errors import ConfigError
from astraflow.recipe.cluster_config import ClusterConfig
from astraflow.recipe.recipe import Recipe
from astraflow.rollout.config import EngineConfig
from astraflow.rollout.engine_config import ModelEngineConfig
from astraflow.types import Item, Manifest, ServedVersions
from astraflow.types.wait_words import wait_line
from astraflow.user_input.mistakes import format_value
from astraflow_paced.emulated_device import PacedDevice, PacedJob
from astraflow_paced.forecast.forecast_inputs import EpisodeShape, ForecastInputs, TrainerSpeed

__all__ = ["Forecast", "ForecastPool", "PolicyForecast", "forecast", "parse_pool", "slots_of"]

_SMALL_WAIT_FRAC = 0.05
"""Smaller waits are normal variation between steps, as in the dataflow's advice."""
_NEVER = 10**6
"""More steps, tasks and attempts than any forecast needs."""

_MAX_SERVICES = 10_000
"""Limit of a recipe. A forecast of this many services takes minutes."""
_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class ForecastPool:
    """A pool of services to forecast. Example: `ForecastPool("4", speeds=(1.0,) * 4, cost=4.0)`."""

    text: str
    """The text that describes it: `4`, or `spot=6,on_demand=2`."""
    speeds: tuple[float, ...]
    """Speed of each service."""
    cost: float
    """Cost of all services per hour."""


def parse_pool(text: str, cluster: ClusterConfig) -> ForecastPool:
    """Reads a pool from text: a number of services, or `KIND=NUMBER,...` with kinds of `cluster.pool.kinds`.

    Raises: ConfigError.
    """
    kinds = cluster.pool.kinds
    speeds: list[float] = []
    cost = 0.0
    for part in text.split(","):
        name, has_kind, number = part.strip().rpartition("=")
        is_number = number.strip().isdecimal() and len(number) <= _MAX_DIGITS
        if not is_number or not 0 < int(number) <= _MAX_SERVICES - len(speeds) or (has_kind and not name):
            raise ConfigError(
                f"pool {format_value(text)}: {format_value(part.strip())} is not a number of services, or "
                f"the total exceeds {_MAX_SERVICES:,}; write `4`, or `KIND=NUMBER` with kinds of "
                "cluster.pool.kinds, e.g. `spot=6,on_demand=2`"
            )
        if has_kind and name not in kinds:
            known = ", ".join(kinds) or "none"
            raise ConfigError(
                f"pool {format_value(text)}: {format_value(name)} is not in cluster.pool.kinds "
                f"(there: {known})"
            )
        speeds += [kinds[name].speed if has_kind else 1.0] * int(number)
        cost += int(number) * (kinds[name].cost if has_kind else 1.0)
    return ForecastPool(text, tuple(speeds), cost)


class PolicyForecast(Item, frozen=True, kw_only=True):
    """The forecast for one trained policy."""

    name: str
    steps_per_s: float
    tokens_per_s: float
    """Trained tokens."""
    staleness_mean: float
    staleness_max: int
    trainer_wait_frac: float
    """Share of the time in which the trainer has no batch."""


class Forecast(Item, frozen=True, kw_only=True):
    """The forecast for a pool."""

    pool: str
    services: int
    tokens_per_s: float
    """Trained tokens of all policies."""
    rollout_wait_frac: float
    """Share of episode slots that are empty because no group may begin."""
    cost_per_hour: float
    """In the unit of the kinds' costs; a service without a kind costs 1."""
    cost_per_million: float
    """Cost of a million trained tokens."""
    bottleneck: str
    """What limits the throughput, in words."""
    policies: tuple[PolicyForecast, ...]


def forecast(
    recipe: Recipe,
    inputs: ForecastInputs,
    shapes: Sequence[EpisodeShape],
    pool: ForecastPool,
    *,
    steps: int = 30,
    trainer_cost: float = 1.0,
) -> Forecast:
    """Forecasts a pool over `steps` steps of each policy, after the first steps, in which the run settles.

    Raises: ConfigError if `inputs` name an unknown policy, or the run cannot continue.
    """
    if unknown := inputs.trainers.keys() - recipe.trained.keys():
        raise ConfigError(
            f"trainers.{min(unknown)}: the recipe does not train this policy (it trains: "
            f"{', '.join(recipe.trained)})"
        )
    run = _SimulatedRun(recipe, inputs, shapes, pool)
    run.advance(max(p.table.max_staleness for p in recipe.trained.values()) + 2)
    run.begin_to_measure()
    run.advance(steps)
    return _summarize(run, pool, trainer_cost)


def _summarize(run: "_SimulatedRun", pool: ForecastPool, trainer_cost: float) -> Forecast:
    passed_s = run.measured_s
    policies = tuple(
        PolicyForecast(
            name=trainer.policy,
            steps_per_s=trainer.num_steps / passed_s,
            tokens_per_s=trainer.num_tokens / passed_s,
            staleness_mean=trainer.staleness_sum / max(1, trainer.num_taken),
            staleness_max=trainer.staleness_max,
            trainer_wait_frac=min(1.0, trainer.waited_s / passed_s),
        )
        for trainer in run.trainers
    )
    tokens_per_s = sum(policy.tokens_per_s for policy in policies)
    cost = pool.cost + trainer_cost * len(policies)
    empty = run.empty_s / (passed_s * run.num_places)
    return Forecast(
        pool=pool.text,
        services=len(pool.speeds),
        tokens_per_s=tokens_per_s,
        rollout_wait_frac=empty,
        cost_per_hour=cost,
        cost_per_million=cost / 3600 / max(tokens_per_s, 1e-9) * 1e6,
        bottleneck=_bottleneck(policies, empty, len(pool.speeds)),
        policies=policies,
    )


def _bottleneck(policies: Sequence[PolicyForecast], empty: float, num_services: int) -> str:
    longest = max(policies, key=lambda policy: policy.trainer_wait_frac)
    busiest = min(policies, key=lambda policy: policy.trainer_wait_frac)
    waited = longest.trainer_wait_frac
    if waited >= _SMALL_WAIT_FRAC and empty >= _SMALL_WAIT_FRAC:
        return "the staleness bound: both sides wait in turns; a larger max_staleness lets them overlap"
    if waited >= _SMALL_WAIT_FRAC:
        wanted = math.ceil(num_services / max(1 - waited, 1e-3))
        return f"rollout services: about {wanted} would keep the trainer of {longest.name} busy"
    if empty >= _SMALL_WAIT_FRAC:
        enough = max(1, math.ceil(num_services * (1 - empty)))
        return f"the trainer of {busiest.name}: about {enough} rollout services are enough"
    return "none: both sides are busy"


# --- the run --------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Service:
    """A simulated rollout service."""

    id: str
    device: PacedDevice
    num_places: int
    served: dict[str, int]
    """Policy -> version that the service serves."""
    num_running: int = 0

    @property
    def room(self) -> int:
        return self.num_places - self.num_running


@dataclass(eq=False)
class _Episode:
    """A running episode."""

    lease: LeaseView
    service: _Service
    shape: EpisodeShape
    began_s: float
    num_done: int = 0
    """Number of completions that have ended."""
    versions: dict[str, int] = field(default_factory=dict[str, int])
    """Policy -> version at its first completion."""


@dataclass(eq=False)
class _Trainer:
    """A trainer, which trains a batch while the previous version is being published."""

    policy: str
    speed: TrainerSpeed
    epoch: int = 0
    step: int = 0
    """Number of steps that have their batch."""
    num_committed: int = 0
    free_since_s: float | None = 0.0
    """Since when the trainer has been free to take a batch; None if it isn't free."""
    is_publishing: bool = False
    trained: bool = False
    """Whether it has trained a step whose weights wait for the end of the previous publication."""
    num_steps: int = 0
    num_tokens: int = 0
    num_taken: int = 0
    waited_s: float = 0.0
    staleness_sum: float = 0.0
    staleness_max: int = 0


class _SimulatedRun:
    """A run in virtual time. Example: `run.advance(5)`; `run.begin_to_measure()`; `run.advance(30)`."""

    def __init__(
        self, recipe: Recipe, inputs: ForecastInputs, shapes: Sequence[EpisodeShape], pool: ForecastPool
    ) -> None:
        self._shapes = shapes
        self._speed = inputs.service
        self._seed = recipe.seed
        self._now_s = 0.0
        self._began_s = 0.0
        self._events: list[tuple[float, int, partial[None]]] = []
        self._order = itertools.count()
        self._woken: set[str] = set()
        """Topics of the core about which there may be something new: leases, or the batch of a policy."""
        self._ended: deque[_Episode] = deque()
        """Episodes whose completion has just ended."""
        self._turn = 0
        self._tokens: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
        """Policy -> (group, episode) -> number of tokens."""
        self.empty_s = 0.0
        """Seconds for which episode slots were empty, summed over all slots."""
        trainers = {name: inputs.trainers.get(name, TrainerSpeed()) for name in recipe.trained}
        self._filtered = {name: speed.filtered_frac for name, speed in trainers.items()}
        self._core = Core(_plan(recipe, self._filtered))
        self._services = [self._add_service(recipe, idx, speed) for idx, speed in enumerate(pool.speeds)]
        self.num_places = sum(service.num_places for service in self._services)
        self.trainers = [_Trainer(name, speed) for name, speed in trainers.items()]
        for trainer in self.trainers:
            attach = AttachTrainer(policy=trainer.policy, trainer_id=trainer.policy, durable_step=0)
            trainer.epoch = self._apply(attach).epoch
            self._publish(trainer, 0)
        self._lease()

    @property
    def measured_s(self) -> float:
        """Virtual time since `begin_to_measure`."""
        return self._now_s - self._began_s

    def begin_to_measure(self) -> None:
        """Resets all figures, so that they count from now on."""
        self._began_s = self._now_s
        self.empty_s = 0.0
        for trainer in self.trainers:
            trainer.num_steps = trainer.num_tokens = trainer.num_taken = trainer.staleness_max = 0
            trainer.waited_s = trainer.staleness_sum = 0.0
            if trainer.free_since_s is not None:
                trainer.free_since_s = self._now_s

    def advance(self, steps: int) -> None:
        """Simulates until every policy has committed `steps` more steps.

        Raises: ConfigError if the run cannot continue.
        """
        goal = min(trainer.num_committed for trainer in self.trainers) + steps
        while min(trainer.num_committed for trainer in self.trainers) < goal:
            due_s = min(service.device.due_s for service in self._services)
            if self._events:
                due_s = min(due_s, self._events[0][0])
            if math.isinf(due_s) or self._core.state != "running":
                why = self._core.reason or "; ".join(map(wait_line, self._core.waits(self._now_s)))
                raise ConfigError(f"the forecast cannot continue after {self._now_s:.0f} virtual s: {why}")
            self._pass_to(due_s)
            while self._events and self._events[0][0] <= self._now_s:
                heapq.heappop(self._events)[-1]()
            for trainer in self.trainers:
                if f"batch/{trainer.policy}" in self._woken:
                    self._take(trainer)
            if "leases" in self._woken:
                self._lease()
            self._woken.clear()

    def _pass_to(self, due_s: float) -> None:
        passed_s = max(0.0, due_s - self._now_s)
        self.empty_s += passed_s * sum(service.room for service in self._services)
        self._now_s += passed_s
        for service in self._services:
            for job in service.device.advance(self._now_s):
                job.ended()
        while self._ended:
            episode = self._ended.popleft()
            self._after(self._speed.turn_s, partial(self._finish_turn, episode))

    def _apply(self, command: Command) -> Any:
        decision = self._core.apply(command, self._now_s)
        self._woken.update(decision.wakes)
        return decision.answer

    def _after(self, seconds: float, call: "partial[None]") -> None:
        heapq.heappush(self._events, (self._now_s + seconds, next(self._order), call))

    # --- episodes ---

    def _add_service(self, recipe: Recipe, idx: int, speed: float) -> _Service:
        places = recipe.rollout.max_episodes
        places = min(self._speed.slots or places, places)
        device = PacedDevice(
            num_slots=slots_of(recipe.rollout.engine, places),
            tokens_per_s=self._speed.tokens_per_s * speed,
            max_tokens_per_s=self._speed.max_tokens_per_s * speed,
        )
        hosts = tuple(recipe.trained)
        self._apply(AddWorker(worker_id=f"{idx}", name=f"{idx}", hosts=hosts))
        return _Service(f"{idx}", device, places, served=dict.fromkeys(hosts, 0))

    def _lease(self) -> None:
        """Leases the episodes that may run. The services take turns, because their requests interleave."""
        for _ in range(len(self._services)):
            service = self._services[self._turn]
            self._turn = (self._turn + 1) % len(self._services)
            if service.room <= 0:
                continue
            served = tuple(
                ServedVersions(policy=name, versions=(version,)) for name, version in service.served.items()
            )
            request = IssueLeases(worker_id=service.id, num_free=service.room, served=served)
            for lease in self._apply(request):
                self._begin(service, lease)

    def _begin(self, service: _Service, lease: LeaseView) -> None:
        shape = self._shapes[random.Random(lease.seed).randrange(len(self._shapes))]
        episode = _Episode(lease, service, shape, self._now_s)
        service.num_running += 1
        self._after(self._speed.idle_s, partial(self._generate, episode))

    def _generate(self, episode: _Episode) -> None:
        call = episode.shape[episode.num_done]
        episode.versions.setdefault(call.policy, episode.service.served[call.policy])
        job = PacedJob(
            owner="all", num_tokens=call.num_tokens, prefill=0.0, ended=partial(self._ended.append, episode)
        )
        episode.service.device.submit(job)

    def _finish_turn(self, episode: _Episode) -> None:
        episode.num_done += 1
        if episode.num_done < len(episode.shape):
            self._generate(episode)
            return
        lease = episode.lease
        episode.service.num_running -= 1
        self._woken.add("leases")
        metas = tuple(self._meta(episode, name) for name in episode.versions)
        for meta in metas:
            self._tokens[meta.policy][lease.group_id, lease.episode_idx] = meta.num_tokens
        facts = EpisodeFacts(
            trajectories=metas,
            score=metas[0].reward,
            metrics=(),
            duration_s=self._now_s - episode.began_s,
        )
        self._apply(RecordResult(lease_id=lease.id, worker_id=episode.service.id, outcome=facts))

    def _meta(self, episode: _Episode, policy: str) -> TrajectoryMeta:
        """Returns what the core learns about a policy's trajectory.

        All rewards of a group are equal if the group is to be filtered.
        """
        num_tokens = sum(call.num_tokens for call in episode.shape if call.policy == policy)
        coin = random.Random(f"{self._seed}/{episode.lease.group_id}/{policy}").random()
        is_filtered = coin < self._filtered[policy]
        # Alternating rewards have a variance, so that the group passes the filter.
        reward = 0.0 if is_filtered else float(episode.lease.episode_idx % 2)
        return TrajectoryMeta(
            policy=policy,
            role=policy,
            reward=reward,
            num_tokens=num_tokens,
            num_trained_tokens=num_tokens,
            oldest_version=episode.versions[policy],
            newest_version=episode.service.served[policy],
            finish_reason="stop",
            turn_spans=((0, num_tokens),),
            turn_rewards=(reward,),
            num_trained_by_turn=(num_tokens,),
            payload=PayloadRef(segment=0, offset=0, length=0),
        )

    # --- training ---

    def _take(self, trainer: _Trainer) -> None:
        if trainer.free_since_s is None:
            return
        command = TakeBatch(policy=trainer.policy, epoch=trainer.epoch, step=trainer.step)
        view: BatchView | None = self._apply(command)
        if view is None:
            return
        trainer.step += 1
        trainer.waited_s += self._now_s - trainer.free_since_s
        trainer.free_since_s = None
        trainer.num_taken += 1
        trainer.staleness_sum += view.staleness_mean
        trainer.staleness_max = max(trainer.staleness_max, view.staleness_max)
        known = self._tokens[trainer.policy]
        keys = {(sample.group_id, sample.episode_idx) for sample in view.samples}
        num_tokens = sum(known.get(key, 0) for key in keys)
        step_s = trainer.speed.step_s + trainer.speed.million_tokens_s * num_tokens / 1e6
        self._after(step_s, partial(self._finish_step, trainer, num_tokens))

    def _finish_step(self, trainer: _Trainer, num_tokens: int) -> None:
        trainer.num_tokens += num_tokens
        trainer.num_steps += 1
        trainer.trained = True
        self._hand_over(trainer)

    def _hand_over(self, trainer: _Trainer) -> None:
        """Starts the publication of trained weights, once the previous one is done; then asks for a batch."""
        if not trainer.trained or trainer.is_publishing:
            return
        trainer.trained = False
        trainer.is_publishing = True
        trainer.free_since_s = self._now_s
        self._woken.add(f"batch/{trainer.policy}")
        self._after(trainer.speed.publish_s, partial(self._finish_publication, trainer))

    def _finish_publication(self, trainer: _Trainer) -> None:
        step = trainer.num_committed
        self._publish(trainer, step + 1)
        self._apply(
            CommitStep(policy=trainer.policy, epoch=trainer.epoch, step=step, version=step + 1, metrics=())
        )
        trainer.num_committed += 1
        trainer.is_publishing = False
        self._after(self._speed.load_s, partial(self._finish_load, trainer.policy, step + 1))
        self._woken |= {"leases", f"batch/{trainer.policy}"}
        self._hand_over(trainer)

    def _publish(self, trainer: _Trainer, version: int) -> None:
        manifest = Manifest(
            policy=trainer.policy,
            version=version,
            kind="full",
            tensors=(),
            chunks=(),
            digest="0",
            num_bytes=0,
        )
        self._apply(
            PublishVersion(policy=trainer.policy, epoch=trainer.epoch, step=version, manifest=manifest)
        )

    def _finish_load(self, policy: str, version: int) -> None:
        for service in self._services:
            service.served[policy] = version
        self._woken.add("leases")


def _plan(recipe: Recipe, filtered: Mapping[str, float]) -> RunPlan:
    """Returns the plan with the recipe's tables, but without filters and credit that need real rewards.

    Instead, a given share of the groups is filtered.
    """

    def table(name: str, given: TableConfig) -> TableConfig:
        # The rewards of a group with one episode have no variance, so they can't mark it as filtered.
        filters = (ZeroVarianceFilter(),) if filtered[name] and given.group_size > 1 else ()
        changes = {"filters": filters, "shaping": (), "credit": GroupRelativeCredit(), "normalize": "none"}
        return given.model_copy(update=changes)

    return RunPlan(
        seed=recipe.seed,
        group_size=recipe.group_size,
        policies={
            name: PolicyPlan(table=table(name, policy.table), num_steps=_NEVER)
            for name, policy in recipe.trained.items()
        },
        sources={"tasks": _NEVER},
        curators=(),
        eval=EvalPlan(sets={}, every=1, deadline_s=300.0),
        max_attempts=1,
        admission=recipe.dataflow.admission,
    )


def slots_of(engine: EngineConfig, default: int) -> int:
    """The number of requests that an engine runs at the same time; `default` if its config doesn't say."""
    if isinstance(engine, ModelEngineConfig):
        return engine.slots
    return getattr(engine, "num_slots", default)  # the user's own engine may not have this field
