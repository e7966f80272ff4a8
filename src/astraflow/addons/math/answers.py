"""Decides whether a text gives the right answer to a question of mathematics.

The final answer is found and split into parts, which are compared with the parts of the gold, the reference
answer. Exact numbers must be exactly equal. A decimal with at least six significant digits also equals the
values that round to it. Expressions with variables are equal if they agree at several points, or if
`math-verify` can show that they are equal. Names, words and dates are compared as text, because as formulas,
`east` and `seat` would be the same product.

Functions named after a kind of answer, such as `_choices`, return None if the gold is not of that kind.
"""

import re
from dataclasses import replace

from astraflow.addons.math.algebra import (
    are_complements,
    computed_matrix,
    differ_by_a_constant,
    rational_near,
    same_algebra,
    same_sets,
)
from astraflow.addons.math.final_answer import final_answer, gold_answer
from astraflow.addons.math.numbers import based_equal, modulus_of, number_of, ratios_equal
from astraflow.addons.math.shape import Shape, shape_of
from astraflow.addons.math.spelling import fold, tidy
from astraflow.addons.math.units import ANGLE_FUNCTION, plain_text, split_unit, units_differ
from astraflow.addons.math.words import absences_equal, choice_of, dates_equal, times_equal, words_equal
from astraflow.addons.math.written_rows import cases_of, is_matrix, matrix_of, scaled_tuple

__all__ = [
    "answers_equal",
    "is_right",
    "readable_gold",
]

_TAIL = 20_000
"""Number of characters, from the end of a text, that are searched for the final answer."""
_LONGEST = 500
"""Answers with more characters are compared as texts only; parsing them as formulas takes too long."""


def is_right(gold: str, text: str) -> bool:
    """Whether the final answer of a text equals the gold.

    Example: `is_right("0.5", r"It is $\\frac12$.")`.
    """
    wanted = readable_gold(gold)
    text = text[-_TAIL:]
    if len(text) <= _LONGEST and fold(tidy(text)) == fold(wanted):
        return True
    return answers_equal(wanted, tidy(final_answer(text)))


def readable_gold(gold: str) -> str:
    """The gold answer in one spelling; empty if nothing in it can be compared."""
    return tidy(gold_answer(gold))


def answers_equal(gold: str, answer: str) -> bool:
    """Whether two tidy answers are equal: they must have the same shape and equal parts."""
    if not fold(gold) or not fold(answer):
        return False
    if fold(gold) == fold(answer):
        return True
    if max(len(gold), len(answer)) > _LONGEST:
        return False
    gold, answer = (scaled_tuple(_plain_matrix(_ANY_CONSTANT.sub("", text))) for text in (gold, answer))
    for compare in (_roundings, absences_equal, dates_equal, _residues, _matrices, _piecewise, _vectors):
        verdict = compare(gold, answer)
        if verdict is not None:
            return verdict
    wanted = shape_of(gold)
    given = shape_of(answer)
    if _ORDER.search(gold) and {_joins(gold), _joins(answer)} == {"and", "or"}:
        return False
    if wanted.kind == given.kind == "value":
        return _values_equal(wanted.items[0], given.items[0])
    if _shapes_equal(wanted, given):
        return True
    return _same_region(gold, wanted, answer, given)


_OR = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])|\\(?:lor|vee|cup)(?![A-Za-z])")


def _joins(text: str) -> str:
    """How the conditions of a text are joined: `and`, `or`, or not by a word."""
    if _OR.search(text):
        return "or"
    return "and" if re.search(r"(?<![A-Za-z])and(?![A-Za-z])|\\(?:land|wedge)(?![A-Za-z])", text) else ""


_ABOUT = re.compile(
    r"\s*[,(]?\s*(?:=(?=\s*-?\d*\.\d+\s*\.\.\.\)?$)|\\(?:approx|simeq|doteq)(?![A-Za-z])"
    r"|(?:\\text\{\s*)?\(?\s*(?<![A-Za-z])(?:or\s+|which\s+is\s+)?(?:about|approximately|approx\.?|roughly)(?![A-Za-z])\s*\}?)\s*"
)


