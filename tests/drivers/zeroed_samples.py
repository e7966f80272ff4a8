"""Groups in which rules set samples to zero: any filters, shaping, credit and normalizer, one after the
other, as a table applies them.

`check_many(5000)` draws as many tables with two groups each.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.config import parse_config
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import EpisodeFacts, PayloadRef, SampleView, TrajectoryMeta
from astraflow.dataflow.core.state import EpisodeState, GroupState, ReadyGroup
from astraflow.dataflow.core.tables import normalize_advantages
from astraflow.dataflow.core.valuation import Discard, Valuation

__all__ = ["check_many"]

RIGHT, WRONG = "verifier_of_right", "verifier_of_wrong"
ROLES = (RIGHT, WRONG, "solver")
MASK = {"name": "truncated", "action": "mask"}
FILTERS: tuple[dict[str, Any], ...] = (
    MASK,
    {"name": "zero_variance"},
    {"name": "length", "max_frac": 1.0},
    {"name": "truncated", "max_frac": 1.0},
    {"name": "repetition", "max_frac": 1.0},
    {"name": "reward_range", "low": -10.0, "high": 10.0},
)
SHAPINGS: tuple[dict[str, Any], ...] = (
    {"name": "overlong", "max_tokens": 60, "cache_tokens": 40},
    {"name": "length", "weight": 0.3},
)
COMPARING = ("group_relative", "rloo", "opo", "max_rl", "gdpo")
"""Credit that gives the only trajectory of a role nothing."""
CREDITS: tuple[dict[str, Any], ...] = (
    *({"name": name} for name in COMPARING),
    {"name": "group_relative", "scale": "none"},
    {"name": "role_balanced"},
    {"name": "pass_at_k", "k": 2},
    {"name": "reinforce_plus_plus"},
    {"name": "reinforce_plus_plus", "baseline": "group"},
    {"name": "turn_discount"},
    {"name": "gigpo"},
    {"name": "gae"},
    {"name": "rae"},
    {"name": "hierarchical", "heads": ["solver"]},
    {"name": "hierarchical", "heads": ["solver"], "team_weight": 0.5},
)


@dataclass(frozen=True)
class Drawn:
    """One trajectory."""

    episode: int
    role: str
    reward: float
    turns: tuple[int, ...]
    """Trained tokens of each turn."""
    is_truncated: bool


TRAJECTORIES = st.lists(
    st.builds(
        Drawn,
        episode=st.integers(0, 3),
        role=st.sampled_from(ROLES),
        reward=st.sampled_from((0.0, 1.0, 0.7, 1 / 3, -1.0)),
        turns=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
        is_truncated=st.booleans(),
    ),
    min_size=1,
    max_size=7,
)
TABLES = st.fixed_dictionaries(
    {
        "filters": st.lists(st.sampled_from(FILTERS), max_size=3),
        "shaping": st.lists(st.sampled_from(SHAPINGS), max_size=2),
        "credit": st.sampled_from(CREDITS),
        "normalize": st.sampled_from(("none", "scale", "whiten")),
    }
)


def check_many(num: int) -> Counter[str]:
    """Checks as many tables, and returns how many samples were zeroed by what."""
    counts: Counter[str] = Counter()

    @settings(max_examples=num, deadline=None, suppress_health_check=list(HealthCheck))
    @given(TABLES, st.lists(TRAJECTORIES, min_size=2, max_size=2), st.data())
    def check(fields: dict[str, Any], groups: list[list[Drawn]], data: st.DataObject) -> None:
        table = parse_config({"group_size": 4, **fields}, TableConfig)
        before = take(table, groups)
        for kept, drawn in before:
            assert_zero_is_final(table, kept, drawn)
            counts.update(sample.zeroed_by for sample in kept.samples)
        assert_takes_part_in_nothing(table, groups, before, data)

    check()
    return counts


def take(table: TableConfig, groups: Sequence[Sequence[Drawn]]) -> list[tuple[ReadyGroup, list[Drawn]]]:
    """The groups that the table keeps, as a batch gets them, with what they were made of."""
    valuation = Valuation(table)
    worth = [valuation.value("actor", make_group(idx, drawn)) for idx, drawn in enumerate(groups)]
    kept = [(group, in_order(drawn)) for group, drawn in zip(worth, groups, strict=True) if is_kept(group)]
    ready = [group for group, _ in kept if isinstance(group, ReadyGroup)]
    normalized = normalize_advantages(ready, table.normalization)
    return [(group, drawn) for group, (_, drawn) in zip(normalized, kept, strict=True)]


def is_kept(worth: ReadyGroup | Discard) -> bool:
    return isinstance(worth, ReadyGroup)


def in_order(drawn: Sequence[Drawn]) -> list[Drawn]:
    """The order in which a table sees the trajectories."""
    return sorted(drawn, key=lambda one: one.episode)


def make_group(group_id: int, drawn: Sequence[Drawn]) -> GroupState:
    episodes = [
        EpisodeState(
            status="good",
            facts=EpisodeFacts(
                trajectories=tuple(make_meta(one) for one in drawn if one.episode == idx),
                score=0.0, metrics=(), duration_s=1.0,
            ),
        )
        for idx in range(4)
    ]  # fmt: skip
    return GroupState(
        id=group_id, task_id="", task_idx=0, source="", source_idx=0, undecided=[], preferred_worker="",
        episodes=episodes, num_open=0,
    )  # fmt: skip


def make_meta(drawn: Drawn) -> TrajectoryMeta:
    ends = [sum(drawn.turns[: idx + 1]) for idx in range(len(drawn.turns))]
    spans = tuple((2 + end - num, 2 + end) for end, num in zip(ends, drawn.turns, strict=True))
    num = sum(drawn.turns)
    return TrajectoryMeta(
        policy="actor", role=drawn.role, reward=drawn.reward, num_tokens=2 + num, num_trained_tokens=num,
        oldest_version=0, newest_version=0, finish_reason="length" if drawn.is_truncated else "stop",
        turn_spans=spans, turn_rewards=(0.0,) * len(drawn.turns), num_trained_by_turn=drawn.turns,
        payload=PayloadRef(segment=0, offset=0, length=1), state_keys=tuple(range(len(drawn.turns))),
    )  # fmt: skip


def is_zero(sample: SampleView) -> bool:
    return all(value == 0.0 for _, _, value in sample.advantages)


def assert_zero_is_final(table: TableConfig, kept: ReadyGroup, drawn: Sequence[Drawn]) -> None:
    """What the rules zero is 0 to the bit, and the group's sums are those of the other samples."""
    assert len(kept.samples) == len(drawn)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=ReadyGroup) == kept  # as in snapshots
    for sample, wanted in zip(kept.samples, expected_zeros(table, drawn), strict=True):
        assert not wanted or (sample.zeroed_by and is_zero(sample))
        assert not sample.zeroed_by or is_zero(sample)
    trained = [(s, d) for s, d in zip(kept.samples, drawn, strict=True) if not s.zeroed_by]
    assert kept.num_trained_tokens == sum(sum(d.turns) for _, d in trained)
    assert kept.num_sampled_tokens == sum(sum(d.turns) for d in drawn)
    total = 0.0
    for sample, own in trained:
        values = [value for _, _, value in sample.advantages]
        weights = own.turns if len(values) == len(own.turns) else (sum(own.turns),)
        total += sum(value * weight for value, weight in zip(values, weights, strict=True))
    assert abs(kept.advantage_sum - total) <= 1e-6 * max(1.0, abs(total))


