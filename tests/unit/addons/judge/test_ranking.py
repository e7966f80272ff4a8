"""What a judge is shown, how its verdicts are read, and what they are worth."""

import pytest

from astraflow.addons.judge.ranking import Method, orders, read_ranks, standings, verdicts_in


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


def test_an_answer_is_worth_the_share_of_the_others_that_it_beats() -> None:
    found = standings(3, verdicts_in((0, 1, 2), (1, 0, 1)) | verdicts_in((2, 1, 0), (1, 0, 1)))
    assert found.values == (0.25, 1.0, 0.25)
    assert (found.num_pairs, found.ties, found.twice, found.flips) == (3, 1, 3, 0)
    assert (found.decided, found.first) == (4, 2)


def test_a_judge_that_prefers_what_it_sees_first_cancels_itself_out() -> None:
    verdicts = {pair: value for shown in orders(4, "pairs") for pair, value in verdicts_in(shown, (0, 1)).items()}
    found = standings(4, verdicts)
    assert found.values == (0.5,) * 4
    assert (found.twice, found.flips, found.ties) == (6, 6, 6)
    assert (found.decided, found.first) == (12, 12)


def test_a_bias_in_some_pairs_shows_as_their_share() -> None:
    verdicts = verdicts_in((0, 1, 2), (0, 1, 2)) | verdicts_in((2, 1, 0), (2, 1, 0))
    verdicts[1, 0] = 1.0  # prefers the first of this pair in either order
    found = standings(3, verdicts)
    assert (found.flips, found.twice) == (1, 3)
    assert found.values == (0.75, 0.75, 0.0)


def test_a_pair_is_decided_by_the_order_that_was_read_and_even_without_one() -> None:
    found = standings(3, {(0, 1): 1.0})
    assert found.values == (0.75, 0.25, 0.5)
    assert (found.num_pairs, found.twice, found.flips, found.ties) == (1, 0, 0, 0)