def _roundings(gold: str, answer: str) -> bool | None:
    r"""Whether answers of the form `\frac{22}{7} \approx 3.14` are equal: the exact values must be.

    The rounded value counts only if the gold is a decimal, and it must be a rounding of the exact one.
    """
    wanted = _split_rounding(gold)
    given = _split_rounding(answer)
    if wanted is None and given is None:
        return None
    if given == ("", "") or (given is not None and answers_equal(gold, given[0])):
        return given != ("", "")
    if wanted is not None and wanted != ("", ""):
        exact, decimal = wanted
        return answers_equal(exact, answer) or (given is None and answers_equal(decimal, answer))
    number = number_of(split_unit(gold)[0])
    is_decimal = number is not None and number.last_place > 0
    return is_decimal and given is not None and answers_equal(gold, given[1])


def _split_rounding(text: str) -> tuple[str, str] | None:
    """The exact value and its decimal; both empty if they contradict each other; None if one is missing."""
    about = _ABOUT.search(text)
    if about is None or about.start() == 0:
        return None
    exact = text[: about.start()].strip()
    decimal = text[about.end() :].strip(" ).")
    rounding = number_of(split_unit(decimal)[0])
    value = split_unit(_sides(exact)[-1])[0] if _sides(exact) else ""
    number = number_of(value)
    size = rational_near(value) if number is None else number.value
    if rounding is None or (size is None and _is_name(value)):
        return None
    return (exact, decimal) if size is not None and rounding.rounds(size) else ("", "")


def _residues(gold: str, answer: str) -> bool | None:
    r"""Whether residues such as `3 \pmod 7` are equal. Only one side has to name the modulus."""
    wanted = modulus_of(gold)
    given = modulus_of(answer)
    if wanted is None and given is None:
        return None
    if wanted is not None and given is not None and not answers_equal(wanted[1], given[1]):
        return False
    modulus = (wanted or given or ("", ""))[1]
    sides = [text if parts is None else parts[0] for text, parts in ((gold, wanted), (answer, given))]
    numbers = [_whole_numbers(side) for side in sides]
    classes = [_residue_classes(each, modulus) for each in numbers]
    if None in classes or (given is None and numbers[0] == numbers[1]):
        return answers_equal(*sides)
    # A number without a modulus must be the least residue itself.
    names_modulus = (wanted is not None, given is not None)
    is_least = all(names_modulus[i] or numbers[i] == classes[i] for i in (0, 1))
    return is_least and classes[0] == classes[1]


def _residue_classes(numbers: list[int] | None, modulus: str) -> list[int] | None:
    """The least residues of whole numbers; None if something else is given."""
    if numbers is None or not modulus.isdigit() or int(modulus) == 0:
        return None
    return sorted(number % int(modulus) for number in numbers)


def _whole_numbers(text: str) -> list[int] | None:
    """The whole numbers that an answer consists of; None if it has other parts."""
    numbers = [number_of(_sides(item)[-1]) for item in shape_of(text).items if _sides(item)]
    if not numbers or any(number is None or number.value.denominator != 1 for number in numbers):
        return None
    return sorted(int(number.value) for number in numbers if number is not None)


def _matrices(gold: str, answer: str) -> bool | None:
    """Whether matrices have equal cells. A list of numbers also equals a vector with them."""
    if not (is_matrix(gold) or is_matrix(answer)):
        return None
    wanted = matrix_of(gold)
    given = matrix_of(answer)
    if wanted is None or given is None or (len(wanted) == 1 and gold.startswith("[")):
        return None  # the gold is an interval
    if is_matrix(gold) != is_matrix(answer) and min(len(given), len(wanted)) == 1:
        # A vector may be a row, a column or a list.
        if 1 not in (len(wanted), len(wanted[0])) or 1 not in (len(given), len(given[0])):
            return False
        wanted, given = ((tuple(cell for row in rows for cell in row),) for rows in (wanted, given))
    return [len(row) for row in wanted] == [len(row) for row in given] and all(
        answers_equal(one, two)
        for rows in zip(wanted, given, strict=True)
        for one, two in zip(*rows, strict=True)
    )


