"""Compares answers by a judge's replies: what to show it, how to read it, and what the verdicts are worth.

Every pair of answers is shown in both orders, so the verdicts of a judge that is biased by the order cancel
out, and the bias is measured. Nothing here asks a model.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import Literal

from astraflow.workflows.roles import last_choice

__all__ = ["ENDINGS", "Method", "observations", "orders", "read_ranks", "values", "verdicts_in"]

Method = Literal["pairs", "list"]
ENDINGS = {
    "pairs": "End with the number of the better answer, 1 or 2, or with: tie.",
    "list": "End with a line that ranks all answers from best to worst, such as 2 > 3 = 1 (= means equal).",
}
"""What the judge is told about the form of its verdict."""
_CHOICES = {"1": (0, 1), "2": (1, 0), "tie": (0, 0)}
"""Ranks of the two answers that a pair's verdict names; 0 is the best."""
_RANKING = re.compile(r"(?<![\d.])\d{1,2}(?:\s{0,9}[>=]\s{0,9}\d{1,2})+(?![\d.]*\d)")

_Verdicts = Mapping[tuple[int, int], float]
"""(shown first, shown second) -> 1 if the first is better, 0.5 if they are equally good, 0 if it is worse."""


def orders(num: int, method: Method) -> list[tuple[int, ...]]:
    """The answers that each question shows, in order. Example: `orders(2, "list") == [(0, 1), (1, 0)]`."""
    everything = tuple(range(num))
    return list(permutations(everything, 2)) if method == "pairs" else [everything, everything[::-1]]


def read_ranks(reply: str, num: int, method: Method) -> tuple[int, ...] | None:
    """The rank of each of the `num` answers that a question showed, 0 the best; None if that is unclear.

    Example: `read_ranks("2 > 3 = 1", 3, "list")` is `(1, 0, 1)`.
    """
    if method == "pairs":
        return _CHOICES.get(last_choice(reply, tuple(_CHOICES)))
    line = (_RANKING.findall(reply) or [""])[-1]
    ranked = [(int(n), rank) for rank, equals in enumerate(line.split(">")) for n in equals.split("=") if n]
    if sorted(number for number, _ in ranked) != list(range(1, num + 1)):
        return None
    return tuple(rank for _, rank in sorted(ranked))


def verdicts_in(shown: Sequence[int], ranks: Sequence[int]) -> dict[tuple[int, int], float]:
    """The verdicts of one reply."""
    return {
        (shown[a], shown[b]): 0.5 if ranks[a] == ranks[b] else float(ranks[a] < ranks[b])
        for a, b in combinations(range(len(shown)), 2)
    }


def values(num: int, verdicts: _Verdicts) -> list[float]:
    """The value of each answer: the mean of its verdicts over the others. A pair without one counts 0.5."""
    points = [0.0] * num
    for i, j in combinations(range(num), 2):
        given = _both(verdicts, i, j)
        value = sum(given) / len(given) if given else 0.5
        points[i] += value
        points[j] += 1.0 - value
    return [point / (num - 1) for point in points]


def observations(num: int, verdicts: _Verdicts) -> Iterator[tuple[str, bool]]:
    """What the verdicts say about the judge: for each metric, whether it holds in each case that counts.

    `judge_ties`: a pair is equally good, after both orders. `judge_flips`: its verdict depends on the order.
    `judge_first`: a verdict that prefers one of the answers prefers the one shown first.
    """
    for i, j in combinations(range(num), 2):
        given = _both(verdicts, i, j)
        if given:
            yield "judge_ties", sum(given) == 0.5 * len(given)
        if len(given) == 2:
            yield "judge_flips", given[0] != given[1]
    for value in verdicts.values():
        if value != 0.5:
            yield "judge_first", value == 1.0


def _both(verdicts: _Verdicts, i: int, j: int) -> list[float]:
    """The verdicts on a pair, as values of its answer `i`."""
    one = [verdicts[i, j]] if (i, j) in verdicts else []
    return [*one, 1.0 - verdicts[j, i]] if (j, i) in verdicts else one
