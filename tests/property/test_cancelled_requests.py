"""Requests of training and evaluation on the two slots of an engine, cancelled at any moment."""

from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.jobs import Job, Outcome
from astraflow.rollout.engines.lanes import Lanes
from astraflow.types import Generation, Sampling
from astraflow.types.host_tensors import WeightSnapshot
from drivers.engine_models import make_model_folder, make_random_model, snapshot_of

LIVE, PINNED = 4, 3
"""Versions, with weights that differ."""
PROMPTS = ((5, 9, 3, 30, 12), (4, 4), (7,), tuple(range(2, 14)))
CONFIG = TorchEngineConfig(num_slots=3, max_context=48)

Ask = tuple[int, int, int]
"""Which prompt, most tokens, seed."""


class Desk:
    """Two slots, as the engine's thread drives them."""

    def __init__(self, live: WeightSnapshot, pinned: WeightSnapshot) -> None:
        self.lanes = Lanes(CONFIG, live)
        self.lanes.pin(self.lanes.build(pinned))

    def submit(self, ask: Ask, version: int, outcomes: list[Outcome]) -> Job:
        prompt, max_new, seed = ask
        job = Job(PROMPTS[prompt], Sampling(seed=seed), max_new, None, outcomes.append, version=version)
        self.lanes.lane_for(version, changing=frozenset()).submit(job)
        return job

    @torch.inference_mode()
    def step(self) -> None:
        for lane in self.lanes.lanes:
            if lane.has_work:
                lane.step()

    @property
    def has_work(self) -> bool:
        return any(lane.has_work for lane in self.lanes.lanes)


class Cancelling(RuleBasedStateMachine):
    """Submits, steps and cancels in any order; at the end everything that was kept is answered."""

    def __init__(self, desk: Desk, alone: "Alone") -> None:
        super().__init__()
        self.desk, self.alone = desk, alone
        self.open: list[tuple[Job, Ask, list[Outcome]]] = []

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        max_new=st.integers(1, 12),
        seed=st.integers(0, 3),
        version=st.sampled_from((-1, LIVE, PINNED)),
    )
    def submit(self, prompt: int, max_new: int, seed: int, version: int) -> None:
        outcomes: list[Outcome] = []
        ask = (prompt, max_new, seed)
        self.open.append((self.desk.submit(ask, version, outcomes), ask, outcomes))

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.desk.step()

    @rule(place=st.integers(0, 1000))
    def cancel(self, place: int) -> None:
        """Also one that has been answered: the cancellation may come too late."""
        if self.open:
            job, _, _ = self.open.pop(place % len(self.open))
            self.desk.lanes.drop(job)

    @invariant()
    def every_request_is_counted_once(self) -> None:
        num_unanswered = sum(not outcomes for _, _, outcomes in self.open)
        assert sum(lane.num_running + lane.num_waiting for lane in self.desk.lanes.lanes) == num_unanswered

    def teardown(self) -> None:
        while self.desk.has_work:
            self.desk.step()
        for job, ask, outcomes in self.open:
            (outcome,) = outcomes
            assert isinstance(outcome, Generation)
            assert outcome.token_ids == self.alone(ask, LIVE if job.version < 0 else job.version)


class Alone:
    """What a request gets when nothing else runs."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._known: dict[tuple[Ask, int], tuple[int, ...]] = {}

    def __call__(self, ask: Ask, version: int) -> tuple[int, ...]:
        if (ask, version) not in self._known:
            outcomes: list[Outcome] = []
            self._desk.submit(ask, version, outcomes)
            while self._desk.has_work:
                self._desk.step()
            (outcome,) = outcomes
            assert isinstance(outcome, Generation)
            self._known[ask, version] = outcome.token_ids
        return self._known[ask, version]


def test_cancelled_requests_take_no_other_request_along(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    live = snapshot_of(make_random_model(seed=1), folder, LIVE)
    pinned = snapshot_of(make_random_model(seed=2), folder, PINNED)
    alone = Alone(Desk(live, pinned))
    run_state_machine_as_test(
        lambda: Cancelling(Desk(live, pinned), alone),
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