_HAS_MATRIX = re.compile(r"\\begin\{(?:[pbB]?(?:small)?matrix|array)\}")
_KINDS_OF_MATRIX = re.compile(r"(\\(?:begin|end))\{(?:[pb]smallmatrix|Bmatrix|smallmatrix)\}")
_TRANSPOSED = re.compile(
    r"(?<=[\])}])\s*\^\s*(?:\{\s*)?(?:\\top|\\intercal|\\text\{\s*[Tt]\s*\}|[Tt])(?![A-Za-z])\s*\}?"
)


def _plain_matrix(text: str) -> str:
    r"""The matrix that a text computes, as in `2\begin{pmatrix}...`; other texts are unchanged."""
    if _HAS_MATRIX.search(text) is None or is_matrix(text):
        return text
    value = _TRANSPOSED.sub("^T", _KINDS_OF_MATRIX.sub(r"\1{pmatrix}", _sides(text)[-1]))
    cells = computed_matrix(value)
    if cells is None:
        return text
    rows = r"\\".join("&".join(tidy(cell) for cell in row) for row in cells)
    return rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}"


_TERM = re.compile(
    r"\s*([+-]?)([^+{}]*?(?:\{[^{}]*\}[^+{}]*?)*)(?<![A-Za-z\\])([ijk])(?![A-Za-z])\s*(?=[+-]|$)"
)


def _vectors(gold: str, answer: str) -> bool | None:
    """Whether `3i-2j` and `(3,-2)` are the same vector; None unless there is one of each."""
    for sum_text, other in ((gold, answer), (answer, gold)):
        shape = shape_of(other)
        parts = _components(sum_text)
        if parts is not None and shape.kind == "tuple" and shape.brackets == "()":
            names = "ijk"[: max(len(shape.items), 2)]
            return set(parts) <= set(names) and all(
                answers_equal(parts.get(name, "0"), item)
                for name, item in zip(names, shape.items, strict=False)
            )
    return None


def _components(text: str) -> dict[str, str] | None:
    """The factor of each of `i`, `j` and `k` in a sum that has nothing else; None without `j` or `k`."""
    components: dict[str, str] = {}
    position = 0
    for term in _TERM.finditer(text):
        if term.start() != position or term[3] in components:
            return None
        position = term.end()
        components[term[3]] = term[1] + (term[2].strip() or "1")
    return components if position == len(text) and set(components) & {"j", "k"} else None


def _piecewise(gold: str, answer: str) -> bool | None:
    """Whether functions by cases have the same values under the same conditions, in any order."""
    wanted = cases_of(gold)
    given = cases_of(answer)
    if wanted is None and given is None:
        return None
    if wanted is None or given is None or len(wanted) != len(given):
        return False
    unmatched = list(given)
    for value, condition in wanted:
        match = next(
            (
                case
                for case in unmatched
                if answers_equal(value, case[0]) and _conditions_equal(condition, wanted, case[1], given)
            ),
            None,
        )
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _conditions_equal(
    one: str, cases: tuple[tuple[str, str], ...], other: str, others: tuple[tuple[str, str], ...]
) -> bool:
    """Whether two conditions are the same. An empty one is what the other conditions leave."""
    if one and other:
        return answers_equal(one, other)
    if not one and not other:
        return True
    single, rest = (one, others) if one else (other, cases)
    return are_complements([single], [condition for _, condition in rest if condition])


