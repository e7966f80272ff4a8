"""Compares answers as algebra: `math-verify`'s parser reads the LaTeX, and sympy compares the results.

A text that the parser cannot read equals nothing, and `unread_texts` reports it. Towers of powers and large
factorials are never computed, because they would keep a process busy for hours inside a single instruction.
They count as unread too.

For most texts and comparisons that make no sense, the libraries raise exceptions of common kinds, which they
would also raise if they were broken. So after each one, a known pair is compared. If that fails too, the
libraries are at fault, not the text, and a `ScorerError` is raised. Every other exception passes through.
"""

import logging
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeVar, cast

from astraflow.errors import ConfigError, ScorerError
from astraflow.user_input.extras import install_command
from astraflow.user_input.own_code import describe_error

__all__ = [
    "are_complements",
    "computed_matrix",
    "differ_by_a_constant",
    "load_algebra",
    "rational_near",
    "same_algebra",
    "same_sets",
    "unread_texts",
]

_DIGITS = 150
"""Number of digits to which a difference is computed before it counts as 0. The digits of large and tiny
numbers in it are added, so neither hides the other."""
_DECIMAL_DIGITS = 60
"""Number of digits to which a number is computed for a comparison with a decimal."""
_MAX_DIGITS = 10_000
"""Two numbers whose parts have more digits in total are equal only if they are written identically."""
_MAX_EXPONENT = 10_000
"""Larger exponents and factorials are not computed."""
_MAX_POWER_BITS = 400_000
"""Powers with more bits are not computed."""
_MAX_ROOT_BITS = 4_000
"""Numbers with more bits are not searched for a root."""
_MAX_TERMS = 1_000
"""Sums and products with more terms are not computed, unless there is a formula."""
_MAX_DEGREE = 20
"""Polynomials of a higher degree have no formula for their sum, and are in no inequality that is solved."""
_POINTS = ("0.7310", "-1.3170", "2.2930", "0.1790", "-0.6130", "1.5710", "3.8510", "-2.7190")
"""Values for variables. Variables get different values without a simple relation to each other, so
expressions hardly ever agree by chance."""
_FAMILIES = (
    _POINTS,
    tuple(point.lstrip("-") for point in _POINTS),
    tuple(f"{point}/10" for point in _POINTS),
    ("2", "5", "3", "8", "4", "7", "6", "9"),
)
"""Points to try in this order, until enough are defined. `\\ln x \\ln y \\ln z` needs positive values,
`\\arcsin 2x` small ones, and `(-1)^n` whole ones."""
_MIN_AGREEING = 3
"""Number of points at which two expressions must both be defined and agree, to count as equal."""


@dataclass(frozen=True, slots=True)
class _Library:
    """Sympy, and the parser of math-verify; both libraries are untyped."""

    sympy: Any
    parse: Callable[[str], Any]


@lru_cache(maxsize=1)
def load_algebra() -> None:
    """Imports the libraries and compares a few known pairs, so that whatever they load later is loaded.

    That takes seconds, so it must not happen under the time limit of a comparison.

    Raises: ConfigError if the libraries cannot be imported; ScorerError if they do not work.
    """
    _library()
    for gold, answer in _KNOWN_PAIRS:
        if not same_algebra(gold, answer):
            raise ScorerError(
                f"sympy and math-verify do not work here: they find {gold} and {answer} unequal"
            )


def same_algebra(gold: str, answer: str) -> bool:
    """Whether two tidy texts are equal as expressions, equations, inequalities, sets or matrices."""
    wanted = _parse(gold)
    given = _parse(answer)
    if wanted is None or given is None:
        return False
    return _unless_refused(lambda: bool(_equal(wanted, given))) or False


def same_sets(gold: Iterable[str], answer: Iterable[str]) -> bool:
    """Whether two lists of intervals, sets or inequalities have the same union."""
    wanted = [_parse(text) for text in gold]
    given = [_parse(text) for text in answer]
    if any(part is None for part in wanted + given):
        return False
    return _unless_refused(lambda: _unions_equal(wanted, given)) or False


