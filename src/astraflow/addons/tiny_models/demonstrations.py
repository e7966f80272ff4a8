"""Generates demonstrations for a warm start: prompts with replies, of which only a part shows good work.

A model that has seen them can solve its task, but seldom does. Reinforcement learning then has something to
find and something to improve.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from astraflow.addons.tiny_models.spec import AdditionCheckConfig, AdditionConfig, DemonstrationConfig
from astraflow.config import Use, check_args, load_attr
from astraflow.types import Message, ToolSpec
from astraflow.user_input.splits import is_heldout

__all__ = ["Demonstration", "column_addition", "make_demonstrations"]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and the reply to it, or a whole conversation.

    Example: `Demonstration("Calculate 378 + 937.", "15,11,13=1315")`, or `Demonstration(messages=[question,
    call, result, answer], tools=[search])`.
    """

    prompt: str = ""
    reply: str = ""
    messages: Sequence[Message] = ()
    """A conversation in the place of prompt and reply; each of the assistant's messages is learned."""
    tools: Sequence[ToolSpec] = ()
    """Functions that the chat template shows before the conversation."""

    @property
    def conversation(self) -> Sequence[Message]:
        """The messages; a prompt and its reply are two."""
        if self.messages:
            return self.messages
        return (Message(role="user", content=self.prompt), Message(role="assistant", content=self.reply))


def make_demonstrations(config: DemonstrationConfig, *, num: int, seed: int) -> Sequence[Demonstration]:
    """Makes `num` demonstrations, the same ones for the same arguments.

    A `use` component is called with `num`, `seed` and its own arguments.
    Raises: ConfigError if such a component cannot be loaded or does not take these arguments.
    """
    match config:
        case AdditionConfig():
            return _additions(config, num=num, rng=random.Random(seed))
        case AdditionCheckConfig():
            return _addition_checks(config, num=num, rng=random.Random(seed))
        case Use():
            return _user_demonstrations(config, num=num, seed=seed)


def column_addition(a: int, b: int, *, carries: bool) -> str:
    """Works a sum out: the sums of the columns from the right, then the result.

    Example: for 378 + 937 it is `15,11,13=1315`. Without carries, which is wrong, it is `15,10,12=1205`.
    """
    width = max(len(str(a)), len(str(b)))
    carry = 0
    sums = list[int]()
    for place in range(width):
        digit_of_a = a // 10**place % 10
        digit_of_b = b // 10**place % 10
        column = digit_of_a + digit_of_b + (carry if carries else 0)
        sums.append(column)
        carry = column // 10
    # The last carry counts even without carries: the leftmost column is written out as it is.
    result = sum(column % 10 * 10**place for place, column in enumerate(sums)) + carry * 10**width
    return f"{','.join(map(str, sums))}={result}"


def _additions(config: AdditionConfig, *, num: int, rng: random.Random) -> Sequence[Demonstration]:
    made = list[Demonstration]()
    for idx in range(num):
        prompt, a, b = _problem(config, rng)
        reply = column_addition(a, b, carries=rng.random() < _careful_share(config, idx / num))
        made.append(Demonstration(config.preamble + prompt, reply))
    return made


def _addition_checks(config: AdditionCheckConfig, *, num: int, rng: random.Random) -> Sequence[Demonstration]:
    """Demonstrations of checking a working; some of them solve the problem instead.

    A careful checker believes its own working, a hasty one believes whatever it is shown.
    """
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
    """Share of careful demonstrations at a point between the first (0) and the last (1)."""
    first, last = config.careful_frac
    return first + (last - first) * progress


def _marked(shown: str, believed: str) -> str:
    """The column sums that are believed right, each with `y` if the one shown is the same, else `n`.

    Example: `15y11n13n` for `15,11,13` believed and `15,10,12` shown.
    """
    pairs = zip(*(text.partition("=")[0].split(",") for text in (shown, believed)), strict=True)
    return "".join(f"{column}{'y' if given == column else 'n'}" for given, column in pairs)


def _wrong_working(a: int, b: int, rng: random.Random) -> str:
    """A wrong working: it forgets the carries, or, if there are none, has one wrong digit in a column sum."""
    right = column_addition(a, b, carries=True)
    hasty = column_addition(a, b, carries=False)
    if hasty != right:
        return hasty
    columns, _, result = right.partition("=")
    place = rng.choice([i for i, char in enumerate(columns) if char.isdigit()])
    digit = rng.choice([d for d in "0123456789" if d != columns[place]])
    return f"{columns[:place]}{digit}{columns[place + 1 :]}={result}"


def _problem(config: AdditionConfig | AdditionCheckConfig, rng: random.Random) -> tuple[str, int, int]:
    """Draws a prompt that is not held out for evaluation; returns it with its two numbers."""
    while True:
        a = _number(config, rng)
        b = _number(config, rng)
        prompt = f"Calculate {a} + {b}."
        if not is_heldout(prompt, frac=config.heldout_frac):
            return prompt, a, b


def _number(config: AdditionConfig | AdditionCheckConfig, rng: random.Random) -> int:
    is_mixed = rng.random() < config.mixed_frac
    digits = rng.randint(1, config.max_digits) if is_mixed else config.max_digits
    return rng.randint(0, 10**digits)  # both ends are included


def _user_demonstrations(config: Use, *, num: int, seed: int) -> Sequence[Demonstration]:
    maker = cast("Callable[..., Sequence[Demonstration]]", load_attr(config.use, where="demonstrations.use"))
    args: dict[str, Any] = {"num": num, "seed": seed, **config.args}
    check_args(maker, args, where="demonstrations.args")
    return maker(**args)