def _shapes_equal(wanted: Shape, given: Shape) -> bool:
    """Whether two shapes with several parts are equal. Only the parts of tuples have an order."""
    kinds = {wanted.kind, given.kind}
    if "set" in kinds:
        wanted, given = (_distinct(shape) for shape in (wanted, given))
    if len(wanted.items) != len(given.items):
        return False
    if kinds == {"set", "value"}:
        return answers_equal(wanted.items[0], given.items[0])  # a set with one element equals the element
    if kinds == {"tuple"}:
        return wanted.brackets == given.brackets and _in_order(wanted, given)
    if kinds == {"tuple", "several"}:
        ordered = wanted if wanted.kind == "tuple" else given
        return ordered.brackets == "()" and _in_order(wanted, given)
    if kinds == {"several"} and _names(wanted) != _names(given) and (_names(wanted) or _names(given)):
        return _in_order(wanted, given)
    return kinds <= {"several", "set"} and _in_any_order(wanted, given)


def _distinct(shape: Shape) -> Shape:
    """A set without its repeated elements; other shapes are unchanged."""
    if shape.kind != "set":
        return shape
    items: list[str] = []
    for item in shape.items:
        if not any(answers_equal(item, other) for other in items):
            items.append(item)
    return replace(shape, items=tuple(items))


def _names(shape: Shape) -> frozenset[str]:
    """The names of the parts if each part has a different one, as in `x=1, y=2`; else none."""
    names = frozenset(fold(item.partition("=")[0]) for item in shape.items if "=" in item)
    return names if len(names) == len(shape.items) else frozenset()


def _in_order(wanted: Shape, given: Shape) -> bool:
    return all(answers_equal(one, two) for one, two in zip(wanted.items, given.items, strict=True))