def are_complements(some: Iterable[str], others: Iterable[str]) -> bool:
    """Whether each real number belongs to exactly one of two lists of intervals, sets or inequalities."""
    one = [_parse(text) for text in some]
    two = [_parse(text) for text in others]
    if any(part is None for part in one + two):
        return False
    return _unless_refused(lambda: _are_complements(one, two)) or False


def rational_near(text: str) -> Fraction | None:
    """The value of a text that is a real number, to about 60 digits; None for any other text."""
    parsed = _parse(text)
    return None if parsed is None else _unless_refused(lambda: _rational_near(parsed))


def computed_matrix(text: str) -> tuple[tuple[str, ...], ...] | None:
    r"""The cells of the matrix that products, sums and powers of matrices make; None for any other text.

    Example: `2\begin{pmatrix}1\\x\end{pmatrix}` has the cells `(("2",), ("2 x",))`.
    """
    parsed = _parse(text)
    return None if parsed is None else _unless_refused(lambda: _computed_cells(parsed))


def differ_by_a_constant(gold: str, answer: str) -> bool:
    """Whether two expressions with variables have the same derivatives."""
    wanted = _parse(gold)
    given = _parse(answer)
    if wanted is None or given is None:
        return False
    return _unless_refused(lambda: _derivatives_equal(wanted, given)) or False


@contextmanager
def unread_texts() -> Generator[set[str]]:
    """Collects the texts, in the block, that should have been compared as algebra and cannot be read."""
    texts: set[str] = set()
    token = _unread.set(texts)
    try:
        yield texts
    finally:
        _unread.reset(token)


# --- comparison -----------------------------------------------------------------------------------


def _rational_near(parsed: Any) -> Fraction | None:
    sympy = _library().sympy
    if not isinstance(parsed, sympy.Expr) or parsed.free_symbols:
        return None
    value = parsed.evalf(_DECIMAL_DIGITS)
    if not isinstance(value, sympy.Float) or not value.is_finite:
        return None
    # An exact fraction of a number of this many digits, before or after the point, would take too long.
    num_digits = abs(int(sympy.log(sympy.Abs(value), 10).evalf(5))) if value != 0 else 0
    return Fraction(str(value)) if num_digits < _MAX_DIGITS else None


def _unions_equal(wanted: Iterable[Any], given: Iterable[Any]) -> bool:
    one = _union(wanted)
    two = _union(given)
    return one is not None and two is not None and _sets_equal(one, two)


def _are_complements(some: Iterable[Any], others: Iterable[Any]) -> bool:
    one = _union(some)
    two = _union(others)
    return one is not None and two is not None and _sets_equal(one, two.complement(_library().sympy.Reals))


def _union(parts: Iterable[Any]) -> Any | None:
    """The union of sets, intervals and inequalities; None if a part is none of these."""
    sets = [_as_set(part) for part in parts]
    return None if any(part is None for part in sets) else _library().sympy.Union(*sets)


def _equal(wanted: Any, given: Any) -> bool:
    sympy = _library().sympy
    if isinstance(wanted, sympy.MatrixBase) or isinstance(given, sympy.MatrixBase):
        return _matrices_equal(wanted, given)
    if wanted == given:
        return True
    if isinstance(wanted, sympy.Eq) and isinstance(given, sympy.Eq):
        # One equation is a multiple of the other.
        return _constant_ratio(wanted.lhs - wanted.rhs, given.lhs - given.rhs) is not None
    if isinstance(wanted, sympy.core.relational.Relational) and isinstance(
        given, sympy.core.relational.Relational
    ):
        return _inequalities_equal(wanted, given)
    if isinstance(wanted, sympy.Expr) and isinstance(given, sympy.Expr):
        return _expressions_equal(wanted, given)
    sets = _as_set(wanted), _as_set(given)
    return sets[0] is not None and sets[1] is not None and _sets_equal(*sets)


