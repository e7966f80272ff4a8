"""Curators that pass over tasks: each rule, the chain, and that a restored one goes on identically."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.algorithms.curation import Curation, CuratorConfig, make_curation
from astraflow.algorithms.task_gates import (
    CurriculumConfig,
    GresoConfig,
    GresoFloorsConfig,
    PriorityConfig,
    SolvedConfig,
)
from astraflow.algorithms.task_orders import WeightedConfig
from astraflow.config import Use
from astraflow.errors import ConfigError, DataError
from astraflow.types.facts import GroupFacts, Outcome, TrajectoryFacts

_ALL: tuple[CuratorConfig, ...] = (
    WeightedConfig(weights={"a": 2.0}),
    SolvedConfig(policy="actor"),
    GresoConfig(policy="actor", delta=0.2),
    CurriculumConfig(policy="actor"),
    PriorityConfig(),
)


def make_facts(*rewards: float) -> GroupFacts:
    """One trajectory a reward."""
    trajectories = tuple(
        TrajectoryFacts(
            episode_idx=idx,
            role="actor",
            reward=reward,
            turn_rewards=(),
            turn_spans=(),
            num_tokens=2,
            num_trained_tokens=1,
            is_truncated=False,
        )
        for idx, reward in enumerate(rewards)
    )
    return GroupFacts("actor", 0, trajectories)


def make_outcome(task_idx: int, *rewards: float, version: int = 0) -> Outcome:
    """A group of policy `actor`; the episodes' scores are the same."""
    facts = make_facts(*rewards)
    return Outcome(task_idx, {"actor": facts, "": facts}, {"actor": version, "": version})


def drawn(curation: Curation, num: int) -> Counter[int]:
    return Counter(curation.next() for _ in range(num))


def figures(curation: Curation) -> dict[str, float]:
    return {item.name.removeprefix("curation/"): item.value for item in curation.metrics()}


def test_weighted_gives_each_source_its_share_at_every_moment():
    curation = make_curation(
        [WeightedConfig(weights={"a": 2.0, "c": 1.0})], sources={"a": 10, "b": 3, "c": 1}, seed=0
    )
    drawn_of = Counter[str]()
    for num in range(1, 200):
        task = curation.next()
        drawn_of["a" if task < 10 else "b" if task < 13 else "c"] += 1
        assert abs(drawn_of["a"] - num / 2) <= 1
        assert abs(drawn_of["b"] - num / 4) <= 1


def test_weighted_shuffles_within_a_source():
    curation = make_curation([WeightedConfig()], sources={"a": 4, "b": 2}, seed=0)
    assert set(drawn(curation, 8)) == {0, 1, 2, 3, 4, 5}


def test_a_solved_task_comes_at_its_chance_of_revisit_only():
    curation = make_curation([SolvedConfig(revisit=0.1)], sources={"a": 2}, seed=0)
    for _ in range(2):
        curation.observe(make_outcome(0, 1.0, 1.0))
        curation.observe(make_outcome(1, 1.0, 0.0))
    counts = drawn(curation, 1000)
    # Of each pair of proposals, task 1 is drawn always and task 0 one time in ten: 1 draw in 11.
    assert 60 < counts[0] < 125
    assert figures(curation)["solved/skipped_solved"] == pytest.approx(1000 / 1.1 * 0.9, rel=0.1)


def test_a_task_is_not_solved_by_one_group_and_may_be_forgotten():
    gate = SolvedConfig(revisit=0.0).make(seed=0)
    gate.observe(make_outcome(3, 1.0))
    assert gate.why_skip(3) == ""
    gate.observe(make_outcome(3, 1.0))
    assert gate.why_skip(3) == "solved"
    gate.observe(make_outcome(3, 0.0))
    assert gate.why_skip(3) == ""


def test_greso_skips_with_the_papers_probability():
    gate = GresoConfig(start_p=0.5).make(seed=0)
    for _ in range(3):
        gate.observe(make_outcome(1, 0.0, 0.0))
    skipped = sum(gate.why_skip(1) == "hard" for _ in range(4000))
    assert skipped / 4000 == pytest.approx(1 - 0.5**3, abs=0.02)
    assert gate.why_skip(2) == ""
    gate.observe(make_outcome(1, 0.0, 1.0))
    assert all(gate.why_skip(1) == "" for _ in range(50))