def _in_any_order(wanted: Shape, given: Shape) -> bool:
    unmatched = list(given.items)
    for item in wanted.items:
        match = next((other for other in unmatched if answers_equal(item, other)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


_REGION = re.compile(r"[<>]|\\(?:le|ge|neq|cup|cap|in|setminus|mathbb)(?![A-Za-z])")
_AND = re.compile(r"(?<![A-Za-z])and(?![A-Za-z])|\\(?:land|wedge)(?![A-Za-z])|,|;")


def _same_region(gold: str, wanted: Shape, answer: str, given: Shape) -> bool:
    """Whether two answers describe the same set, written as intervals, unions or inequalities."""
    if not (_REGION.search(gold) or _REGION.search(answer)):
        return False
    regions: list[tuple[str, ...]] = []
    for text, shape in ((gold, wanted), (answer, given)):
        if shape.kind == "several":
            if _AND.search(text):
                return False  # parts joined by `and` would be an intersection, and not the union below
            regions.append(shape.items)
        elif shape.kind == "tuple":  # without the name that the answer may have had
            regions.append((shape.brackets[0] + ",".join(shape.items) + shape.brackets[-1],))
        else:
            regions.append((text,))
    return same_sets(*regions)


# --- single values ----------------------------------------------------------------------------------


def _values_equal(gold: str, answer: str) -> bool:
    """Whether two tidy answers, each of which is a single value, are equal.

    The kinds of values are tried in order; the first kind that the gold belongs to decides.
    """
    if not fold(gold) or not fold(answer):
        return False
    if fold(gold) == fold(answer):
        return True
    for compare in (_choices, dates_equal, times_equal, words_equal, based_equal, ratios_equal):
        verdict = compare(gold, answer)
        if verdict is not None:
            return verdict
    return _relations(gold, answer)


# --- choices ---------------------------------------------------------------------------------------


def _choices(gold: str, answer: str) -> bool | None:
    """Whether two choices are the same: `C`, `(C)`, `\\text{C}`, `C) 12`.

    A choice also equals its letter in lower case, and the text next to its letter.
    """
    wanted = choice_of(gold)
    given = choice_of(answer)
    if wanted is None:
        return None
    letter, words = wanted
    if given is not None:
        return given[0] == letter
    is_small_letter = re.fullmatch(r"[a-j]", fold(answer)) is not None
    if is_small_letter and fold(answer).upper() == letter:
        return True
    return bool(words) and _values_equal(words, answer)


# --- relations ------------------------------------------------------------------------------------

_EQUALS = re.compile(r"(?<![\\<>!])(?:=|\\approx(?![A-Za-z])|\\equiv(?![A-Za-z]))(?!=)")
_ORDER = re.compile(r"[<>]|\\(?:le|ge|neq)(?![A-Za-z])")
_OPERATOR = re.compile(r"[-+*/^]|\\(?:cdot|times|frac|sqrt)(?![A-Za-z])")
"""Signs that no name contains. If the gold is `x^2 + y^2 = 1`, its right side alone is not an answer."""


def _outer(text: str) -> str:
    """The text with a blank for each character inside braces, which hides the sign in `\\sum_{k=1}`."""
    depth = 0
    outer = ""
    for char in text:
        depth -= char == "}"
        outer += char if depth == 0 else " "
        depth += char == "{"
    return outer


def _sides(text: str) -> list[str]:
    """The parts of a text between its equals signs, without empty parts."""
    sides: list[str] = []
    start = 0
    for sign in _EQUALS.finditer(_outer(text)):
        sides.append(text[start : sign.start()])
        start = sign.end()
    return [side for side in [*sides, text[start:]] if side.strip()]


def _relations(gold: str, answer: str) -> bool:
    """Whether two values, equations or inequalities are equal.

    If both are equations with the same name on the left, or only one is an equation and has a name on the
    left, their right sides are compared. Other equations and inequalities are compared as algebra.
    """
    if _ORDER.search(_outer(gold)) or _ORDER.search(_outer(answer)):
        return same_algebra(gold, answer)
    answer = _with_constants_of(gold, answer)
    wanted = _sides(gold)
    given = _sides(answer)
    if not wanted or not given:
        return False
    if len(wanted) == 1 and len(given) == 1:
        return _amounts_equal(gold, answer)
    if len(wanted) > 1 and len(given) > 1:
        if fold(wanted[0]) == fold(given[0]) and _is_name(wanted[0]):
            return _amounts_equal(wanted[-1], given[-1])
        return same_algebra(gold, answer)
    if len(wanted) > 1:
        is_named = _is_name(wanted[0]) and _OPERATOR.search(wanted[0]) is None
    else:
        is_named = _is_name(given[0]) or all(_amounts_equal(given[-1], part) for part in given[:-1])
    if not is_named:
        return False
    return _amounts_equal(wanted[-1], given[-1])


def _is_name(text: str) -> bool:
    """Whether the left side of an equation names what is asked for: `x`, `f(2)` or `m + n`, but not `2x`."""
    bare = re.sub(r"_\s*(?:\{[^{}]*\}|\w)|\([^()]*\)|\\text\{[^{}]*\}|\^\s*(?:\{[^{}]*\}|\w)", "", text)
    if re.fullmatch(r"\s*[a-z]\s*\^\s*\{?\s*\d+\s*\}?\s*", text):
        return False  # `x^2 = 5` does not say what `x` is
    is_denied = re.search(
        r"(?<![A-Za-z])(?:not|never|no|cannot|if|unless|except|false|wrong)(?![A-Za-z])", bare
    )
    return re.search(r"\d", bare) is None and is_denied is None and bool(text.strip())


def _amounts_equal(gold: str, answer: str) -> bool:
    """Whether numbers or expressions with units are equal. One unit may be missing, but two must be the same.

    A percentage also equals its value as a fraction: `50%` equals `0.5`.
    """
    if fold(plain_text(gold)) == fold(plain_text(answer)):
        return True
    wanted, wanted_unit = split_unit(gold)
    given, given_unit = split_unit(answer)
    if units_differ(wanted_unit, given_unit):
        return False
    if _expressions_equal(wanted, given):
        return True
    is_gold_percent = "%" in wanted_unit
    is_answer_percent = "%" in given_unit
    if is_gold_percent == is_answer_percent:
        return False
    percent, other = (wanted, given) if is_gold_percent else (given, wanted)
    return _expressions_equal(rf"\frac{{{percent}}}{{100}}", other)


def _expressions_equal(gold: str, answer: str) -> bool:
    """Whether two expressions are equal: as texts, as numbers, or else as algebra."""
    if fold(gold) == fold(answer):
        return bool(fold(gold))
    gold = _without_degrees(gold)
    answer = _without_degrees(answer)
    wanted_rest, given_rest = (_without_constant(text) for text in (gold, answer))
    if wanted_rest and given_rest:  # all antiderivatives of the same function; a small `c` may be a variable
        is_family = re.search(r"[CK]|onst", gold) is not None
        return _expressions_equal(wanted_rest, given_rest) or (
            is_family and differ_by_a_constant(wanted_rest, given_rest)
        )
    wanted = number_of(gold)
    given = number_of(answer)
    if wanted is not None and given is not None:
        return wanted.is_equal(given)
    if same_algebra(gold, answer):
        return True
    # If the gold is a long decimal, its exact value is right too. The opposite does not hold: if the gold is
    # exact, an exact answer was asked for.
    exact = rational_near(answer) if wanted is not None else None
    return wanted is not None and exact is not None and wanted.stands_for(exact)


_CONSTANT = r"(?:[CcKk](?:_\{?\d\}?)?|\\text\{\s*[Cc]onst(?:ant)?\.?\s*\})"
_PLUS_CONSTANT = re.compile(
    rf"(?P<rest>.+?)\s*\+\s*(?P<last>{_CONSTANT})$|(?P<first>{_CONSTANT})\s*\+\s*(?P<other>.+)$"
)
_ANY_CONSTANT = re.compile(
    rf"\s*[,;(]\s*(?:\\text\{{[^{{}}]*\}}\s*)?{_CONSTANT}\s*\\in\s*\\mathbb\{{R\}}\s*\)?\s*$"
    r"|\s*[,;(]?\s*(?:\\text\{)?\s*(?<![A-Za-z])(?:where|with)(?![A-Za-z])[^=<>]*(?<![A-Za-z])constant[^=<>]*$"
)
"""What says that a constant is any number, as in `x^2+C, C\\in\\mathbb{R}`."""
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[r-zθ](?![A-Za-z])|\\(?:theta|phi)(?![A-Za-z])")
_SMALL_NAMES = {
    "c": re.compile(r"(?<![A-Za-z\\])[adb](?![A-Za-z])"),
    "k": re.compile(r"(?<![A-Za-z\\])[hijlmn](?![A-Za-z])"),
}
"""Names next to which a small `c` or `k` is not a constant of integration, as in `ax^2+bx+c`."""


def _without_constant(text: str) -> str:
    """What is left of an expression with variables without its constant of integration; empty for others."""
    match = _PLUS_CONSTANT.fullmatch(text.strip())
    if match is None:
        return ""
    rest = match["rest"] or match["other"]
    constant = match["last"] or match["first"]
    names = _SMALL_NAMES.get(constant[0])
    is_name = names is not None and names.search(rest) is not None
    is_used = re.search(rf"(?<![A-Za-z\\]){re.escape(constant[0])}(?![A-Za-z])", rest) is not None
    return rest.strip() if _VARIABLE.search(rest) and not is_name and not is_used else ""


def _with_constants_of(gold: str, answer: str) -> str:
    """The answer with `c` as `C`, and `c_1` as `C_1`, if this is how the gold names its constants."""
    if not (_VARIABLE.search(gold) and _VARIABLE.search(answer)):
        return answer
    for large, small in ("Cc", "Kk", "cC", "kK"):
        names = [re.compile(rf"(?<![A-Za-z\\]){name}(?![A-Za-z]{{2}})") for name in (large, small)]
        has = [[name.search(text) is not None for name in names] for text in (gold, answer)]
        if has == [[True, False], [False, True]]:
            answer = names[1].sub(large, answer)
    return answer


_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\\degree(?![A-Za-z])")


def _without_degrees(text: str) -> str:
    """The text with degrees as plain numbers, or in radians if the text contains a function of angles."""
    if ANGLE_FUNCTION.search(text):
        return _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    return re.sub(r"\\degree(?![A-Za-z])", " ", text)
