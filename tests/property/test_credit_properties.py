"""Credit, shaping and filters: rules that hold for every one that a recipe may name, and for all groups."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.algorithms.credit import CreditConfig, make_credit
from astraflow.algorithms.filters import FilterConfig, make_filter
from astraflow.algorithms.group_statistics import group_mean
from astraflow.algorithms.shaping import ShapingConfig, make_shaping
from astraflow.config import Config, Use
from astraflow.types.facts import GroupFacts, TrajectoryFacts


def variants(union: Any) -> list[type[Config]]:
    return [member for member in get_args(get_args(union)[0]) if member is not Use]


def name_of(config: type[Config]) -> str:
    return config.model_fields["name"].default


REWARDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])
TURNS = st.lists(st.tuples(REWARDS, st.integers(0, 2)), min_size=1, max_size=3)
TRAJECTORIES = st.lists(
    st.tuples(TURNS, st.sampled_from(["a", "b"]), st.integers(0, 25_000), st.booleans()),
    min_size=1,
    max_size=8,
)


def group_of(drawn: list[tuple[list[tuple[float, int]], str, int, bool]]) -> GroupFacts:
    """Trajectories of (turns of (reward, state key), role, extra tokens, whether truncated)."""
    return GroupFacts(
        policy="actor",
        group_id=0,
        trajectories=tuple(
            TrajectoryFacts(
                episode_idx=idx,
                role=role,
                reward=sum(reward for reward, _ in turns),
                turn_rewards=tuple(reward for reward, _ in turns),
                turn_spans=tuple((k, k + 1) for k in range(len(turns))),
                num_tokens=extra + len(turns),
                num_trained_tokens=extra + len(turns),
                is_truncated=truncated,
                state_keys=tuple(key for _, key in turns),
            )
            for idx, (turns, role, extra, truncated) in enumerate(drawn)
        ),
    )


def rows(found: Any) -> list[tuple[float, ...]]:
    """One tuple per trajectory, with one number or with one number per turn."""
    return [tuple(entry) if isinstance(entry, tuple | list) else (entry,) for entry in found]


def with_no_memory(config: type[Config]) -> Any:
    """A credit that is made anew for each group; one with a memory would compare groups."""
    return lambda facts: make_credit(config())(facts)  # type: ignore[arg-type]


PER_TRAJECTORY = [
    *(pytest.param(with_no_memory(c), id=f"credit/{name_of(c)}") for c in variants(CreditConfig)),
    *(pytest.param(make_shaping(c()), id=f"shaping/{name_of(c)}") for c in variants(ShapingConfig)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("function", PER_TRAJECTORY)
@settings(deadline=None, max_examples=25)
@given(TRAJECTORIES, st.randoms(use_true_random=False))
def test_the_order_of_a_group_does_not_matter(function: Any, drawn: list[Any], chance: random.Random) -> None:
    group = group_of(drawn)
    order = chance.sample(range(len(drawn)), len(drawn))
    moved = replace(group, trajectories=tuple(group.trajectories[i] for i in order))
    before, after = rows(function(group)), rows(function(moved))
    for position, i in enumerate(order):
        assert after[position] == pytest.approx(before[i], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("function", PER_TRAJECTORY)
@settings(deadline=None, max_examples=25)
@given(TRAJECTORIES)
def test_roles_do_not_see_each_other(function: Any, drawn: list[Any]) -> None:
    group = group_of(drawn)
    together = rows(function(group))
    for role in {t.role for t in group.trajectories}:
        own = [i for i, t in enumerate(group.trajectories) if t.role == role]
        alone = rows(function(replace(group, trajectories=tuple(group.trajectories[i] for i in own))))
        for i, entry in zip(own, alone, strict=True):
            assert together[i] == pytest.approx(entry, rel=1e-9, abs=1e-9)


def in_parts(facts: TrajectoryFacts, num_parts: int) -> list[TrajectoryFacts]:
    """A trajectory in forks, which share its trained tokens; each carries the whole reward."""
    cuts = [facts.num_trained_tokens * part // num_parts for part in range(num_parts + 1)]
    return [replace(facts, num_trained_tokens=end - start) for start, end in pairwise(cuts)]


UNSPLIT_ONLY = {"overlong"}
"""Punishes the length of single trajectories, which is what the model's context bounds."""


@pytest.mark.parametrize(
    "function", [p for p in PER_TRAJECTORY if str(p.id).split("/")[1] not in UNSPLIT_ONLY]
)
@settings(deadline=None, max_examples=50)
@given(TRAJECTORIES, st.lists(st.integers(0, 3), min_size=8, max_size=8), st.data())
def test_splitting_a_trajectory_into_forks_changes_no_advantage(
    function: Any, drawn: list[Any], episodes: list[int], data: st.DataObject
) -> None:
    spread = [replace(t, episode_idx=e) for t, e in zip(group_of(drawn).trajectories, episodes, strict=False)]
    # Enough other episodes of each role: a lone one has no other to be compared with.
    others = [replace(spread[0], episode_idx=8 + i, role=role) for i in range(2) for role in "ab"]
    group = GroupFacts("actor", 0, (*spread, *others))
    split = data.draw(st.integers(0, len(spread) - 1))
    num_parts = data.draw(st.integers(1, min(4, spread[split].num_trained_tokens)))
    parts = in_parts(spread[split], num_parts)
    forked = replace(group, trajectories=(*spread[:split], *parts, *spread[split + 1 :], *others))
    before, after = rows(function(group)), rows(function(forked))
    expected = [*before[:split], *[before[split]] * num_parts, *before[split + 1 :]]
    for own, wanted in zip(after, expected, strict=True):
        assert own == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert group_mean(forked) == pytest.approx(group_mean(group))


@pytest.mark.parametrize("config", variants(FilterConfig), ids=name_of)
@settings(deadline=None, max_examples=25)
@given(TRAJECTORIES, st.randoms(use_true_random=False))
def test_a_filter_does_not_depend_on_the_order(
    config: type[Config], drawn: list[Any], chance: random.Random
) -> None:
    keep = make_filter(config())  # type: ignore[arg-type]
    group = group_of(drawn)
    moved = replace(group, trajectories=tuple(chance.sample(group.trajectories, len(group.trajectories))))
    assert keep(group) == keep(moved)