def test_a_floor_bounds_the_skip_probability():
    gate = GresoConfig(start_p=0.5, floor_easy=0.4).make(seed=0)
    for _ in range(5):
        gate.observe(make_outcome(1, 1.0, 1.0))
    assert sum(gate.why_skip(1) == "easy" for _ in range(4000)) / 4000 == pytest.approx(0.6, abs=0.03)


def test_greso_moves_each_p_towards_its_target_once_a_version():
    gate = GresoConfig().make(seed=0)  # targets: 1/12 easy, 1/6 hard
    for _ in range(2):  # the second epoch counts
        for task in range(12):
            rewards = (1.0, 1.0) if task == 0 else (0.0, 0.0) if task == 1 else (0.0, 1.0)
            gate.observe(make_outcome(task, *rewards, version=0))
    state = gate.state()
    assert (state["p_easy"], state["p_hard"]) == (0.5, 0.5)
    gate.observe(make_outcome(2, 0.0, 1.0, version=1))
    state = gate.state()
    assert (state["p_easy"], state["p_hard"]) == (pytest.approx(0.49), pytest.approx(0.51))
    gate.observe(make_outcome(3, 0.0, 1.0, version=1))
    assert gate.state()["p_hard"] == pytest.approx(0.51)


def test_greso_adapts_from_the_second_epoch_on():
    """A worked example: 60 easy tasks and 60 hard ones, each visited once, one per version.

    Easy ones are half of the groups (target 1/12), hard ones half (target 1/6): if the first epoch counted,
    p would fall by 0.01 in 119 versions, from 0.5 to its bound of 0.05, and a task seen once would be skipped
    with 0.95. It is skipped with 0.5. In the second epoch 2 of 4 groups are easy and 1 hard: both p fall.
    """
    gate = GresoConfig().make(seed=0)
    for task in range(120):
        reward = float(task < 60)
        gate.observe(make_outcome(task, reward, reward, version=task))
    state = gate.state()
    assert (state["p_easy"], state["p_hard"]) == (0.5, 0.5)
    skipped = sum(gate.why_skip(task) == "easy" for task in range(60) for _ in range(50))
    assert skipped / 3000 == pytest.approx(0.5, abs=0.03)
    restored = GresoConfig().make(seed=0)
    restored.restore(gate.state())
    for task, rewards in ((0, (1.0, 1.0)), (1, (1.0, 1.0)), (60, (0.0, 0.0)), (61, (0.0, 1.0))):
        restored.observe(make_outcome(task, *rewards, version=120))
    restored.observe(make_outcome(200, 0.0, 0.0, version=121))
    assert restored.state()["p_easy"] == pytest.approx(0.49)
    assert restored.state()["p_hard"] == pytest.approx(0.49)
    # Task 0 was without variance twice in a row: P(skip) = 1 - 0.49^2.
    skipped = sum(restored.why_skip(0) == "easy" for _ in range(4000))
    assert skipped / 4000 == pytest.approx(1 - 0.49**2, abs=0.02)


def test_greso_keeps_p_within_its_bounds():
    gate = GresoConfig(delta=0.3).make(seed=0)
    for version in range(1, 10):
        gate.observe(make_outcome(0, 0.0, 0.0, version=version))
    state = gate.state()
    assert (state["p_easy"], state["p_hard"]) == (0.95, 0.05)


def test_greso_compares_rewards_within_a_role():
    gate = GresoConfig(start_p=0.05).make(seed=0)
    first, second = make_facts(1.0, 0.0).trajectories
    facts = GroupFacts("actor", 0, (first, dataclasses.replace(second, role="judge")))
    gate.observe(Outcome(0, {"": facts}, {"": 0}))
    assert gate.state()["in_a_row"][0][1] == 1


def test_gates_follow_the_policy_that_they_name():
    gate = SolvedConfig(policy="critic", revisit=0.0).make(seed=0)
    for _ in range(2):
        gate.observe(make_outcome(0, 1.0))
    assert gate.why_skip(0) == ""


def test_the_floors_variant_has_the_other_constants():
    config = GresoFloorsConfig()
    assert (config.floor_easy, config.floor_hard) == (0.10, 0.40)
    assert (config.target_easy, config.target_hard) == (0.083, 0.167)


