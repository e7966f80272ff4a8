"""Simulates a fleet of about a thousand GPUs in several regions under a virtual clock, with failures.

All decisions are those of the dataflow's core: draws, tickets, leases, staleness, batches, and versions. The
time that everything takes is computed: generation at a fixed speed per request, training steps, links, losses
of nodes, and restarts. Nothing sleeps.

A rollout service is a node of eight GPUs, one for each of the eight policies. In an episode, the policies
generate in turn, and an environment responds after each. If a node is lost, its episodes continue on other
nodes after the turns that were complete. Each policy has its own trainer.
"""

import bisect
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from astraflow.config import parse_config
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import (
    AddWorker,
    DropWorker,
    EpisodeFacts,
    IssueLeases,
    LeaseView,
    RecordResult,
    ReleaseSteps,
)
from astraflow.dataflow.core.plan import EvalPlan, PolicyPlan, RunPlan
from astraflow.types import ServedVersions
from virtual_core import VirtualCore, make_meta

__all__ = ["Fleet", "Found", "Plan", "Region"]

ENV_S = 1.0
GPUS_PER_NODE = 8
GROUP_SIZE = 8


@dataclass(frozen=True)
class Region:
    """Nodes that reach the trainers over one link."""

    name: str
    num_nodes: int
    tokens_per_s: float
    """Speed of each request."""
    gbit_s: float
    """Bandwidth of the link, in each direction."""
    latency_s: float
    losses_per_h: float
    """Losses of each node per hour: failures, and reclaimed spot machines."""


@dataclass(frozen=True)
class Plan:
    """What is simulated."""

    regions: tuple[Region, ...]
    num_policies: int = 8
    gpus_per_trainer: int = 31
    slots_per_gpu: int = 64
    mean_tokens: float = 1000.0
    """Mean length of a completion, before the longest are cut."""
    sigma: float = 1.0
    max_tokens: int = 4096
    groups_per_batch: int = 1024
    max_staleness: int = 12
    sampler: str = "edf"
    engine_lag: int = 2
    """Versions that a node may be behind the newest one and still get leases."""
    trained_tokens_per_s: float = 9000.0
    """Training speed of each GPU."""
    version_gb: float = 16.0
    """Size of a policy's weights."""
    delta_frac: float = 0.05
    """Bytes of a delta divided by those of the weights."""
    silence_s: float = 30.0
    """Time until a silent node counts as lost."""
    start_s: float = 90.0
    """Time from a loss until the replacement starts to load weights."""
    peer_gbit_s: float = 100.0
    """Bandwidth from another node of the region, which serves the weights."""
    trainer_losses_per_h: float = 0.0
    """Losses of each trainer per hour."""
    trainer_restart_s: float = 120.0
    checkpoint_every: int = 10

    @property
    def num_gpus(self) -> int:
        """All GPUs."""
        num_nodes = sum(region.num_nodes for region in self.regions)
        return GPUS_PER_NODE * num_nodes + self.num_policies * self.gpus_per_trainer

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies, in the order in which they generate."""
        return tuple(f"p{idx}" for idx in range(self.num_policies))


@dataclass
class Found:
    """What a run did after its first minutes, which don't count. Times are virtual seconds."""

    seconds: float = 0.0
    num_sampled: int = 0
    """Tokens of episodes that arrived."""
    num_lost: int = 0
    """Tokens that lost nodes had sampled in turns that were not complete."""
    num_trained: int = 0
    """Tokens of steps that were committed for the first time."""
    num_episodes: int = 0
    num_node_losses: int = 0
    num_trainer_losses: int = 0
    staleness: list[float] = field(default_factory=list[float])
    """Mean staleness of each batch."""
    staleness_max: int = 0
    sent_gb: dict[str, float] = field(default_factory=dict[str, float])
    """Region -> gigabytes of weights over its link."""
    received_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Region -> tokens of the episodes over its link."""
    resumed_after_s: list[float] = field(default_factory=list[float])
    """Seconds from the loss of a node until each of its episodes ran again."""
    core_cpu_s: float = 0.0
    """CPU seconds that the core took for its decisions."""
    train_s: float = 0.0
    """Seconds in which trainers trained, summed over them."""


@dataclass(eq=False)
class _Site:
    """A region's link, and the versions that have arrived there."""

    region: Region
    arrived_s: dict[str, list[float]]
    """Policy -> when each of `versions` arrived."""
    versions: dict[str, list[int]]
    due: dict[str, int] = field(default_factory=dict[str, int])
    """Policy -> newest version that waits for the link."""
    is_sending: bool = False

    def served(self) -> tuple[ServedVersions, ...]:
        return tuple(
            ServedVersions(policy=policy, versions=(versions[-1],))
            for policy, versions in self.versions.items()
        )

    def version_at(self, policy: str, at_s: float) -> int:
        return self.versions[policy][bisect.bisect_right(self.arrived_s[policy], at_s) - 1]