def _matrices_equal(wanted: Any, given: Any) -> bool:
    sympy = _library().sympy
    if not (isinstance(wanted, sympy.MatrixBase) and isinstance(given, sympy.MatrixBase)):
        return False
    return wanted.shape == given.shape and all(
        _equal(one, two) for one, two in zip(wanted.flat(), given.flat(), strict=True)
    )


def _computed_cells(parsed: Any) -> tuple[tuple[str, ...], ...] | None:
    sympy = _library().sympy
    powers = [part for part in sympy.preorder_traversal(parsed) if isinstance(part, sympy.Pow | sympy.MatPow)]
    of_matrices = [part for part in powers if isinstance(part.base, sympy.MatrixBase | sympy.MatrixExpr)]
    if any(not part.exp.is_Integer or abs(part.exp) > _MAX_DEGREE for part in of_matrices):
        return None
    if any(part.exp < 0 and part.base.free_symbols and part.base.shape[0] > 3 for part in of_matrices):
        return None  # the inverse would have too many terms
    value = parsed.doit()
    if isinstance(value, sympy.MatrixExpr):
        value = value.as_explicit()
    if not isinstance(value, sympy.MatrixBase):
        return None
    return tuple(tuple(sympy.latex(cell) for cell in row) for row in value.tolist())


def _derivatives_equal(wanted: Any, given: Any) -> bool:
    sympy = _library().sympy
    if not (isinstance(wanted, sympy.Expr) and isinstance(given, sympy.Expr) and wanted.free_symbols):
        return False
    return all(
        _expressions_equal(wanted.diff(symbol), given.diff(symbol))
        for symbol in wanted.free_symbols | given.free_symbols
    )


def _expressions_equal(wanted: Any, given: Any) -> bool:
    """Compares numbers exactly, and expressions with variables exactly at several points."""
    sympy = _library().sympy
    computed = (sympy.Sum, sympy.Integral, sympy.Product, sympy.Limit, sympy.Derivative)
    wanted, given = (
        expr.doit() if expr.has(*computed, sympy.factorial) else expr for expr in (wanted, given)
    )
    if wanted.has(*computed) or given.has(*computed):
        return bool(wanted == given)  # without a closed form, none of its digits is certain
    if not wanted.free_symbols and not given.free_symbols:
        return _numbers_equal(wanted, given)
    num_agreeing = 0
    for family in _FAMILIES:
        agreeing = _agreeing_points(wanted, given, family)
        if agreeing is None:
            return False
        num_agreeing += agreeing
        if num_agreeing >= _MIN_AGREEING:
            return True
    return False


def _numbers_equal(wanted: Any, given: Any) -> bool:
    """Whether the difference of two numbers is 0: exactly for fractions, to many digits for other numbers."""
    sympy = _library().sympy
    if wanted == given:
        return True
    if not (wanted.is_finite and given.is_finite):
        one = wanted.evalf(15)
        two = given.evalf(15)
        if not (one.is_finite and two.is_finite):
            return bool(one == two)
    difference = wanted - given
    if difference.is_Rational:
        return bool(difference == 0)
    size = _num_digits(difference)
    if size > _MAX_DIGITS:
        return False
    try:
        value = difference.evalf(10, maxn=_DIGITS + 3 * size, strict=True)
    except sympy.core.evalf.PrecisionExhausted:
        return True  # not one digit of the difference is known, however many are computed
    return bool(value == 0)


def _num_digits(value: Any) -> int:
    """Number of digits, before and after the decimal point, of all the numbers and powers in a value."""
    sympy = _library().sympy
    num_bits = 0
    for part in sympy.preorder_traversal(value):
        if part.is_Rational:
            num_bits += max(part.p.bit_length(), part.q.bit_length())
        elif isinstance(part, sympy.Pow | sympy.exp | sympy.factorial | sympy.gamma):
            size = sympy.Abs(part).evalf(5)
            if size.is_Float and size != 0:
                num_bits += abs(int(sympy.log(size, 2).evalf(10)))
    return num_bits * 302 // 1000  # a digit is 3.32 bits