def test_a_curriculum_moves_from_easy_to_hard():
    curation = make_curation([CurriculumConfig(rate=0.2, floor=0.01, width=0.2)], sources={"a": 2}, seed=0)
    curation.observe(make_outcome(0, 1.0, 1.0))
    curation.observe(make_outcome(1, 0.0, 0.0))
    easy_first = drawn(curation, 200)
    assert easy_first[0] > 180
    for version in range(1, 20):
        curation.observe(make_outcome(0, 1.0, 1.0, version=version))
    assert figures(curation)["curriculum/target"] == 1.0
    assert drawn(curation, 200)[1] > 180


def test_a_curriculum_draws_tasks_by_a_gaussian_of_their_distance_from_the_target():
    # Difficulties 0 and 0.5 with the target at 0: the second is two widths away, exp(-2) = 0.135.
    config = CurriculumConfig(rate=1e-9, floor=0.001, width=0.25)
    curation = make_curation([config], sources={"a": 2}, seed=0)
    curation.observe(make_outcome(0, 1.0, 1.0))
    curation.observe(make_outcome(1, 1.0, 0.0))
    counts = drawn(curation, 4000)
    assert counts[1] / counts[0] == pytest.approx(math.exp(-2), abs=0.02)


def test_priority_draws_in_proportion_to_learnability():
    curation = make_curation([PriorityConfig()], sources={"a": 2}, seed=0)
    curation.observe(make_outcome(0, 1.0, 0.0))
    curation.observe(make_outcome(1, 1.0, 0.0, 0.0, 0.0))
    counts = drawn(curation, 3000)
    assert counts[1] / counts[0] == pytest.approx(0.75, abs=0.06)


def test_a_draw_is_forced_if_every_task_is_passed_over():
    curation = make_curation([SolvedConfig(revisit=0.0)], sources={"a": 3}, seed=0)
    for task in range(3):
        for _ in range(2):
            curation.observe(make_outcome(task, 1.0))
    assert set(drawn(curation, 6)) <= {0, 1, 2}
    assert figures(curation) == {"selected": 6.0, "forced": 6.0, "solved/skipped_solved": 6000.0}


class Odd:
    """A gate of a user's own: passes over odd tasks."""

    def __init__(self, *, num_tasks: int, seed: int, but: int = -1) -> None:
        self.but = but

    def why_skip(self, task_idx: int) -> str:
        return "odd" if task_idx % 2 and task_idx != self.but else ""

    def observe(self, outcome: Outcome) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass


def test_a_users_own_gate_stands_in_the_chain():
    use = Use(use=f"{__name__}:Odd", args={"but": 3})
    curation = make_curation([use, SolvedConfig()], sources={"a": 6}, seed=0)
    assert set(drawn(curation, 30)) == {0, 2, 3, 4}


def test_the_same_curator_twice_is_refused_but_for_two_policies():
    with pytest.raises(ConfigError, match="a name occurs twice"):
        make_curation([GresoConfig(), GresoConfig()], sources={"a": 1}, seed=0)
    make_curation([GresoConfig(policy="x"), GresoConfig(policy="y")], sources={"a": 1}, seed=0)


def test_the_state_of_other_curators_is_refused():
    state = make_curation([GresoConfig()], sources={"a": 3}, seed=0).state()
    with pytest.raises(DataError, match="curators greso; the recipe names solved"):
        make_curation([SolvedConfig()], sources={"a": 3}, seed=0).restore(state)


@settings(max_examples=15, deadline=None)
@given(
    cuts=st.sets(st.integers(0, 119), max_size=4),
    seed=st.integers(0, 2**32),
    order=st.permutations(range(1, 5)),
    num_gates=st.integers(0, 4),
)
def test_a_chain_that_is_restored_anywhere_decides_identically(
    cuts: set[int], seed: int, order: list[int], num_gates: int
):
    configs = [_ALL[0], *(_ALL[i] for i in order[:num_gates])]

    def make() -> Curation:
        return make_curation(configs, sources={"a": 5, "b": 3}, seed=seed)

    whole, broken = make(), make()
    for step in range(120):
        if step in cuts:
            data = msgspec.msgpack.encode(broken.state())
            broken = make()
            broken.restore(msgspec.msgpack.decode(data, type=dict[str, Any]))
            assert msgspec.msgpack.encode(broken.state()) == data
        task = whole.next()
        assert broken.next() == task
        # Tasks 0 and 1 are always solved, 6 and 7 never.
        rewards = [float(task < 2 or (task < 6 and (seed + step + i) % 3 == 0)) for i in range(3)]
        for curation in (whole, broken):
            curation.observe(make_outcome(task, *rewards, version=step // 20))
    assert whole.metrics() == broken.metrics()
