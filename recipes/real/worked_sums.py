"""Worked sums, from which a model learns how to add before it is trained by reward.

Calculate 78 + 37.  ->  8 + 7 = 15, 1 + 7 + 3 = 11. 78 + 37 = 115
"""

import random

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.user_input.splits import is_heldout

__all__ = ["work_out", "worked_sums"]

HELDOUT_FRAC = 0.1
"""Share of sums that are kept for evaluation, as in reasoning-gym's sources."""


def work_out(a: int, b: int) -> str:
    """Returns the working of a sum of two numbers of up to two digits, column by column from the right."""
    ones = f"{a % 10} + {b % 10} = {a % 10 + b % 10}"
    carry = "1 + " if a % 10 + b % 10 > 9 else ""
    tens = f"{carry}{a // 10} + {b // 10} = {(a % 10 + b % 10) // 10 + a // 10 + b // 10}"
    return f"{ones}, {tens}. {a} + {b} = {a + b}"


def worked_sums(num: int, seed: int) -> list[Demonstration]:
    """Makes `num` sums that are not held out, with their workings."""
    rng = random.Random(seed)
    made: list[Demonstration] = []
    while len(made) < num:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        prompt = f"Calculate {a} + {b}."
        if not is_heldout(prompt, frac=HELDOUT_FRAC):
            made.append(Demonstration(prompt, work_out(a, b)))
    return made
