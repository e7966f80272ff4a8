"""Compares answers by a judge's replies: what to show it, how to read it, and what the verdicts are worth.

Every pair of answers is shown in both orders. A judge that is biased by the order contradicts itself, so its
verdicts cancel out, and `Standings.flips` shows the bias. Nothing here asks a model.

Legend: N answers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Literal

from astraflow.workflows.roles import last_choice

__all__ = ["Method", "Standings", "ending", "orders", "read_ranks", "standings", "verdicts_in"]

Method = Literal["pairs", "list"]
_CHOICES = {"1": (0, 1), "2": (1, 0), "tie": (0, 0)}
"""Ranks of the two answers that a pair's verdict names; 0 is the best."""
_RANKING = re.compile(r"(?<![\d.])\d{1,2}(?:\s{0,9}[>=]\s{0,9}\d{1,2})+(?![\d.]*\d)")
_ENDINGS = {
    "pairs": "{only} the number of the better answer, 1 or 2, or with: tie",
    "list": "{only} one line that ranks all answers from best to worst, such as 2 > 3 = 1, where = means "
    "equally good",
}


@dataclass(frozen=True, slots=True)
class Standings:
    """What the verdicts on N answers say."""

    values: tuple[float, ...]
    """[N]; the mean over the other answers of 1 (better), 0.5 (equally good) or 0 (worse)."""
    num_pairs: int
    """Pairs with a verdict."""
    ties: int
    """Pairs that are equally good, after both orders."""
    twice: int
    """Pairs with a verdict in both orders."""
    flips: int
    """Pairs of `twice` whose verdict depends on the order."""
    decided: int
    """Verdicts that name a better answer."""
    first: int
    """Verdicts of `decided` that name the answer that was shown first."""


def orders(num: int, method: Method) -> list[tuple[int, ...]]:
    """The answers that each question shows, in order.

    Example: `orders(3, "list")` is `[(0, 1, 2), (2, 1, 0)]`.
    """
    everything = tuple(range(num))
    return list(permutations(everything, 2)) if method == "pairs" else [everything, everything[::-1]]


def ending(method: Method, *, only: bool) -> str:
    """What to tell the judge about the form of its verdict. `only`: it should say nothing else."""
    return f"{_ENDINGS[method].format(only='Reply with only' if only else 'End with')}."


def read_ranks(reply: str, num: int, method: Method) -> tuple[int, ...] | None:
    """The rank of each of the `num` answers that a question showed, 0 the best; None if that is unclear.

    Example: `read_ranks("2 > 3 = 1", 3, "list")` is `(1, 0, 1)`.
    """
    if method == "pairs":
        return _CHOICES.get(last_choice(reply, tuple(_CHOICES)))
    found = _RANKING.findall(reply)
    if not found:
        return None
    ranks: dict[int, int] = {}
    for rank, equals in enumerate(found[-1].split(">")):
        for number in equals.split("="):
            if int(number) in ranks:
                return None
            ranks[int(number)] = rank
    if sorted(ranks) != list(range(1, num + 1)):
        return None
    return tuple(ranks[number] for number in range(1, num + 1))


def verdicts_in(shown: Sequence[int], ranks: Sequence[int]) -> dict[tuple[int, int], float]:
    """The verdicts of one reply: (shown first, shown second) -> 1 if the first is better, 0.5, or 0."""
    return {
        (shown[a], shown[b]): 0.5 if ranks[a] == ranks[b] else float(ranks[a] < ranks[b])
        for a, b in combinations(range(len(shown)), 2)
    }


def standings(num: int, verdicts: Mapping[tuple[int, int], float]) -> Standings:
    """Sums up the verdicts on `num` answers. A pair without a verdict counts as equally good."""
    points = [0.0] * num
    num_pairs = ties = twice = flips = 0
    for i, j in combinations(range(num), 2):
        one = verdicts.get((i, j))
        other = 1.0 - verdicts[j, i] if (j, i) in verdicts else None
        given = [value for value in (one, other) if value is not None]
        value = sum(given) / len(given) if given else 0.5
        points[i] += value
        points[j] += 1.0 - value
        num_pairs += bool(given)
        ties += bool(given) and value == 0.5
        twice += len(given) == 2
        flips += len(given) == 2 and one != other
    decided = [value for value in verdicts.values() if value != 0.5]
    return Standings(
        values=tuple(point / (num - 1) for point in points),
        num_pairs=num_pairs,
        ties=ties,
        twice=twice,
        flips=flips,
        decided=len(decided),
        first=sum(value == 1.0 for value in decided),
    )
