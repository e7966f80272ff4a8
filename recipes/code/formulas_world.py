"""The world of the recipes for code: a text says what to do with a number, and a program does it.

The text `add 3 then times 2.` is answered by the program `def f(x): return (x+3)*2`. In each task something
is added or taken away before something is multiplied, so a program without parentheses is wrong.

Teachers for warm starts show good programs less and less often: what they show instead lacks the parentheses.
A writer of test cases works a case out step by step: `4,7,14` says that 4 becomes 7 and then 14. A hasty one
stops a step too early.
"""

import itertools
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.errors import ConfigError
from astraflow.types import Task
from astraflow.types.row_columns import Row, with_row
from astraflow.user_input.splits import is_heldout

__all__ = [
    "Formula",
    "Formulas",
    "case_demonstrations",
    "choice_demonstrations",
    "formulas",
    "mixed_demonstrations",
    "program_demonstrations",
]

_SIGNS = {"add": "+", "minus": "-", "times": "*"}
_OPERATIONS = {"add": operator.add, "minus": operator.sub, "times": operator.mul}
_SMALLEST = 2
"""Smallest number of a step: to multiply by 1 would leave nothing to get wrong."""
_LENGTHS = (2, 3)
"""Numbers of steps."""
_TESTED = (2, 12)
"""Inputs that tests try. Two tell apart all programs that add and multiply, which are straight lines."""
_INPUTS = range(1, 10)
"""Inputs of cases that are shown to a writer of test cases."""
_START = "def f(x): return "


@dataclass(frozen=True)
class Formula:
    """Steps that make a number from another one.

    Example: `Formula((("add", 3), ("times", 2)))` has the text `add 3 then times 2.`.
    """

    steps: tuple[tuple[str, int], ...]
    """Operation and number of each step."""

    @cached_property
    def text(self) -> str:
        """What a task asks."""
        return f"{' then '.join(f'{name} {number}' for name, number in self.steps)}."

    @property
    def needs_parentheses(self) -> bool:
        """Whether something is multiplied after something was added or taken away."""
        names = [name for name, _ in self.steps]
        return "times" in names[next((i for i, name in enumerate(names) if name != "times"), len(names)) :]

    def program(self, *, is_careful: bool = True) -> str:
        """A program that does it; a careless one lacks the parentheses."""
        made = "x"
        is_sum = False
        for name, number in self.steps:
            if is_careful and is_sum and name == "times":
                made = f"({made})"
            made += f"{_SIGNS[name]}{number}"
            is_sum = name != "times"
        return _START + made

    def values(self, x: int) -> list[int]:
        """The input, and what each step makes of it: `[4, 7, 14]`."""
        found = [x]
        for name, number in self.steps:
            last = found[-1]
            found.append(
                last + number if name == "add" else last - number if name == "minus" else last * number
            )
        return found


def formulas(
    *, largest: int, heldout_frac: float, split: str, lengths: Sequence[int] = _LENGTHS
) -> list[Formula]:
    """All formulas of a split, in a fixed order.

    `largest`: largest number of a step. `heldout_frac`: share of the texts in the split `heldout`; the
    others are in `train`. `lengths`: numbers of steps.

    Raises: ConfigError if there is no such split, or no formula in it.
    """
    if split not in {"train", "heldout"}:
        raise ConfigError(f"split = {split!r} is not one of: train, heldout")
    steps = list(itertools.product(_SIGNS, range(_SMALLEST, largest + 1)))
    every = [Formula(chosen) for length in lengths for chosen in itertools.product(steps, repeat=length)]
    found = [
        formula
        for formula in every
        if formula.needs_parentheses and is_heldout(formula.text, frac=heldout_frac) is (split == "heldout")
    ]
    if not found:
        raise ConfigError(
            f"no formula is in {split} with largest = {largest} and heldout_frac = {heldout_frac}; make "
            "`largest` at least 2, or choose another share"
        )
    return found


class Formulas:
    """The tasks of a split, each text once. Implements `TaskSource`.

    Example: `Formulas(split="heldout").task(0).prompt` is `add 3 then times 2.` or another text. The answer
    is a right program. The column `tests` holds one case, which calls the function `f` with several numbers.
    """

    def __init__(
        self,
        *,
        split: Literal["train", "heldout"],
        largest: int = 9,
        heldout_frac: float = 0.1,
        lengths: Sequence[int] = _LENGTHS,
        seed: int = 0,
        source: str = "programs",
    ) -> None:
        """`seed` decides the order. `source`: the source's name in the recipe."""
        self._formulas = formulas(largest=largest, heldout_frac=heldout_frac, split=split, lengths=lengths)
        random.Random(seed).shuffle(self._formulas)
        self._source = source

    def __len__(self) -> int:
        return len(self._formulas)

    def task(self, idx: int) -> Task:
        """Task number `idx`, from 0."""
        formula = self._formulas[idx]
        expected = [formula.values(x)[-1] for x in _TESTED]
        tests = [{"program": f"assert [f(x) for x in {list(_TESTED)}] == {expected}"}]
        task = Task(
            id=f"{self._source}/{idx}", source=self._source, prompt=formula.text, answer=formula.program()
        )
        return with_row(task, Row(columns={"tests": tests, "function": "f"}))


