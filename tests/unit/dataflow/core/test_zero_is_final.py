"""What a rule sets to zero stays zero in the batches of a run, and keeps its fate."""

from collections.abc import Sequence
from typing import ClassVar

import msgspec
import pytest

from astraflow.algorithms.credit import UNCOMPARED
from astraflow.config import Use
from astraflow.dataflow.core.commands import BatchView
from astraflow.types import MetricItem
from astraflow.types.facts import GroupFacts, Outcome
from drivers.core_driver import Driver, make_core_plan, make_facts, make_meta, make_table

Spec = tuple[str, float, int, str]
"""Role, reward, trained tokens, and finish reason of an episode."""


def play(*groups: Sequence[Spec], steps: int = 1, **table: object) -> tuple[Driver, list[BatchView]]:
    """A run in which the groups take turns."""
    plan = make_core_plan(table=make_table(group_size=4, groups_per_batch=len(groups), **table))
    driver = Driver(plan)
    driver.start()
    views = []
    for _ in range(steps):
        numbers: dict[str, int] = {}
        for lease in driver.lease(4 * len(groups)):
            number = numbers.setdefault(lease.id.split(".")[0], len(numbers))
            role, reward, num, reason = groups[number][lease.episode_idx]
            meta = make_meta(reward=reward, num_tokens=num + 6, num_trained=num, role=role)
            driver.result(lease.id, make_facts(msgspec.structs.replace(meta, finish_reason=reason)))
        views.append(driver.train())
    return driver, views


def advantages(view: BatchView) -> list[float]:
    return [sample.advantages[0][2] for sample in view.samples]


TRUNCATED = [
    ("actor", 1.0, 200, "stop"),
    ("actor", 0.0, 1500, "stop"),
    ("actor", 0.0, 1500, "stop"),
    ("actor", 0.0, 4000, "length"),
]
MASK = {"name": "truncated", "action": "mask"}


@pytest.mark.parametrize(
    "table",
    [
        {"normalize": "none"},
        {"normalize": "scale"},
        {"normalize": "whiten"},
        {"credit": {"name": "reinforce_plus_plus"}},
        {"credit": {"name": "reinforce_plus_plus", "baseline": "group"}},
        {"credit": {"name": "gdpo"}},
        {"normalize": "whiten", "shaping": [{"name": "length"}, {"name": "overlong", "max_tokens": 5000}]},
        {"credit": {"name": "gae"}},
        {"credit": {"name": "rae"}, "normalize": "whiten"},
    ],
    ids=str,
)
def test_a_masked_answer_keeps_0_and_is_marked(table: dict[str, object]) -> None:
    _, (view,) = play(TRUNCATED, TRUNCATED, filters=[MASK], **table)
    assert [sample.zeroed_by for sample in view.samples] == ["", "", "", "filter"] * 2
    assert advantages(view)[3::4] == [0.0, 0.0]
    assert advantages(view)[0] > 0
    assert view.totals.num_trained_tokens == 2 * 7200


def test_a_masked_answer_counts_in_no_mean_of_the_batch() -> None:
    _, (view,) = play(TRUNCATED, filters=[MASK], normalize="whiten")
    values, weights = advantages(view)[:3], (200, 1500, 1500)
    assert sum(v * w for v, w in zip(values, weights, strict=True)) / 3200 == pytest.approx(0, abs=1e-9)
    assert sum(v * v * w for v, w in zip(values, weights, strict=True)) / 3200 == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(("order", "fate"), [((1, 0), "trained"), ((0, 1), "filtered")])
def test_filters_after_a_mask_see_what_is_left(order: tuple[int, int], fate: str) -> None:
    filters = [(MASK, {"name": "zero_variance"})[idx] for idx in order]
    driver = Driver(make_core_plan(table=make_table(group_size=4, groups_per_batch=1, filters=filters)))
    driver.start()
    for lease in driver.lease(4):
        is_cut = lease.episode_idx == 3
        meta = make_meta(reward=0.0 if is_cut else 1.0)
        meta = msgspec.structs.replace(meta, finish_reason="length" if is_cut else "stop")
        driver.result(lease.id, make_facts(meta))
    if fate == "trained":
        driver.train()
    assert driver.fate_of(0) == [fate]


LACKING = [("verifier_of_right", 1.0, 300, "stop")] * 3 + [("verifier_of_right", 0.0, 900, "stop")]
WHOLE = [
    ("verifier_of_right", 1.0, 300, "stop"),
    ("verifier_of_right", 1.0, 300, "stop"),
    ("verifier_of_wrong", 0.0, 900, "stop"),
    ("verifier_of_wrong", 1.0, 900, "stop"),
]


