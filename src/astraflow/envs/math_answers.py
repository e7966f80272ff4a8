"""Whether a text answers a question of mathematics: the answer is found, taken apart, and compared."""

import re

from astraflow.envs.answer_algebra import same_sets
from astraflow.envs.answer_shape import Shape, shape_of
from astraflow.envs.answer_text import final_answer, fold, gold_answer, tidy
from astraflow.envs.answer_value import dates_equal, values_equal

__all__ = ["answers_equal", "is_right", "readable_gold"]


_TAIL = 20_000
"""Characters from the end of a text in which its final answer is looked for."""
_LONGEST = 500
"""Longer answers are compared as texts only: to read them as formulas takes too long."""


def is_right(gold: str, text: str) -> bool:
    """Whether the final answer of a text is the gold. Example: `is_right("0.5", r"It is $\\frac12$.")`."""
    wanted = readable_gold(gold)
    text = text[-_TAIL:]
    if len(text) <= _LONGEST and fold(tidy(text)) == fold(wanted):
        return True
    return answers_equal(wanted, tidy(final_answer(text)))


def readable_gold(gold: str) -> str:
    """The gold in one spelling; empty if nothing is left of it."""
    return tidy(gold_answer(gold))


def answers_equal(gold: str, answer: str) -> bool:
    """Whether two tidy answers are the same: in shape, and then part by part."""
    if not fold(gold) or not fold(answer):
        return False
    if fold(gold) == fold(answer):
        return True
    if max(len(gold), len(answer)) > _LONGEST:
        return False
    same_day = dates_equal(gold, answer)
    if same_day is not None:
        return same_day
    wanted, given = shape_of(gold), shape_of(answer)
    if wanted.kind == given.kind == "value":
        return values_equal(wanted.items[0], given.items[0])
    if _shapes_equal(wanted, given):
        return True
    return _same_region(gold, wanted, answer, given)


def _shapes_equal(wanted: Shape, given: Shape) -> bool:
    if len(wanted.items) != len(given.items):
        return False
    kinds = {wanted.kind, given.kind}
    if kinds == {"set", "value"}:
        return answers_equal(wanted.items[0], given.items[0])  # a set of one
    if kinds == {"tuple"}:
        return wanted.brackets == given.brackets and _in_order(wanted, given)
    if kinds == {"tuple", "several"}:
        ordered = wanted if wanted.kind == "tuple" else given
        return ordered.brackets == "()" and _in_order(wanted, given)
    if kinds == {"several"} and _names(wanted) != _names(given) and (_names(wanted) or _names(given)):
        return _in_order(wanted, given)
    return kinds <= {"several", "set"} and _in_any_order(wanted, given)


def _names(shape: Shape) -> frozenset[str]:
    """What the parts are called if each has a name of its own, as in `x=1, y=2`; else nothing."""
    names = frozenset(fold(item.partition("=")[0]) for item in shape.items if "=" in item)
    return names if len(names) == len(shape.items) else frozenset()


def _in_order(wanted: Shape, given: Shape) -> bool:
    return all(answers_equal(one, two) for one, two in zip(wanted.items, given.items, strict=True))


def _in_any_order(wanted: Shape, given: Shape) -> bool:
    left = list(given.items)
    for item in wanted.items:
        match = next((other for other in left if answers_equal(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


_REGION = re.compile(r"[<>]|\\(?:le|ge|neq|cup|cap|in|setminus|mathbb)(?![A-Za-z])")
_AND = re.compile(r"(?<![A-Za-z])and(?![A-Za-z])|\\(?:land|wedge)(?![A-Za-z])|,|;")


def _same_region(gold: str, wanted: Shape, answer: str, given: Shape) -> bool:
    """Intervals, unions and inequalities may describe one set in different shapes."""
    if not (_REGION.search(gold) or _REGION.search(answer)):
        return False
    regions: list[tuple[str, ...]] = []
    for text, shape in ((gold, wanted), (answer, given)):
        if shape.kind == "several":
            if _AND.search(text):
                return False
            regions.append(shape.items)
        else:
            regions.append((_bracketed(shape) or text,))
    return same_sets(*regions)


def _bracketed(shape: Shape) -> str:
    if shape.kind != "tuple":
        return ""
    return shape.brackets[0] + ",".join(shape.items) + shape.brackets[-1]
