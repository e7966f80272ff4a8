"""The dataflow core under random services, trainers, failures, restarts and repeated messages."""

import dataclasses
from collections import Counter
from typing import Literal, cast, get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from astraflow.algorithms.credit import CreditConfig
from astraflow.algorithms.task_gates import CurriculumConfig, GresoConfig, PriorityConfig, SolvedConfig
from astraflow.config import Use
from astraflow.dataflow.core.commands import (
    BatchTaken,
    BatchView,
    ChangeSchedule,
    EpisodeFacts,
    FateDecided,
    GroupDrawn,
    IssueLeases,
    LeaseView,
    RecordResult,
    RunEnded,
    RunResumed,
)
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import BestRule, EvalSetPlan, Schedule
from astraflow.errors import FencedError, RefusedError
from astraflow.types import HANDED_IN, Failure, FateCounts, ServedVersions
from drivers.core_driver import Driver, make_core_plan, make_facts, make_meta, make_table
from simulator.history import History

_NUM_STEPS = 8
_MOST_STEPS = 14
_CURATORS = {
    "solved": SolvedConfig(revisit=0.2),
    "curriculum": CurriculumConfig(policy="actor"),
    "greso": GresoConfig(policy="actor", delta=0.1),
    "priority": PriorityConfig(),
}
_CREDIT = sorted(c.model_fields["name"].default for c in get_args(get_args(CreditConfig)[0]) if c is not Use)
_MAX_ROUNDS = 400
"""Rounds of undisturbed work within which every run of `_MOST_STEPS` steps must end."""


class Trainer:
    """A trainer that may take one step ahead, and be killed at any moment."""

    def __init__(self, driver: Driver, policy: str) -> None:
        self.driver, self.policy = driver, policy
        self.is_alive = False
        self.num_restarts = -1
        self.views: dict[int, BatchView] = {}

    @property
    def num_steps(self) -> int:
        return self.driver.core.schedule.steps[self.policy]

    def kill(self) -> None:
        self.is_alive = False

    def advance(self, *, durable_frac: float = 1.0, is_ahead: bool = False, releases: bool = False) -> None:
        """Does the next thing that it has to do."""
        driver, policy = self.driver, self.policy
        status = driver.status(policy)
        if not self.is_alive:
            retained = status.step - status.durable_step
            durable = status.durable_step + round(durable_frac * retained)
            self.base = driver.attach(policy, durable)
            self.num_restarts += 1
            self.is_alive, self.in_hand, self.next_step, self.is_published = True, [], durable, False
            return
        if status.newest_version < self.base.next_version:
            driver.publish(self.base.step, policy, has_files=True)
        elif self.in_hand and is_ahead and len(self.in_hand) < 2 and self.next_step < self.num_steps:
            self._take()
        elif self.is_published:
            step = self.in_hand.pop(0)
            driver.commit(step, policy)
            self.is_published = False
            if releases:
                driver.release(step + 1, policy)
        elif self.in_hand:
            driver.publish(self.in_hand[0] + 1, policy)
            self.is_published = True
        elif self.next_step < self.num_steps:
            self._take()

    def _take(self) -> None:
        view = self.driver.take(self.next_step, self.policy)
        if view is None:
            return
        known = self.views.setdefault(self.next_step, view)
        assert (known.samples, known.totals) == (view.samples, view.totals)
        assert known.trainer_version == view.trainer_version
        self.in_hand.append(self.next_step)
        self.next_step += 1