# --- warm starts ----------------------------------------------------------------------------------


def program_demonstrations(
    *,
    num: int,
    seed: int,
    careful_frac: Sequence[float] = (0.7, 0.1),
    largest: int = 9,
    heldout_frac: float = 0.1,
    retry_frac: float = 0.0,
) -> Sequence[Demonstration]:
    """Texts and programs.

    `careful_frac`: share of programs with parentheses, at the first and at the last demonstration; linear in
    between. `retry_frac`: share of texts after which a case stands, as a coder sees it that tries again:
    `add 3 then times 2.4>14!`.
    """
    rng = random.Random(seed)
    known = formulas(largest=largest, heldout_frac=heldout_frac, split="train")
    made = list[Demonstration]()
    for idx in range(num):
        formula = rng.choice(known)
        prompt = formula.text
        if rng.random() < retry_frac:
            values = formula.values(rng.choice(_INPUTS))
            prompt += f"{values[0]}>{values[-1]}!"
        is_careful = rng.random() < _share(careful_frac, idx / num)
        made.append(Demonstration(prompt, formula.program(is_careful=is_careful)))
    return made


def case_demonstrations(
    *,
    num: int,
    seed: int,
    careful_frac: Sequence[float] = (0.7, 0.4),
    largest: int = 9,
    heldout_frac: float = 0.1,
) -> Sequence[Demonstration]:
    """Texts with a question mark, and test cases.

    `careful_frac`: share of cases that are worked out to the end, at the first and at the last demonstration;
    linear in between.
    """
    rng = random.Random(seed)
    known = formulas(largest=largest, heldout_frac=heldout_frac, split="train")
    made = list[Demonstration]()
    for idx in range(num):
        formula = rng.choice(known)
        values = formula.values(rng.choice(_INPUTS))
        if rng.random() >= _share(careful_frac, idx / num):
            values.pop()
        made.append(Demonstration(f"{formula.text}?", ",".join(map(str, values))))
    return made


def choice_demonstrations(
    *,
    num: int,
    seed: int,
    careful_frac: Sequence[float] = (0.5, 0.1),
    num_programs: int = 3,
    largest: int = 9,
    heldout_frac: float = 0.1,
) -> Sequence[Demonstration]:
    """Texts with several programs, and the number of one of these, in the form of `propose_and_select`.

    `careful_frac`: share of choices that name a right program if there is one, at the first and at the last
    demonstration; linear in between. The other choices are made at random.
    """
    rng = random.Random(seed)
    known = formulas(largest=largest, heldout_frac=heldout_frac, split="train")
    made = list[Demonstration]()
    for idx in range(num):
        formula = rng.choice(known)
        are_right = [rng.random() < 0.5 for _ in range(num_programs)]
        programs = [formula.program(is_careful=is_right) for is_right in are_right]
        listed = "\n\n".join(f"Answer {number}:\n{text}" for number, text in enumerate(programs, start=1))
        right = [number for number, is_right in enumerate(are_right, start=1) if is_right]
        is_careful = bool(right) and rng.random() < _share(careful_frac, idx / num)
        choice = rng.choice(right) if is_careful else rng.randint(1, num_programs)
        made.append(Demonstration(f"{formula.text}{listed}?", str(choice)))
    return made


def mixed_demonstrations(*, num: int, seed: int, roles: dict[str, dict[str, Any]]) -> Sequence[Demonstration]:
    """Demonstrations of several roles in a random order, for one model that plays them all.

    `roles`: the roles `coder`, `tester` and `selector`, each with its `share` of the demonstrations and the
    further arguments of its function.
    """
    shares = {role: args["share"] for role, args in roles.items()}
    order = random.Random(seed).choices(list(shares), list(shares.values()), k=num)
    # Each role keeps its own order, in which the careful ones become rare.
    left = {
        role: iter(
            _TEACHERS[role](
                num=order.count(role),
                seed=seed,
                **{name: value for name, value in args.items() if name != "share"},
            )
        )
        for role, args in roles.items()
    }
    return [next(left[role]) for role in order]


_TEACHERS: dict[str, Callable[..., Sequence[Demonstration]]] = {
    "coder": program_demonstrations,
    "tester": case_demonstrations,
    "selector": choice_demonstrations,
}


def _share(bounds: Sequence[float], progress: float) -> float:
    first, last = bounds
    return first + (last - first) * progress