@pytest.mark.parametrize("normalize", ["none", "scale", "whiten"])
def test_a_role_without_its_counterpart_keeps_0(normalize: str) -> None:
    table = {"credit": {"name": "role_balanced"}, "filters": [{"name": "zero_variance"}]}
    _, (view,) = play(LACKING, WHOLE, normalize=normalize, **table)
    assert advantages(view)[:4] == [0.0] * 4
    assert all(advantages(view)[4:])
    assert [sample.zeroed_by for sample in view.samples] == ["credit"] * 4 + [""] * 4


@pytest.mark.parametrize("credit", ["group_relative", "rloo", "opo", "max_rl", "gdpo", "hierarchical"])
def test_the_only_trajectory_of_a_role_keeps_0_when_the_batch_is_whitened(credit: str) -> None:
    lone = [
        ("proposer", 0.3, 50, "stop"),
        *(("solver", r, 100 * n, "stop") for n, r in ((1, 1.0), (2, 0.0), (9, 1.0))),
    ]
    _, (view,) = play(lone, TRUNCATED, credit={"name": credit}, normalize="whiten")
    assert advantages(view)[0] == 0.0
    assert view.samples[0].zeroed_by == "credit"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=BatchView) == view


def test_zeros_stay_zero_when_a_group_is_replayed() -> None:
    replay = {"ratio": 1.0, "max_uses": 3}
    driver, views = play(
        TRUNCATED, TRUNCATED, steps=3, filters=[MASK], normalize="whiten", replay=replay,
        max_staleness=9,
    )  # fmt: skip
    last = views[-1]
    assert len(last.samples) > 8
    for sample in last.samples:
        assert (sample.zeroed_by == "filter") == (sample.advantages[0][2] == 0.0)
    assert driver.fates("actor").trained == 6


def some_uncompared(facts: GroupFacts) -> list[float]:
    """A credit of a user's own."""
    return [UNCOMPARED if t.reward == 0 else t.reward for t in facts.trajectories]


def test_credit_of_your_own_can_leave_trajectories_out() -> None:
    _, (view,) = play(
        TRUNCATED, credit={"name": "use", "use": f"{__name__}:some_uncompared"}, normalize="whiten"
    )
    assert [sample.zeroed_by for sample in view.samples] == ["", "credit", "credit", "credit"]
    assert advantages(view)[1:] == [0.0] * 3


class Reader:
    """A curator of a user's own that keeps what it gets."""

    seen: ClassVar[list[Outcome]] = []

    def __init__(self, *, num_tasks: int, seed: int) -> None:
        del num_tasks, seed

    def why_skip(self, task_idx: int) -> str:
        del task_idx
        return ""

    def observe(self, outcome: Outcome) -> None:
        Reader.seen.append(outcome)

    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: dict[str, int]) -> None:
        del state


def test_a_curator_of_your_own_gets_metrics_source_and_repetition() -> None:
    Reader.seen.clear()
    driver = Driver(make_core_plan(curators=(Use(use=f"{__name__}:Reader"),)))
    driver.start()
    for lease in driver.lease(2):
        facts = make_facts(msgspec.structs.replace(make_meta(), repeated_frac=0.25))
        driver.result(
            lease.id, msgspec.structs.replace(facts, metrics=(MetricItem("num_calls", 3.0, "mean"),))
        )
    (outcome,) = Reader.seen
    for name in ("actor", ""):
        assert outcome.groups[name].metrics[1] == {"num_calls": 3.0}
        assert outcome.groups[name].source == "train"
    assert outcome.groups["actor"].trajectories[0].repeated_frac == 0.25
    assert driver.core.repetition_of == {"actor"}


def test_a_policys_status_has_the_share_of_turns_with_an_unread_call() -> None:
    driver = Driver(make_core_plan())
    driver.start()
    for lease in driver.lease(2):
        metrics = (MetricItem("turns", 4.0), MetricItem("unread_calls", 1.0))
        driver.result(lease.id, msgspec.structs.replace(make_facts(), metrics=metrics))
    assert [policy.unread_calls_frac for policy in driver.core.policy_status()] == [0.25]


@pytest.mark.parametrize("part", ["filters", "shaping", "credit"])
def test_repetition_is_measured_for_every_part_of_your_own(part: str) -> None:
    own = {"name": "use", "use": f"{__name__}:some_uncompared"}
    plan = make_core_plan(table=make_table(**{part: own if part == "credit" else [own]}))
    assert Driver(plan).core.repetition_of == {"actor"}
    assert Driver(make_core_plan()).core.repetition_of == frozenset()
