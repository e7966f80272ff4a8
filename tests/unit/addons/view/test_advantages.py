import pytest

from astraflow.addons.view.advantages import Advantages
from astraflow.algorithms.credit import GroupRelativeCredit, RaeCredit
from astraflow.algorithms.filters import ZeroVarianceFilter
from astraflow.config import Use
from astraflow.dataflow.config import TableConfig
from drivers.core_driver import make_facts, make_meta


def test_advantages_are_those_of_the_credit() -> None:
    advantages = Advantages("actor", TableConfig(group_size=2))
    episodes = {0: make_facts(make_meta(reward=0.0)), 1: make_facts(make_meta(reward=1.0))}
    expected = advantages.of(0, episodes)
    assert {place: spans[0][2] for place, spans in expected.items()} == pytest.approx(
        {(0, 0): -0.7071, (1, 0): 0.7071}, abs=1e-3
    )
    # Remembered or not, they are the same.
    for _ in range(2):
        assert advantages.means(1, episodes) == {place: spans[0][2] for place, spans in expected.items()}


def test_a_filtered_group_has_none() -> None:
    table = TableConfig(group_size=2, filters=(ZeroVarianceFilter(),))
    episodes = {idx: make_facts(make_meta(reward=1.0)) for idx in range(2)}
    assert Advantages("actor", table).means(0, episodes) == {}


def test_what_cannot_be_known_is_left_open() -> None:
    episodes = {0: make_facts(make_meta(reward=1.0))}
    own = TableConfig(credit=Use(use="os:system", args={}))
    assert Advantages("actor", own).means(0, episodes) == {}
    remembers = TableConfig(credit=RaeCredit())
    assert Advantages("actor", remembers).means(0, episodes) == {}
    assert Advantages("actor", TableConfig(credit=GroupRelativeCredit())).means(0, {}) == {}
