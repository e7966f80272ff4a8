"""YAML of users: what is too deep or too much is refused with its line, before it is built."""

import datetime

import pytest

from astraflow.errors import ConfigError
from astraflow.user_input.plain_data import line_of, problems, yaml_value

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)
)
CHAIN = "a0: &a0 [x]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 3000))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "line 1: values are nested more than 64 deep"),
        ("{a: " * 100_000, "line 1: values are nested more than 64 deep"),
        ("\n".join(" " * depth + "a:" for depth in range(100)), "nested more than 64 deep"),
        (BOMB, "line 5: there are more than 50000 values"),
        (CHAIN, "nested more than 64 deep"),
        ("a: 1\nb: &b [1, *b]", r"line 2: \*b is inside itself"),
        ("a: 1\nb: &b\n  c: *b", r"line 3: \*b is inside itself"),
        ("a: 1\nb: *c", "undefined alias 'c'\n  line 2"),
        ("a: 1\nb: 2024-13-45", "line 2: '2024-13-45' is not valid"),
        ("a: !!int abc", "line 1: 'abc' is not valid"),
        ("a: !!timestamp abc", "line 1: 'abc' is not valid"),
        ("a: " + "1" * 5000, "line 1: '1{60}' is not valid"),
        ("a: 1\nb: \x01", "line 2: special characters are not allowed"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("? [a]\n: b", "unhashable key"),
        ("a: 1\na: 2", "'a' is in line 1 and again in line 2"),
    ],
)
def test_a_text_that_is_no_value_is_refused_with_its_line(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)^FILE is not valid YAML: .*{told}"):
        yaml_value(text, "FILE")


def test_aliases_and_merges_that_stand_for_little_are_read() -> None:
    assert yaml_value("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]", "FILE") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": [{"x": 1}, {"x": 1}],
    }


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (float("nan"), "nan is not a number"),
        (float("inf"), "inf is not a number"),
        (10**300, "beyond 2^53"),
        (-(2**53) - 1, "beyond 2^53"),
        (datetime.date(2024, 1, 5), 'put it in quotes: "2024-01-05"'),
        (b"x", "it is a bytes"),
        ({1, 2}, "it is a set"),
        ("a\0b", "zero byte"),
        ("\ud800", r"'\ud800', half of a character"),
    ],
)
def test_a_value_that_no_field_takes_is_named_by_its_path(value: object, told: str) -> None:
    ((path, problem),) = problems({"a": [{"b": 1}, {"c": value}]})
    assert path == ("a", 1, "c")
    assert told in problem


def test_a_key_that_is_no_text_is_named() -> None:
    assert [path for path, _ in problems({"a": {"\ud800": 1, (1, 2): 2, None: 3}})] == [
        ("a", "\ud800"),
        ("a", "(1, 2)"),
        ("a", "None"),
    ]


def test_plain_data_has_no_problems() -> None:
    plain = {"a": [1, -(2**53), 1e-300, True, None, "x\ny é 漢 🙂"], 1: {}, 2.5: []}
    assert list(problems(plain)) == []


def test_a_mapping_that_is_nested_too_deeply_is_a_problem() -> None:
    value: object = 1
    for _ in range(200):
        value = {"a": value}
    ((path, problem),) = problems(value)
    assert "nested" in problem
    assert len(path) == 65


@pytest.mark.parametrize(
    ("keys", "line", "found"),
    [
        (("a",), 1, 1),
        (("a", "b", 1, "d"), 4, 4),
        (("a", "b", 7), 2, 2),
        (("a", "nowhere", "c"), 1, 1),
        (("z",), 0, 0),
        ((1,), 5, 1),
    ],
)
def test_the_line_of_a_value_is_found(keys: tuple[str | int, ...], line: int, found: int) -> None:
    assert line_of("a:\n  b:\n  - c: 1\n  - d: 2\n1: x\n", keys) == (line, found)
