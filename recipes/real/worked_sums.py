"""Worked sums, from which a model learns how to add before it is trained by reward.

Calculate 378 + 937.  ->  8 + 7 = 15, 1 + 7 + 3 = 11, 1 + 3 + 9 = 13. 378 + 937 = 1315
"""

import random

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.user_input.splits import is_heldout

__all__ = ["work_out", "worked_sums"]

HELDOUT_FRAC = 0.1
"""Share of sums that are kept for evaluation, as in reasoning-gym's sources."""


def work_out(a: int, b: int) -> str:
    """Returns the working of a sum of two numbers of three digits, column by column from the right."""
    carry = 0
    columns: list[str] = []
    for place in range(3):
        digits = [a // 10**place % 10, b // 10**place % 10]
        terms = [carry, *digits] if carry else digits
        columns.append(f"{' + '.join(map(str, terms))} = {sum(terms)}")
        carry = sum(terms) // 10
    return f"{', '.join(columns)}. {a} + {b} = {a + b}"


def worked_sums(num: int, seed: int) -> list[Demonstration]:
    """Makes `num` sums that are not held out, with their workings."""
    rng = random.Random(seed)
    made: list[Demonstration] = []
    while len(made) < num:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        prompt = f"Calculate {a} + {b}."
        if not is_heldout(prompt, frac=HELDOUT_FRAC):
            made.append(Demonstration(prompt, work_out(a, b)))
    return made