def _agreeing_points(wanted: Any, given: Any, points: Sequence[str]) -> int | None:
    """The number of points at which both expressions are defined and agree; None if they differ at one."""
    sympy = _library().sympy
    symbols = sorted(wanted.free_symbols | given.free_symbols, key=str)
    is_complex = wanted.has(sympy.I) or given.has(sympy.I)
    num_agreeing = 0
    for shift in range(len(points)):
        point = {
            symbol: sympy.Rational(points[(shift + place) % len(points)]) + place // len(points)
            for place, symbol in enumerate(symbols)
        }
        one, two = (expr.subs(point) for expr in (wanted, given))
        rounded = one.evalf(15), two.evalf(15)
        if not all(value.is_number and value.is_finite for value in rounded):
            continue
        if not is_complex and not all(value.is_real for value in rounded):
            continue  # variables are real, so a root of a negative number counts as not defined
        size = sympy.Abs(rounded[0])
        if size > 1e-9 and sympy.Abs(rounded[0] - rounded[1]) > 1e-9 * size:
            return None
        if num_agreeing < _MIN_AGREEING and not _numbers_equal(one, two):
            return None  # the slow, exact comparison of a few points is enough
        num_agreeing += 1
    return num_agreeing


def _inequalities_equal(wanted: Any, given: Any) -> bool:
    """Whether one inequality is a positive multiple of the other, or both describe the same set."""
    sympy = _library().sympy
    kind, one = _below_zero(wanted)
    other_kind, two = _below_zero(given)
    if kind is other_kind:
        ratio = _constant_ratio(one, two)
        if ratio is not None and (ratio.is_positive or kind is sympy.Ne):
            return True
    sets = _as_set(wanted), _as_set(given)
    return sets[0] is not None and sets[1] is not None and _sets_equal(*sets)


def _below_zero(relation: Any) -> tuple[Any, Any]:
    """An inequality as its kind (`<`, `<=` or `!=`) and the expression that has this relation to 0."""
    sympy = _library().sympy
    if isinstance(relation, sympy.StrictGreaterThan | sympy.GreaterThan):
        is_strict = isinstance(relation, sympy.StrictGreaterThan)
        return sympy.StrictLessThan if is_strict else sympy.LessThan, relation.rhs - relation.lhs
    return cast("Any", type(relation)), relation.lhs - relation.rhs


def _constant_ratio(one: Any, two: Any) -> Any | None:
    """`one / two` if it is a number other than 0; else None."""
    sympy = _library().sympy
    if one.free_symbols != two.free_symbols or not one.free_symbols:
        return None
    ratio = sympy.simplify(one / two)
    return ratio if ratio.is_number and ratio.is_finite and ratio != 0 else None


def _as_set(value: Any) -> Any | None:
    """The set that a set, an interval or an inequality of one variable describes; else None."""
    sympy = _library().sympy
    if isinstance(value, sympy.Set):
        return value
    if isinstance(value, sympy.Eq) and isinstance(value.rhs, sympy.Set):
        return value.rhs
    if len(value.free_symbols) != 1:
        return None
    is_condition = isinstance(value, sympy.core.relational.Relational | sympy.And | sympy.Or)
    exponents = [power.exp for power in value.atoms(sympy.Pow) if power.exp.is_Rational]
    is_solved = all(exponent <= _MAX_DEGREE for exponent in exponents)
    return value.as_set() if is_condition and is_solved else None


def _sets_equal(one: Any, two: Any) -> bool:
    if one == two:
        return True
    sympy = _library().sympy
    if isinstance(one, sympy.Interval) and isinstance(two, sympy.Interval):
        return (
            one.left_open == two.left_open
            and one.right_open == two.right_open
            and _equal(one.start, two.start)
            and _equal(one.end, two.end)
        )
    return one.symmetric_difference(two).is_empty is True


# --- reading --------------------------------------------------------------------------------------


