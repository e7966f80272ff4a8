"""Generates demonstrations for a warm start: prompts with replies, only some of which show good work.

A model that has learned from them can solve its task, but rarely does. Reinforcement learning then has
correct answers to reinforce and room for improvement.
"""

import random
from collections.abc import Sequence
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
    """A conversation that replaces prompt and reply. Each of the assistant's messages is learned."""
    tools: Sequence[ToolSpec] = ()
    """Tools that the chat template shows before the conversation."""

    @property
    def conversation(self) -> Sequence[Message]:
        """The messages. A prompt and its reply are two messages."""
        if self.messages:
            return self.messages
        return (Message(role="user", content=self.prompt), Message(role="assistant", content=self.reply))


def make_demonstrations(config: DemonstrationConfig, *, num: int, seed: int) -> Sequence[Demonstration]:
    """Makes `num` demonstrations. Equal arguments give equal demonstrations.

    A `use` component is called with `num`, `seed`, and its own arguments.

    Raises: ConfigError if a `use` component cannot be loaded or doesn't accept these arguments.
    """
    match config:
        case AdditionConfig():
            return _additions(config, num=num, rng=random.Random(seed))
        case AdditionCheckConfig():
            return _addition_checks(config, num=num, rng=random.Random(seed))
        case Use():
            maker = load_attr(config.use, where="demonstrations.use")
            args: dict[str, Any] = {"num": num, "seed": seed, **config.args}
            check_args(maker, args, where="demonstrations.args")
            return cast("Sequence[Demonstration]", maker(**args))


def column_addition(a: int, b: int, *, carries: bool) -> str:
    """Returns the working of a sum: the sums of the columns from the right, then the result.

    Example: the working of 378 + 937 is `15,11,13=1315`. Without carries, it is `15,10,12=1205`, which is
    wrong.
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
    # The last carry counts even if `carries` is false, because the leftmost column is written in full.
    result = sum(column % 10 * 10**place for place, column in enumerate(sums)) + carry * 10**width
    return f"{','.join(map(str, sums))}={result}"


def _additions(config: AdditionConfig, *, num: int, rng: random.Random) -> Sequence[Demonstration]:
    demonstrations = list[Demonstration]()
    for idx in range(num):
        prompt, a, b = _problem(config, rng)
        reply = column_addition(a, b, carries=rng.random() < _careful_share(config, idx / num))
        demonstrations.append(Demonstration(config.preamble + prompt, reply))
    return demonstrations


def _addition_checks(config: AdditionCheckConfig, *, num: int, rng: random.Random) -> Sequence[Demonstration]:
    """Makes demonstrations that check a working. Some of them solve the problem instead.

    A careful checker trusts its own working. A hasty checker trusts whatever it is shown.
    """
    demonstrations = list[Demonstration]()
    for idx in range(num):
        prompt, a, b = _problem(config, rng)
        right = column_addition(a, b, carries=True)
        if rng.random() < config.solve_frac:
            demonstrations.append(Demonstration(prompt, right))
            continue
        working = right if rng.random() < config.right_frac else _wrong_working(a, b, rng)
        believed = right if rng.random() < _careful_share(config, idx / num) else working
        verdict = "y" if working == believed else "n"
        if rng.random() < config.flawed_frac:
            verdict = rng.choice("yn")
        demonstrations.append(Demonstration(f"{prompt}{working}?", f"{_marked(working, believed)}={verdict}"))
    return demonstrations


def _careful_share(config: AdditionConfig | AdditionCheckConfig, progress: float) -> float:
    """Returns the share of careful demonstrations at a point between the first (0) and the last one (1)."""
    first, last = config.careful_frac
    return first + (last - first) * progress


def _marked(working: str, believed: str) -> str:
    """Returns the column sums that are believed to be right, each marked with `y` or `n`.

    The mark is `y` if the shown sum is the same. Example: `15y11n13n` if `15,11,13` is believed and
    `15,10,12` is shown.
    """
    pairs = zip(*(text.partition("=")[0].split(",") for text in (working, believed)), strict=True)
    return "".join(f"{column}{'y' if given == column else 'n'}" for given, column in pairs)


def _wrong_working(a: int, b: int, rng: random.Random) -> str:
    """Returns a wrong working: one without carries or, if there are none, one with a wrong digit in a sum."""
    right = column_addition(a, b, carries=True)
    hasty = column_addition(a, b, carries=False)
    if hasty != right:
        return hasty
    columns, _, result = right.partition("=")
    place = rng.choice([i for i, char in enumerate(columns) if char.isdigit()])
    digit = rng.choice([d for d in "0123456789" if d != columns[place]])
    return f"{columns[:place]}{digit}{columns[place + 1 :]}={result}"


def _problem(config: AdditionConfig | AdditionCheckConfig, rng: random.Random) -> tuple[str, int, int]:
    """Draws a prompt that isn't held out for evaluation. Returns it with its two numbers."""
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
