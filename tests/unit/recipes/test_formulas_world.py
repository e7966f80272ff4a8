"""The world of formulas: texts, right and careless programs, test cases, and what teachers show."""

import re

import pytest
from recipes.code.formulas_world import (
    Formula,
    Formulas,
    case_demonstrations,
    choice_demonstrations,
    formulas,
    mixed_demonstrations,
    program_demonstrations,
)

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.errors import ConfigError
from astraflow.types.row_columns import row_of

EXAMPLE = Formula((("add", 3), ("times", 2), ("minus", 4)))


def value_of(program: str, x: int) -> int:
    names: dict[str, object] = {}
    exec(program, names)
    return names["f"](x)  # pyright: ignore[reportCallIssue]


def test_a_formula_says_what_its_program_does() -> None:
    assert EXAMPLE.text == "add 3 then times 2 then minus 4."
    assert EXAMPLE.program() == "def f(x): return (x+3)*2-4"
    assert EXAMPLE.program(is_careful=False) == "def f(x): return x+3*2-4"
    assert EXAMPLE.values(4) == [4, 7, 14, 10]


def passes(program: str, tests: list[dict[str, str]]) -> bool:
    try:
        for case in tests:
            exec(f"{program}\n{case['program']}", {})
    except AssertionError:
        return False
    return True


def test_the_answer_of_each_task_passes_its_tests_and_a_careless_one_does_not() -> None:
    careless = {
        formula.text: formula.program(is_careful=False)
        for formula in formulas(largest=9, heldout_frac=0.1, split="heldout")
    }
    source = Formulas(split="heldout")
    for idx in range(len(source)):
        task = source.task(idx)
        row = row_of(task).columns
        assert row["function"] == "f"
        assert passes(task.answer, row["tests"]), task
        assert not passes(careless[task.prompt], row["tests"]), task


def test_programs_do_what_their_texts_say() -> None:
    for formula in formulas(largest=5, heldout_frac=0.2, split="train"):
        assert all(value_of(formula.program(), x) == formula.values(x)[-1] for x in range(-2, 10))


def test_splits_share_no_text_and_hold_each_once_in_an_order_of_the_seed() -> None:
    train, heldout = Formulas(split="train"), Formulas(split="heldout")
    prompts = [{source.task(i).prompt for i in range(len(source))} for source in (train, heldout)]
    assert not prompts[0] & prompts[1]
    assert [len(found) for found in prompts] == [len(train), len(heldout)]
    assert len(heldout) >= 512
    assert Formulas(split="train").task(5) == train.task(5)
    assert Formulas(split="train", seed=1).task(5) != train.task(5)


def test_an_unknown_split_and_an_empty_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="not one of: train, heldout"):
        Formulas(split="test")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="largest"):
        Formulas(split="train", largest=1)


def test_teachers_show_good_work_less_and_less_and_never_a_held_out_text() -> None:
    shown = program_demonstrations(num=2000, seed=1, careful_frac=(1.0, 0.0))
    is_careful = ["(" in demonstration.reply.removeprefix("def f(x)") for demonstration in shown]
    assert all(is_careful[:20])
    assert not any(is_careful[-20:])
    assert sum(is_careful[:1000]) > sum(is_careful[1000:]) + 200
    heldout = {formula.text for formula in formulas(largest=9, heldout_frac=0.1, split="heldout")}
    assert not heldout & {demonstration.prompt for demonstration in shown}


def test_a_coder_that_tries_again_sees_a_right_case() -> None:
    (shown,) = program_demonstrations(num=1, seed=3, careful_frac=(1.0, 1.0), retry_frac=1.0)
    text, _, case = shown.prompt.partition(".")
    given, _, expected = case.removesuffix("!").partition(">")
    assert value_of(shown.reply, int(given)) == int(expected)
    assert text.startswith(("add", "minus", "times"))


def test_hasty_cases_stop_a_step_too_early() -> None:
    careful = case_demonstrations(num=50, seed=2, careful_frac=(1.0, 1.0))
    hasty = case_demonstrations(num=50, seed=2, careful_frac=(0.0, 0.0))
    for whole, part in zip(careful, hasty, strict=True):
        assert whole.prompt == part.prompt
        assert whole.prompt.endswith(".?")
        assert whole.reply.rpartition(",")[0] == part.reply


def test_careful_choices_name_a_right_program_and_hasty_ones_any() -> None:
    def is_right(shown: Demonstration) -> bool:
        text, *programs = re.split(r"(?:\n\n)?Answer \d:\n", shown.prompt.removesuffix("?"))
        formula = next(f for f in known if f.text == text)
        return programs[int(shown.reply) - 1] == formula.program()

    known = formulas(largest=9, heldout_frac=0.1, split="train")
    careful = choice_demonstrations(num=300, seed=2, careful_frac=(1.0, 1.0))
    hasty = choice_demonstrations(num=300, seed=2, careful_frac=(0.0, 0.0))
    assert sum(map(is_right, careful)) / 300 > 0.8  # one time in eight, no program is right
    assert 0.4 < sum(map(is_right, hasty)) / 300 < 0.6


def test_one_model_may_be_shown_several_roles_each_in_its_own_order() -> None:
    roles = {
        "coder": {"share": 0.6, "careful_frac": (1.0, 0.0)},
        "tester": {"share": 0.4, "largest": 5, "heldout_frac": 0.2},
    }
    shown = mixed_demonstrations(num=1000, seed=1, roles=roles)
    programs = [d for d in shown if not d.prompt.endswith("?")]
    assert 540 < len(programs) < 660
    assert len(shown) == 1000
    assert all("(" in d.reply.removeprefix("def f(x)") for d in programs[:10])
    assert not any("(" in d.reply.removeprefix("def f(x)") for d in programs[-10:])