def _is_heavy(value: Any) -> bool:
    """Whether computing a value could take practically forever."""
    sympy = _library().sympy
    if isinstance(value, sympy.MatrixBase):
        return any(_is_heavy(part) for part in value.flat())
    for part in sympy.preorder_traversal(value):
        if isinstance(part, sympy.Sum | sympy.Product) and _has_many_terms(part):
            return True
        if isinstance(part, sympy.Pow) and part.exp.is_number and part.base.is_number:
            if _is_large_power(part):
                return True
            is_tower = isinstance(part.exp, sympy.Pow)
            size = sympy.Abs(part.exp.args[0] if is_tower else part.exp)
            if is_tower and not part.exp.exp.is_negative and part.exp.exp > 4:
                return True
            if size.is_Number and size > _MAX_EXPONENT:
                return True
        if isinstance(part, sympy.factorial | sympy.binomial) and any(
            arg.is_number and (not arg.is_Number or arg > _MAX_EXPONENT) for arg in part.args
        ):
            return True
    return False


def _is_large_power(power: Any) -> bool:
    """Whether the exact value of a power has too many digits, or is a root of a number that has."""
    if not power.exp.is_Rational:
        return False
    return _num_bits(power) > _MAX_POWER_BITS or (power.exp.q > 1 and _num_bits(power.base) > _MAX_ROOT_BITS)


def _num_bits(number: Any) -> int:
    """A bound of the bits of a number that is made of fractions; other numbers are not computed exactly."""
    sympy = _library().sympy
    if number.is_Rational:
        return max(number.p.bit_length(), number.q.bit_length())
    if isinstance(number, sympy.Pow) and number.exp.is_Rational:
        return _num_bits(number.base) * abs(number.exp.p) // number.exp.q
    if isinstance(number, sympy.Add | sympy.Mul):
        return sum(_num_bits(part) for part in number.args)
    return 0


def _has_many_terms(sum_or_product: Any) -> bool:
    """Whether a sum or product has to be computed term by term, and has too many of them."""
    term = sum_or_product.function
    for symbol, first, last in sum_or_product.limits:
        num_terms = last - first
        is_sum = isinstance(sum_or_product, _library().sympy.Sum)
        has_formula = term == symbol or (
            is_sum and term.is_polynomial(symbol) and _library().sympy.degree(term, symbol) <= _MAX_DEGREE
        )
        if num_terms.is_Number and num_terms.is_finite and num_terms > _MAX_TERMS and not has_formula:
            return True
    return False


_ENDLESS = re.compile(
    r"\^\s*\{?\s*-?(?:\d{5,}|\d+\s*\^)|\d{5,}\s*\}?\)?!|!!|\^\S{0,9}\^\S{0,9}\^|\\binom\S*\d{5,}"
)
"""Powers, towers of powers, factorials and binomials that take too long even to parse, because the parser
computes them."""


_FACTOR = re.compile(r"(?<=[\d)])\s*(?=\()|(?<=\d)\s*(?=\{)")
"""Place of an omitted product sign, as in `2(3)`. The parser would read a mixed number, and add."""
_TWO_NUMBERS = re.compile(r"\d\s+\.?\d|\d\.\d+\.\d|'")
"""Two adjacent numbers, which the parser would add or multiply; and primes, which it drops."""


def _parse(text: str) -> Any | None:
    """Parses a text to a sympy object; None if it cannot be read or is too heavy to compute."""
    if _ENDLESS.search(text) is None and _TWO_NUMBERS.search(text) is None:
        value = _unless_refused(lambda: _read(text))
        if value is not None:
            return value
    noted = _unread.get()
    if noted is not None:
        noted.add(text)
    return None


@lru_cache(maxsize=512)
def _read(text: str) -> Any:
    """Parses a text to a sympy object. Raises: errors that `_unless_refused` handles; they are not cached."""
    value = _uniform(_library().parse(_FACTOR.sub(r"\\cdot ", text)))
    # `x^2 + 1 = 0` with a real `x` is simply false, and would equal every other false statement.
    if isinstance(value, bool | _library().sympy.logic.boolalg.BooleanAtom):
        raise _UnreadError
    if _is_heavy(value):
        raise _UnreadError
    return value