@dataclass(eq=False)
class _Node:
    """A rollout service. `worker_id` is empty while the node is lost."""

    site: _Site
    worker_id: str = ""
    room: int = 0
    running: dict[str, "_Episode"] = field(default_factory=dict[str, "_Episode"])


@dataclass(eq=False)
class _Episode:
    """An episode on a node. The lists have a value per turn, also for the turns of earlier nodes."""

    lease: LeaseView
    node: _Node
    began_s: float
    tokens: list[int]
    ends_s: list[float]
    oldest: list[int]
    """Version with which each completion began."""

    @property
    def key(self) -> tuple[int, int]:
        return self.lease.group_id, self.lease.episode_idx


@dataclass(eq=False)
class _Trainer:
    policy: str
    epoch: int = 0
    step: int = 0
    version: int = 0
    """Newest version. A repeated step publishes a new one."""
    durable_step: int = 0
    num_done: int = 0
    """Steps that were committed, those that were repeated once."""
    is_busy: bool = False
    life: int = 0
    """Number of losses. What was planned in an earlier life is void."""


class Fleet:
    """One run. Example: `Fleet(plan).run(minutes=30.0, warm_minutes=10.0).num_trained`."""

    def __init__(self, plan: Plan, *, seed: int = 0) -> None:
        self._plan = plan
        self._rng = random.Random(seed)
        self._warm_s = 0.0
        self._worker_ids = itertools.count()
        self._found = Found()
        self._kept: dict[tuple[int, int], tuple[float, list[int]]] = {}
        """(group, episode) -> when its node was lost, and the versions of its complete turns."""
        self._idle: deque[_Node] = deque()
        """Nodes that have room and found no lease."""
        self._clock = VirtualCore(_run_plan(plan, seed), counts_cpu=True)
        self._trainers = [_Trainer(name) for name in plan.policies]
        for trainer in self._trainers:
            self._attach(trainer)
        sites = [_site(region, plan.policies) for region in plan.regions]
        self._sites = sites
        for site in sites:
            for _ in range(site.region.num_nodes):
                self._join(_Node(site))

    def run(self, *, minutes: float, warm_minutes: float) -> Found:
        """Runs for some virtual minutes after the first ones, which don't count."""
        self._warm_s = 60.0 * warm_minutes
        end_s = self._warm_s + 60.0 * minutes
        self._answer_woken()
        warm_cpu_s = math.nan
        while self._clock.due_s <= end_s:
            self._clock.now_s = self._clock.due_s
            if self._counts and math.isnan(warm_cpu_s):
                warm_cpu_s = self._clock.cpu_s
            self._clock.run_next()
            self._answer_woken()
        self._found.core_cpu_s = self._clock.cpu_s - warm_cpu_s
        self._found.seconds = 60.0 * minutes
        return self._found

    @property
    def _counts(self) -> bool:
        return self._clock.now_s >= self._warm_s

    def _after_loss(self, per_h: float, call: Callable[[], None]) -> None:
        """Plans the next loss of a node or trainer."""
        if per_h:
            self._clock.after(3600.0 * self._rng.expovariate(per_h), call)

    def _answer_woken(self) -> None:
        """Lets the parties ask that the core has woken, before the clock moves."""
        while self._clock.woken:
            woken = set(self._clock.woken)
            self._clock.woken.clear()
            for trainer in self._trainers:
                if f"batch/{trainer.policy}" in woken:
                    self._take(trainer)
            if "leases" in woken:
                while self._idle and self._lease(self._idle[0]):
                    self._idle.popleft()

    # --- nodes --------------------------------------------------------------------------------------

    def _join(self, node: _Node) -> None:
        node.worker_id = f"{next(self._worker_ids)}"
        node.room = GPUS_PER_NODE * self._plan.slots_per_gpu
        self._clock.apply(AddWorker(worker_id=node.worker_id, name=node.worker_id, hosts=self._plan.policies))
        self._after_loss(node.site.region.losses_per_h, partial(self._lose_node, node))
        self._idle.append(node)
        self._clock.woken.add("leases")

    def _lose_node(self, node: _Node) -> None:
        """Stops a node. The dataflow notices after `silence_s`."""
        episodes = tuple(node.running.values())
        node.running.clear()
        self._found.num_node_losses += self._counts
        for episode in episodes:
            num = bisect.bisect_right(episode.ends_s, self._clock.now_s)
            self._kept[episode.key] = (self._clock.now_s, episode.oldest[:num])
            began_s = episode.ends_s[num - 1] if num else episode.began_s
            sampled = (self._clock.now_s - began_s) * node.site.region.tokens_per_s
            self._found.num_lost += round(min(sampled, episode.tokens[num])) * self._counts
        if node in self._idle:
            self._idle.remove(node)
        worker_id = node.worker_id
        node.worker_id = ""
        drop = DropWorker(worker_id=worker_id, reason="silent")
        self._clock.after(self._plan.silence_s, partial(self._clock.apply, drop))
        weights_s = 8 * self._plan.version_gb * self._plan.num_policies / self._plan.peer_gbit_s
        self._clock.after(self._plan.start_s + weights_s, partial(self._join, node))

    def _lease(self, node: _Node) -> bool:
        """Gives a node what may run. Returns whether it has no room left."""
        while node.room:
            num = min(node.room, GROUP_SIZE)
            command = IssueLeases(worker_id=node.worker_id, num_free=num, served=node.site.served())
            leases = self._clock.apply(command)
            for lease in leases:
                self._begin(lease, node)
            if not leases:
                return False
        return True

    def _begin(self, lease: LeaseView, node: _Node) -> None:
        episode = _Episode(lease, node, self._clock.now_s, [], [], [])
        lost_s, oldest = self._kept.pop(episode.key, (math.inf, []))
        if lost_s < math.inf and self._counts:
            self._found.resumed_after_s.append(self._clock.now_s - lost_s)
        plan = self._plan
        lengths = random.Random(f"{episode.key}")  # the same on every node
        at_s = self._clock.now_s
        for turn, policy in enumerate(plan.policies):
            drawn = lengths.lognormvariate(math.log(plan.mean_tokens) - plan.sigma**2 / 2, plan.sigma)
            tokens = min(plan.max_tokens, max(1, round(drawn)))
            is_done = turn < len(oldest)
            episode.tokens.append(tokens)
            episode.oldest.append(oldest[turn] if is_done else node.site.version_at(policy, at_s))
            at_s += 0.0 if is_done else tokens / node.site.region.tokens_per_s + ENV_S
            episode.ends_s.append(at_s)
        node.room -= 1
        node.running[lease.id] = episode
        self._clock.after(at_s - self._clock.now_s, partial(self._end, episode))

    def _end(self, episode: _Episode) -> None:
        node = episode.node
        if node.running.pop(episode.lease.id, None) is None:
            return  # the node was lost
        node.room += 1
        score = float(episode.lease.seed & 1)
        newest = [node.site.versions[policy][-1] for policy in self._plan.policies]
        facts = EpisodeFacts(
            trajectories=tuple(
                make_meta(policy, num_tokens, (oldest, max(oldest, last)), score)
                for policy, num_tokens, oldest, last in zip(
                    self._plan.policies, episode.tokens, episode.oldest, newest, strict=True
                )
            ),
            score=score,
            metrics=(),
            duration_s=self._clock.now_s - episode.began_s,
        )
        self._clock.apply(RecordResult(lease_id=episode.lease.id, worker_id=node.worker_id, outcome=facts))
        if self._counts:
            name = node.site.region.name
            num = sum(episode.tokens)
            self._found.num_episodes += 1
            self._found.num_sampled += num
            self._found.received_tokens[name] = self._found.received_tokens.get(name, 0) + num
        if node not in self._idle and not self._lease(node):
            self._idle.append(node)

    # --- trainers -----------------------------------------------------------------------------------

    def _attach(self, trainer: _Trainer) -> None:
        session = self._clock.attach(trainer.policy, durable_step=trainer.durable_step)
        trainer.epoch = session.epoch
        trainer.step = trainer.durable_step
        trainer.version = session.next_version
        self._clock.publish(trainer.policy, trainer.epoch, trainer.step, trainer.version)
        self._clock.woken.add(f"batch/{trainer.policy}")
        self._after_loss(self._plan.trainer_losses_per_h, partial(self._lose_trainer, trainer))

    def _take(self, trainer: _Trainer) -> None:
        if trainer.is_busy:
            return
        batch = self._clock.take(trainer.policy, trainer.epoch, trainer.step)
        if batch is None:
            return
        trainer.is_busy = True
        num_tokens = sum(sample.num_tokens for sample in batch.samples)
        step_s = num_tokens / (self._plan.trained_tokens_per_s * self._plan.gpus_per_trainer)
        if self._counts:
            self._found.staleness.append(batch.staleness_mean)
            self._found.staleness_max = max(self._found.staleness_max, batch.staleness_max)
            self._found.train_s += step_s
        self._clock.after(step_s, partial(self._commit, trainer, trainer.life, num_tokens))

    def _commit(self, trainer: _Trainer, life: int, num_tokens: int) -> None:
        if life != trainer.life:
            return
        trainer.is_busy = False
        trainer.version += 1
        self._clock.commit(trainer.policy, trainer.epoch, trainer.step, trainer.version)
        trainer.step += 1
        if trainer.step > trainer.num_done:
            trainer.num_done = trainer.step
            self._found.num_trained += num_tokens * self._counts
        if trainer.step % self._plan.checkpoint_every == 0:
            trainer.durable_step = trainer.step
            self._clock.apply(ReleaseSteps(policy=trainer.policy, epoch=trainer.epoch, step=trainer.step))
        self._spread(trainer)
        self._clock.woken.add(f"batch/{trainer.policy}")

    def _spread(self, trainer: _Trainer) -> None:
        """Sends the newest version to all regions."""
        for site in self._sites:
            site.due[trainer.policy] = trainer.version
            self._send(site)

    def _lose_trainer(self, trainer: _Trainer) -> None:
        trainer.life += 1
        trainer.is_busy = True  # until its replacement attaches
        self._found.num_trainer_losses += self._counts
        self._clock.after(self._plan.trainer_restart_s, partial(self._restart, trainer))

    def _restart(self, trainer: _Trainer) -> None:
        trainer.is_busy = False
        self._attach(trainer)
        self._spread(trainer)

    def _send(self, site: _Site) -> None:
        """Sends the version that has waited longest over a region's link; newer ones replace older ones."""
        if site.is_sending or not site.due:
            return
        policy = next(iter(site.due))
        version = site.due.pop(policy)
        sent_gb = self._plan.version_gb * self._plan.delta_frac
        if self._counts:
            name = site.region.name
            self._found.sent_gb[name] = self._found.sent_gb.get(name, 0.0) + sent_gb
        site.is_sending = True
        seconds = 8 * sent_gb / site.region.gbit_s
        self._clock.after(seconds, partial(self._sent, site))
        self._clock.after(seconds + site.region.latency_s, partial(self._arrived, site, policy, version))

    def _sent(self, site: _Site) -> None:
        site.is_sending = False
        self._send(site)

    def _arrived(self, site: _Site, policy: str, version: int) -> None:
        site.arrived_s[policy].append(self._clock.now_s)
        site.versions[policy].append(version)
        self._clock.woken.add("leases")


def _run_plan(plan: Plan, seed: int) -> RunPlan:
    fields = {
        "sampler": {"name": plan.sampler},
        "group_size": GROUP_SIZE,
        "groups_per_batch": plan.groups_per_batch,
        "max_staleness": plan.max_staleness,
        "engine_lag": plan.engine_lag,
    }
    table = parse_config(fields, TableConfig, where="table")
    return RunPlan(
        seed=seed,
        group_size=GROUP_SIZE,
        policies={name: PolicyPlan(table=table, num_steps=1_000_000) for name in plan.policies},
        sources={"tasks": 1_000_000_000},
        curators=(),
        eval=EvalPlan(sets={}, every=1, deadline_s=300.0),
        max_attempts=1,
        max_lost=1_000,
        admission="all",
    )


def _site(region: Region, policies: Sequence[str]) -> _Site:
    return _Site(region, {name: [0.0] for name in policies}, {name: [0] for name in policies})
