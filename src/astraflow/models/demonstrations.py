"""Generated demonstrations for a warm start: prompts with replies of which only a part shows good work."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from astraflow.config import Use, check_args, load_attr
from astraflow.models.spec import AdditionCheckConfig, AdditionConfig, DemonstrationConfig
from astraflow.splits import is_heldout

__all__ = ["Demonstration", "column_addition", "make_demonstrations"]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One exchange. Example: `Demonstration("Calculate 378 + 937.", "15,11,13=1315")`."""

    prompt: str
    reply: str


def make_demonstrations(config: DemonstrationConfig, *, num: int, seed: int) -> Sequence[Demonstration]:
    """`num` demonstrations; the same for the same arguments.

    A `use` component is called with `num`, `seed` and its own arguments. Raises: ConfigError.
    """
    match config:
        case AdditionConfig():
            return _additions(config, num=num, rng=random.Random(seed))
        case AdditionCheckConfig():
            return _addition_checks(config, num=num, rng=random.Random(seed))
        case Use():
            return _user_demonstrations(config, num=num, seed=seed)


def column_addition(a: int, b: int, *, carries: bool) -> str:
    """Column sums from the right, then the sum: `15,11,13=1315`; without carries `15,10,12=1205`."""
    width = max(len(str(a)), len(str(b)))
    carry = 0
    sums = list[int]()
    for place in range(width):
        column = a // 10**place % 10 + b // 10**place % 10 + (carry if carries else 0)
        sums.append(column)
        carry = column // 10
    total = sum(column % 10 * 10**place for place, column in enumerate(sums)) + carry * 10**width
    return f"{','.join(map(str, sums))}={total}"


def _additions(config: AdditionConfig, *, num: int, rng: random.Random) -> Sequence[Demonstration]:
    made = list[Demonstration]()
    for idx in range(num):
        prompt, a, b = _problem(config, rng)
        reply = column_addition(a, b, carries=rng.random() < _careful_share(config, idx / num))
        made.append(Demonstration(config.preamble + prompt, reply))
    return made


def _addition_checks(config: AdditionCheckConfig, *, num: int, rng: random.Random) -> Sequence[Demonstration]:
    made = list[Demonstration]()
    for idx in range(num):
        prompt, a, b = _problem(config, rng)
        right = column_addition(a, b, carries=True)
        if rng.random() < config.solve_frac:
            made.append(Demonstration(prompt, right))
            continue
        shown = right if rng.random() < config.right_frac else _wrong_working(a, b, rng)
        believed = right if rng.random() < _careful_share(config, idx / num) else shown
        verdict = "y" if shown == believed else "n"
        if rng.random() < config.flawed_frac:
            verdict = rng.choice("yn")
        made.append(Demonstration(f"{prompt}{shown}?", f"{_marked(shown, believed)}={verdict}"))
    return made


def _careful_share(config: AdditionConfig | AdditionCheckConfig, progress: float) -> float:
    first, last = config.careful_frac
    return first + (last - first) * progress


def _marked(shown: str, believed: str) -> str:
    """The column sums that are believed right, each with `y` or `n` for the one shown: `15y11n13n`."""
    pairs = zip(*(text.partition("=")[0].split(",") for text in (shown, believed)), strict=True)
    return "".join(f"{column}{'y' if given == column else 'n'}" for given, column in pairs)


def _wrong_working(a: int, b: int, rng: random.Random) -> str:
    """Forgotten carries; where there are none to forget, one digit of a column changed."""
    right, hasty = (column_addition(a, b, carries=carries) for carries in (True, False))
    if hasty != right:
        return hasty
    columns, _, result = right.partition("=")
    place = rng.choice([i for i, char in enumerate(columns) if char.isdigit()])
    digit = rng.choice([d for d in "0123456789" if d != columns[place]])
    return f"{columns[:place]}{digit}{columns[place + 1 :]}={result}"


def _problem(config: AdditionConfig | AdditionCheckConfig, rng: random.Random) -> tuple[str, int, int]:
    """A prompt that is not held out, and its numbers."""
    while True:
        a, b = (_number(config, rng) for _ in range(2))
        prompt = f"Calculate {a} + {b}."
        if not is_heldout(prompt, frac=config.heldout_frac):
            return prompt, a, b


def _number(config: AdditionConfig | AdditionCheckConfig, rng: random.Random) -> int:
    is_mixed = rng.random() < config.mixed_frac
    digits = rng.randint(1, config.max_digits) if is_mixed else config.max_digits
    return rng.randint(0, 10**digits)


def _user_demonstrations(config: Use, *, num: int, seed: int) -> Sequence[Demonstration]:
    maker = cast("Callable[..., Sequence[Demonstration]]", load_attr(config.use, where="demonstrations.use"))
    args: dict[str, Any] = {"num": num, "seed": seed, **config.args}
    check_args(maker, args, where="demonstrations.args")
    return maker(**args)