def _uniform(value: Any) -> Any:
    """The same value with real variables, `i` as the imaginary unit, and decimals as exact fractions."""
    sympy = _library().sympy
    if isinstance(value, sympy.MatrixBase):
        return value.applyfunc(_uniform)
    changes: dict[Any, Any] = {}
    for atom in value.atoms(sympy.Symbol, sympy.Float):
        if isinstance(atom, sympy.Float):
            changes[atom] = sympy.Rational(str(atom))
        elif atom.name == "i":
            changes[atom] = sympy.I
        else:
            changes[atom] = sympy.Symbol(atom.name, real=True)
    return value.xreplace(changes) if changes else value


# --- the libraries --------------------------------------------------------------------------------

_T = TypeVar("_T")
_unread: ContextVar[set[str] | None] = ContextVar("unread", default=None)
_REFUSALS = (
    ArithmeticError,  # a division by 0
    AttributeError,  # an operator without its operand
    IndexError,  # a matrix without a row
    NotImplementedError,  # an inequality that sympy cannot solve
    RecursionError,  # hundreds of nested brackets
    TypeError,  # an order of complex numbers
    ValueError,  # an integral without a variable, a matrix with rows of several lengths
)
"""What the parser and sympy raise for texts and comparisons that make no sense."""
_KNOWN_PAIRS = (
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("(x+1)(x-1)", "x^2-1"),
    ("2x=6y", "x=3y"),
    ("2x<6", "3>x"),
    ("x^2<4", "(-2,2)"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\sum_{k=1}^{3}k", "6"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&\sqrt{4}\\3&4\end{pmatrix}"),
)
"""Pairs of equal texts, which together use all that comparisons use."""


class _UnreadError(Exception):
    """Raised for a text that can be parsed, but must not be compared."""


def _unless_refused(work: Callable[[], _T]) -> _T | None:
    """Calls `work` and returns its result; None if the libraries refuse the text or the comparison.

    Raises: ScorerError if the libraries do not work; whatever else `work` raises.
    """
    try:
        return work()
    except _UnreadError:
        return None
    except Exception as error:
        # For texts with a syntax error, the parser raises `Exception` itself.
        if type(error) is not Exception and not isinstance(error, _REFUSALS):
            raise
        _check_libraries(error)
        return None


def _check_libraries(error: Exception) -> None:
    """Checks that an error is due to the text: the libraries must still work for another one."""
    gold, answer = _KNOWN_PAIRS[0]
    parse = _library().parse
    try:
        is_working = _equal(_uniform(parse(gold)), _uniform(parse(answer)))
    except Exception as err:  # noqa: BLE001 - how they fail is not known
        raise ScorerError(
            f"sympy and math-verify stopped working in this process: comparing {gold} with {answer} raises "
            f"{describe_error(err)}"
        ) from error
    if not is_working:
        raise ScorerError(
            f"sympy and math-verify stopped working in this process: they find {gold} and {answer} unequal, "
            f"after {describe_error(error)}"
        ) from error


@lru_cache(maxsize=1)
def _library() -> _Library:
    try:
        import sympy
        from latex2sympy2_extended import latex2sympy2
    except ImportError as err:
        raise ConfigError(
            f"the reward `math_verify` needs the package: {install_command('tasks')} ({err})"
        ) from err
    # It would warn about every comparison that has no time limit of its own, and log the model's texts.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    normalization = latex2sympy2.NormalizationConfig(boxed="none")
    conversion = latex2sympy2.ConversionConfig(lowercase_symbols=False)

    def parse(text: str) -> Any:
        return cast("Any", latex2sympy2).latex2sympy(
            text, is_real=True, normalization_config=normalization, conversion_config=conversion
        )

    return _Library(cast("Any", sympy), parse)