class CoreMachine(RuleBasedStateMachine):
    """Every rule is something a peer does; every invariant holds after each of them."""

    @initialize(
        sampler=st.sampled_from(
            [
                {"name": "fifo"},
                {"name": "sweep"},
                {"name": "edf"},
                {"name": "window", "span": 3},
                {"name": "on_policy"},
            ]
        ),
        capacity=st.sampled_from([0, 2, 3]),
        replay=st.builds(
            dict,
            ratio=st.sampled_from([0.0, 0.5, 1.5]),
            size=st.integers(1, 6),
            max_uses=st.integers(2, 3),
            select=st.sampled_from(["latest", "uniform", "priority"]),
        ),
        curators=st.sets(st.sampled_from(["solved", "curriculum", "greso", "priority"])),
        credit=st.sampled_from(_CREDIT),
        reserve=st.integers(0, 1),
        engine_lag=st.integers(0, 1),
        slack=st.integers(0, 2),
        max_failed=st.integers(0, 1),
        is_filtered=st.booleans(),
        num_policies=st.integers(1, 2),
        has_eval=st.booleans(),
    )
    def build(
        self,
        *,
        sampler: dict[str, object],
        capacity: int,
        replay: dict[str, object],
        curators: set[str],
        credit: str,
        reserve: int,
        engine_lag: int,
        slack: int,
        max_failed: int,
        is_filtered: bool,
        num_policies: int,
        has_eval: bool,
    ) -> None:
        if sampler["name"] == "on_policy":
            engine_lag = slack = 0  # what it needs
        table = make_table(
            max_staleness=engine_lag + slack,
            engine_lag=engine_lag,
            max_failed=max_failed,
            sampler=sampler,
            remover={"name": "capacity", "num_groups": capacity} if capacity else {"name": "keep"},
            replay={**replay, "reserve": min(reserve, slack)},
            credit={"name": credit, "k": 1}
            if credit == "pass_at_k"
            else {"name": credit},  # of groups of two
            filters=[{"name": "zero_variance"}] if is_filtered else [],
        )
        self.table = table
        self.policies = ("actor", "critic")[:num_policies]
        sets = {"heldout": EvalSetPlan(num_tasks=2, samples=2)} if has_eval else {}
        self.plan = make_core_plan(
            table=table,
            policies=self.policies,
            num_steps=_NUM_STEPS,
            num_tasks=40,
            eval_sets=sets,
            curators=tuple(_CURATORS[name] for name in sorted(curators)),
        )
        self.driver = Driver(self.plan)
        self.trainers = {policy: Trainer(self.driver, policy) for policy in self.policies}
        self.num_workers = 0
        self.leases: list[tuple[LeaseView, tuple[ServedVersions, ...]]] = []
        self.begun: dict[tuple[int, int], dict[str, int]] = {}
        """Training episode -> policy -> version at its first attempt since one failed by itself."""
        self.answered: list[tuple[str, EpisodeFacts]] = []
        self.expired: set[str] = set()
        self.events_seen = 0
        self.drawn: Counter[str] = Counter()
        self.fates: dict[str, dict[int, str]] = {policy: {} for policy in self.policies}
        self.uses: Counter[tuple[str, int]] = Counter()
        self.trained_in: dict[str, set[int]] = {policy: set() for policy in self.policies}
        self.join()

    # --- what peers do ---

    @rule()
    def join(self) -> None:
        self.driver.join(f"w{self.num_workers}")
        self.num_workers += 1

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        workers = [worker.worker_id for worker in self.driver.core.workers()]
        if not workers:
            return
        newest = {p: self.driver.status(p).newest_version for p in self.policies}
        served = self.driver.served(
            **{p: max(v - data.draw(st.integers(0, 2)), -1) for p, v in newest.items()}
        )
        leases = self.driver.lease(data.draw(st.integers(1, 6)), data.draw(st.sampled_from(workers)), served)
        for lease in leases:
            self._hold(lease, served)
            for entry in served:
                if lease.kind == "train":
                    assert entry.versions[-1] >= newest[entry.policy] - self.table.engine_lag

    def _hold(self, lease: LeaseView, served: tuple[ServedVersions, ...]) -> None:
        self.leases.append((lease, served))
        if lease.kind == "train":
            versions = {entry.policy: entry.versions[-1] for entry in served}
            self.begun.setdefault((lease.group_id, lease.episode_idx), versions)

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        reward=st.sampled_from([0.0, 0.5, 1.0]),
        acts=st.booleans(),
        resumes=st.booleans(),
    )
    def finish(self, data: st.DataObject, reward: float, acts: bool, resumes: bool) -> None:
        """An attempt that resumes contains what the attempts before it sampled, under older versions."""
        lease, served = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        is_later = resumes and lease.kind == "train"
        begun = self.begun.get((lease.group_id, lease.episode_idx), {}) if is_later else {}
        metas = []
        for entry in served:
            now = entry.versions[-1]
            oldest = min(now, begun.get(entry.policy, now))
            newest = data.draw(st.integers(now, self.driver.status(entry.policy).newest_version))
            num_trained = 4 if acts or entry.policy == "actor" else 0
            metas.append(
                make_meta(entry.policy, reward=reward, versions=(oldest, newest), num_trained=num_trained)
            )
        facts = make_facts(*metas, score=reward)
        self.driver.result(lease.id, facts)
        self.answered.append((lease.id, facts))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), is_retryable=st.booleans())
    def fail(self, data: st.DataObject, is_retryable: bool) -> None:
        lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.driver.fail(lease, is_retryable=is_retryable)
        self.begun.pop((lease.group_id, lease.episode_idx), None)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def hand_in(self, data: st.DataObject) -> None:
        """A service gives a lease back, and the next attempt goes on from this one."""
        lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.driver.result(lease.id, Failure(error_class=HANDED_IN, message="the device was asked back"))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def expire_but_go_on(self, data: st.DataObject) -> None:
        lease, _ = data.draw(st.sampled_from(self.leases))
        self.driver.expire(lease)

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        lease_id, facts = data.draw(st.sampled_from(self.answered))
        before = self.driver.core.policy_status()
        self.driver.result(lease_id, facts)
        assert self.driver.core.policy_status() == before

    @rule(data=st.data())
    def lose_service(self, data: st.DataObject) -> None:
        workers = [worker.worker_id for worker in self.driver.core.workers()]
        if workers:
            self.driver.drop(data.draw(st.sampled_from(workers)))

    @rule(num_leases=st.integers(2, 12), num_left_out=st.integers(0, 2), lag=st.integers(0, 1))
    def roll_out(self, num_leases: int, num_left_out: int, lag: int) -> None:
        """Ordinary work of one service: some episodes are left for later."""
        workers = self.driver.core.workers()
        if not workers:
            return
        newest = {p: self.driver.status(p).newest_version for p in self.policies}
        served = self.driver.served(**{p: max(v - lag, 0) for p, v in newest.items() if v >= 0})
        leases = self.driver.lease(num_leases, workers[-1].worker_id, served)
        for lease in leases[:num_left_out]:
            self._hold(lease, served)
        for lease in leases[num_left_out:]:
            reward = float(lease.episode_idx % 2)
            metas = [make_meta(e.policy, reward=reward, versions=(e.versions[-1],) * 2) for e in served]
            self.driver.result(lease.id, make_facts(*metas, score=reward))

    @rule(
        num=st.integers(1, 8),
        durable_frac=st.floats(0, 1),
        is_ahead=st.booleans(),
        releases=st.booleans(),
        data=st.data(),
    )
    def train(
        self, num: int, durable_frac: float, is_ahead: bool, releases: bool, data: st.DataObject
    ) -> None:
        trainer = self.trainers[data.draw(st.sampled_from(self.policies))]
        for _ in range(num):
            if self.driver.core.state == "running":
                trainer.advance(durable_frac=durable_frac, is_ahead=is_ahead, releases=releases)

    @rule(num_rounds=st.integers(1, 8), num_left_out=st.integers(0, 1), is_ahead=st.booleans())
    def work(self, num_rounds: int, num_left_out: int, is_ahead: bool) -> None:
        """A while without trouble."""
        for _ in range(num_rounds):
            self.roll_out(num_leases=6, num_left_out=num_left_out, lag=0)
            for trainer in self.trainers.values():
                if self.driver.core.state == "running":
                    trainer.advance(is_ahead=is_ahead, releases=is_ahead)

    @precondition(lambda self: sum(len(t.views) for t in self.trainers.values()) > 1)
    @rule(data=st.data())
    def trainer_dies(self, data: st.DataObject) -> None:
        self.trainers[data.draw(st.sampled_from(self.policies))].kill()

    @rule(data=st.data())
    def drop_a_batch(self, data: st.DataObject) -> None:
        """A person gives up what no trainer can train; whoever holds it is fenced."""
        policy = data.draw(st.sampled_from(self.policies))
        status = self.driver.status(policy)
        before = self.driver.core.snapshot()
        try:
            steps = self.driver.drop_batch(policy).steps
        except RefusedError:
            assert self.driver.core.snapshot() == before
            return
        assert steps[0] == status.step
        trainer = self.trainers[policy]
        for step in steps:
            trainer.views.pop(step, None)
        if trainer.is_alive:
            with pytest.raises(FencedError):
                self.driver.take(steps[0], policy)
        trainer.kill()

    @rule(
        steps=st.integers(1, _MOST_STEPS),
        every=st.integers(1, 3),
        num_tasks=st.integers(0, 2),
        mode=st.sampled_from(["max", "min", "none"]),
        data=st.data(),
    )
    def go_on_with_another_schedule(
        self, steps: int, every: int, num_tasks: int, mode: str, data: st.DataObject
    ) -> None:
        """A person stops the run, or finds it finished, and resumes it: every trainer starts again."""
        before = self.driver.core.schedule
        sets = {"heldout": EvalSetPlan(num_tasks=num_tasks, samples=2)} if num_tasks else {}
        best = None if mode == "none" else BestRule("heldout", mode=cast("Literal['max', 'min']", mode))
        asked = {p: max(steps, self.driver.status(p).step) for p in self.policies}
        kept = data.draw(st.sampled_from([None, *self.policies]))
        schedule = Schedule(
            asked | ({kept: before.steps[kept]} if kept else {}),
            dataclasses.replace(self.plan.eval, sets=sets, every=every, best=best),
        )
        was_over = self.driver.core.state == "finished"
        self.driver.apply(ChangeSchedule(schedule=schedule))
        assert self.driver.core.schedule == schedule
        has_more = any(schedule.steps[p] > self.driver.status(p).step for p in self.policies)
        if was_over:
            assert (self.driver.core.state == "running") == has_more
        for policy, trainer in self.trainers.items():
            trainer.kill()
            if was_over and has_more:
                for step in [s for s in trainer.views if s >= self.driver.status(policy).step]:
                    del trainer.views[step]

    @invariant()
    def the_best_version_can_be_fetched(self) -> None:
        for policy, state in self.driver.core._ctx.state.policies.items():
            if state.best is not None:
                assert state.best.version in state.manifests, policy

    @rule()
    def restart(self) -> None:
        """The service restarts from a snapshot; all that follows is decided by the restored core."""
        data = self.driver.core.snapshot()
        self.driver.core = Core.from_snapshot(self.plan, data)
        assert self.driver.core.snapshot() == data

    @rule(lag=st.integers(0, 2))
    def services_that_serve_the_same_find_the_same(self, lag: int) -> None:
        """What the line for leases rests on: if one of them gets nothing, so would all others."""
        newest = {p: self.driver.status(p).newest_version for p in self.policies}
        served = self.driver.served(**{p: max(v - lag, -1) for p, v in newest.items()})
        data = self.driver.core.snapshot()
        found: set[bool] = set()
        for worker in self.driver.core.workers():
            if self.driver.core.is_restricted(worker.worker_id):
                continue
            command = IssueLeases(worker_id=worker.worker_id, num_free=1, served=served)
            answer = Core.from_snapshot(self.plan, data).apply(command, self.driver.now_s).answer
            found.add(bool(answer))
        assert len(found) <= 1

    @rule(lease_id=st.sampled_from(["99999.0.0", "0.7.0", "0.0.9", "x", "e99.0.0"]))
    def invent_a_lease(self, lease_id: str) -> None:
        before = self.driver.core.snapshot()
        with pytest.raises(RefusedError):
            self.driver.apply(
                RecordResult(lease_id=lease_id, worker_id="w0", outcome=make_facts(make_meta()))
            )
        assert self.driver.core.snapshot() == before

    # --- what always holds ---

    def _watch(self) -> None:
        for event in self.driver.events[self.events_seen :]:
            if isinstance(event, GroupDrawn):
                assert set(event.admitted) | set(event.unadmitted) == set(self.policies)
                self.drawn.update(self.policies)
            elif isinstance(event, FateDecided):
                assert event.group_id not in self.fates[event.policy], "a second fate"
                self.fates[event.policy][event.group_id] = event.fate
            elif isinstance(event, BatchTaken):
                self._watch_batch(event)
        self.events_seen = len(self.driver.events)

    def _watch_batch(self, event: BatchTaken) -> None:
        taken = self.trained_in[event.policy]
        assert len(event.group_ids) == self.table.groups_per_batch
        assert not taken & set(event.group_ids), "a group in two batches"
        assert len(set(event.replayed_ids)) == len(event.replayed_ids) <= self.table.max_replayed
        assert taken >= set(event.replayed_ids), "a replayed group that no earlier batch held"
        taken.update(event.group_ids)
        self.uses.update((event.policy, i) for i in (*event.group_ids, *event.replayed_ids))
        assert max(self.uses.values()) <= self.table.replay.max_uses
        assert max(event.replayed_staleness, default=0) <= self.table.max_staleness
        assert max(event.staleness) <= self.table.max_staleness
        assert max(event.staleness) <= self.driver.status(event.policy).staleness_bound

    @invariant()
    def every_group_ends_in_exactly_one_way(self) -> None:
        self._watch()
        for policy in self.policies:
            counts = self.driver.fates(policy)
            num_live = self.drawn[policy] - len(self.fates[policy])
            recount = FateCounts(
                drawn=self.drawn[policy], live=num_live, **Counter(self.fates[policy].values())
            )
            assert counts == recount

    @invariant()
    def tickets_are_bounded(self) -> None:
        for status in self.driver.core.policy_status():
            assert 0 <= status.num_tickets <= status.max_tickets
            assert status.num_tickets == status.fates.live

    @invariant()
    def groups_of_departed_services_are_indexed(self) -> None:
        ctx = self.driver.core._ctx
        preferred = {ctx.state.groups[group_id].preferred_worker for group_id in ctx.state.fresh}
        assert ctx.fresh_by_worker.keys() == preferred
        assert ctx.gone_workers == preferred - ctx.state.workers.keys()

    @invariant()
    def fifo_needs_no_sweep_without_a_restart(self) -> None:
        for policy, trainer in self.trainers.items():
            if self.table.sampler.name == "fifo" and trainer.num_restarts <= 0:
                assert self.driver.fates(policy).stale == 0

    @invariant()
    def batches_hold_whole_groups(self) -> None:
        least = self.table.min_group_size
        for trainer in self.trainers.values():
            for view in trainer.views.values():
                sizes = Counter(sample.group_id for sample in view.samples)
                assert view.totals.num_groups == len(sizes)
                assert 0 <= len(sizes) - self.table.groups_per_batch <= self.table.max_replayed
                if trainer.policy == "actor":
                    assert all(least <= size <= self.table.group_size for size in sizes.values()), sizes

    # --- at the end ---

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self._run_to_the_end()
        self.every_group_ends_in_exactly_one_way()
        self.tickets_are_bounded()
        self.fifo_needs_no_sweep_without_a_restart()
        self.batches_hold_whole_groups()
        num_resumed = sum(isinstance(event, RunResumed) for event in self.driver.events)
        assert sum(isinstance(event, RunEnded) for event in self.driver.events) == 1 + num_resumed
        assert all(status.fates.live == 0 for status in self.driver.core.policy_status())
        self._replay()

    def _run_to_the_end(self) -> None:
        """When nothing fails any more, the run ends."""
        self.join()
        worker_id = f"w{self.num_workers - 1}"
        for lease, _ in self.leases:
            self.driver.expire(lease)
        for _ in range(_MAX_ROUNDS):
            if self.driver.core.state != "running":
                return
            served = tuple(
                ServedVersions(policy=p, versions=tuple(range(self.driver.status(p).newest_version + 1)))
                for p in self.policies
            )
            for lease in self.driver.lease(4, worker_id, served):
                self.driver.finish(lease)
            for trainer in self.trainers.values():
                if self.driver.core.state == "running":
                    trainer.advance()
        raise AssertionError(f"no end after {_MAX_ROUNDS} rounds: {self.driver.core.waits()}")

    def _replay(self) -> None:
        core = Core(self.plan)
        for command, now_s, events in self.driver.commands:
            assert core.apply(command, now_s).events == events
        assert core.snapshot() == self.driver.core.snapshot()
        self._book()

    def _book(self) -> None:
        """A bookkeeper that knows the rules and not the core agrees with every event."""
        history = History(self.plan, pytest.fail)
        for command, now_s, events in self.driver.commands:
            history.book(command, events, now_s)
        history.close(self.driver.core.reason)
        for policy in self.policies:
            assert history.counts(policy) == self.driver.fates(policy)
        for trainer in self.trainers.values():
            for view in trainer.views.values():
                history.check_view(view)


TestCore = pytest.mark.timeout(120)(CoreMachine.TestCase)
TestCore.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