def masks(table: TableConfig) -> bool:
    return any(config.name == "truncated" and config.action == "mask" for config in table.filters)


def expected_zeros(table: TableConfig, drawn: Sequence[Drawn]) -> list[bool]:
    """Which trajectories a rule certainly sets to zero, by the rules' words."""
    is_masked = [masks(table) and one.is_truncated for one in drawn]
    left = [one for one, masked in zip(drawn, is_masked, strict=True) if not masked]
    counts = Counter(one.role for one in left)
    roles: set[str] = set()
    if table.credit.name in COMPARING:
        roles = {role for role, count in counts.items() if count == 1}
    elif table.credit.name == "role_balanced" and not {RIGHT, WRONG} <= counts.keys():
        roles = {RIGHT, WRONG}
    return [masked or one.role in roles for one, masked in zip(drawn, is_masked, strict=True)]


def assert_takes_part_in_nothing(
    table: TableConfig,
    groups: Sequence[Sequence[Drawn]],
    before: list[tuple[ReadyGroup, list[Drawn]]],
    data: st.DataObject,
) -> None:
    """Other rewards and lengths of what a filter masks change no other sample. This needs the mask to come
    first: filters before it see everything."""
    if not (table.filters and masks(table) and table.filters[0].name == "truncated"):
        return
    if not masks(table.model_copy(update={"filters": table.filters[:1]})):
        return
    reward = data.draw(st.sampled_from((0.0, 5.0, -3.0)))
    factor = data.draw(st.integers(1, 5))
    changed = [
        [
            replace(one, reward=reward, turns=tuple(num * factor for num in one.turns))
            if one.is_truncated
            else one
            for one in drawn
        ]
        for drawn in groups
    ]
    after = take(table, changed)
    assert [group.group_id for group, _ in after] == [group.group_id for group, _ in before]
    for (mine, _), (theirs, _) in zip(after, before, strict=True):
        for found, expected in zip(mine.samples, theirs.samples, strict=True):
            if expected.zeroed_by != "filter":
                values = [value for _, _, value in found.advantages]
                assert values == [value for _, _, value in expected.advantages]
