"""What a judge is shown, how its verdicts are read, and what they are worth."""

import pytest

from astraflow.addons.judge.compare.ranking import (
    Method,
    observations,
    orders,
    read_ranks,
    values,
    verdicts_in,
)


def test_every_pair_is_shown_in_both_orders() -> None:
    for method in ("pairs", "list"):
        asked = [pair for shown in orders(4, method) for pair in verdicts_in(shown, range(len(shown)))]
        assert sorted(asked) == [(i, j) for i in range(4) for j in range(4) if i != j]
    assert len(orders(4, "list")) == 2


@pytest.mark.parametrize(
    ("reply", "num", "method", "ranks"),
    [
        ("The second is shorter. 2", 2, "pairs", (1, 0)),
        ("Answer 1 is better.\n\n1", 2, "pairs", (0, 1)),
        ("tie", 2, "pairs", (0, 0)),
        ("Both answers have merits.", 2, "pairs", None),
        ("", 2, "pairs", None),
        ("2 > 3 = 1", 3, "list", (1, 0, 1)),
        ("First I thought 1 > 2 > 3.\nRanking: **3>2>1**.", 3, "list", (2, 1, 0)),
        ("2 > 3", 3, "list", None),
        ("2 > 3 > 3", 3, "list", None),
        ("2 > 3 > 4", 3, "list", None),
        ("The second one, then the third.", 3, "list", None),
        ("1" * 100_000, 3, "list", None),
    ],
)
def test_a_reply_is_read_or_unclear(
    reply: str, num: int, method: Method, ranks: tuple[int, ...] | None
) -> None:
    assert read_ranks(reply, num, method) == ranks


def shares(num: int, verdicts: dict[tuple[int, int], float]) -> dict[str, float]:
    seen: dict[str, list[bool]] = {}
    for name, holds in observations(num, verdicts):
        seen.setdefault(name, []).append(holds)
    return {name: sum(cases) / len(cases) for name, cases in seen.items()}


def test_an_answer_is_worth_the_share_of_the_others_that_it_beats() -> None:
    verdicts = verdicts_in((0, 1, 2), (1, 0, 1)) | verdicts_in((2, 1, 0), (1, 0, 1))
    assert values(3, verdicts) == [0.25, 1.0, 0.25]
    assert shares(3, verdicts) == {"judge_ties": 1 / 3, "judge_flips": 0.0, "judge_first": 0.5}


def test_a_judge_that_prefers_what_it_sees_first_cancels_itself_out() -> None:
    verdicts = {
        pair: value for shown in orders(4, "pairs") for pair, value in verdicts_in(shown, (0, 1)).items()
    }
    assert values(4, verdicts) == [0.5] * 4
    assert shares(4, verdicts) == {"judge_ties": 1.0, "judge_flips": 1.0, "judge_first": 1.0}


def test_a_bias_in_some_pairs_shows_as_their_share() -> None:
    verdicts = verdicts_in((0, 1, 2), (0, 1, 2)) | verdicts_in((2, 1, 0), (2, 1, 0))
    verdicts[1, 0] = 1.0  # prefers the first of this pair in either order
    assert shares(3, verdicts)["judge_flips"] == 1 / 3
    assert values(3, verdicts) == [0.75, 0.75, 0.0]


def test_a_pair_is_decided_by_the_order_that_was_read_and_even_without_one() -> None:
    assert values(3, {(0, 1): 1.0}) == [0.75, 0.25, 0.5]
    assert shares(3, {(0, 1): 1.0}) == {"judge_ties": 0.0, "judge_first": 1.0}
