"""Generated demonstrations."""

import random
import re
from collections.abc import Sequence

import pytest

from astraflow.addons.tiny_models.demonstrations import Demonstration, column_addition, make_demonstrations
from astraflow.addons.tiny_models.spec import AdditionCheckConfig, AdditionConfig
from astraflow.config import Use
from astraflow.errors import ConfigError
from astraflow.user_input.splits import is_heldout


def parrot(*, num: int, seed: int, word: str = "hi") -> Sequence[Demonstration]:
    return [Demonstration(word, f"{word}{seed}")] * num


def numbers(prompt: str) -> tuple[int, int]:
    a, _, b = prompt.removeprefix("Calculate ").removesuffix(".").split()
    return int(a), int(b)


@pytest.mark.parametrize(
    ("a", "b", "careful", "hasty"),
    [
        (378, 937, "15,11,13=1315", "15,10,12=1205"),
        (5, 95, "10,10=100", "10,9=90"),
        (120, 34, "4,5,1=154", "4,5,1=154"),
        (1000, 1000, "0,0,0,2=2000", "0,0,0,2=2000"),
        (0, 0, "0=0", "0=0"),
    ],
)
def test_columns_are_worked_out_from_the_right(a: int, b: int, careful: str, hasty: str) -> None:
    assert column_addition(a, b, carries=True) == careful
    assert column_addition(a, b, carries=False) == hasty


def test_careful_working_always_ends_in_the_sum() -> None:
    rng = random.Random(0)
    for _ in range(500):
        a, b = rng.randint(0, 10_000), rng.randint(0, 10_000)
        assert column_addition(a, b, carries=True).rpartition("=")[2] == str(a + b)


def test_the_share_of_careful_work_falls_from_the_first_to_the_last() -> None:
    config = AdditionConfig(careful_frac=(1.0, 0.0))
    made = make_demonstrations(config, num=2000, seed=1)
    is_right = [d.reply == column_addition(*numbers(d.prompt), carries=True) for d in made]
    assert all(is_right[:20])
    assert sum(is_right[:1000]) > sum(is_right[1000:]) + 200
    assert all(d.reply == column_addition(*numbers(d.prompt), carries=False) for d in made[-20:])


def test_held_out_prompts_are_never_shown() -> None:
    made = make_demonstrations(AdditionConfig(heldout_frac=0.5), num=300, seed=1)
    assert not any(is_heldout(d.prompt, frac=0.5) for d in made)


def test_the_same_seed_gives_the_same_demonstrations_and_another_gives_others() -> None:
    one, again, other = (make_demonstrations(AdditionConfig(), num=50, seed=s) for s in (1, 1, 2))
    assert one == again
    assert one != other


def test_checks_say_whether_the_working_is_right() -> None:
    config = AdditionCheckConfig(right_frac=0.5, flawed_frac=0.0, heldout_frac=0.1)
    verdicts = list[str]()
    for made in make_demonstrations(config, num=300, seed=1):
        problem, _, working = made.prompt.removesuffix("?").partition(".")
        is_right = working == column_addition(*numbers(f"{problem}."), carries=True)
        columns, _, verdict = made.reply.partition("=")
        assert verdict == ("y" if is_right else "n")
        right = column_addition(*numbers(f"{problem}."), carries=True)
        assert re.sub("[yn]", ",", columns) == f"{right.partition('=')[0]},"
        assert ("n" in columns) == (not is_right)
        assert not is_heldout(f"{problem}.", frac=0.1)
        verdicts.append(verdict)
    assert 100 < verdicts.count("y") < 200


def test_careless_checks_copy_what_is_shown_and_approve_it() -> None:
    config = AdditionCheckConfig(right_frac=0.3, careful_frac=(1.0, 0.0), flawed_frac=0.0)
    made = make_demonstrations(config, num=400, seed=1)
    assert any(d.reply.endswith("=n") for d in made[:20])
    for last in made[-10:]:
        shown = last.prompt.removesuffix("?").partition(".")[2].partition("=")[0]
        assert last.reply == "".join(f"{column}y" for column in shown.split(",")) + "=y"


def test_some_checks_may_be_sums_to_work_out() -> None:
    made = make_demonstrations(AdditionCheckConfig(solve_frac=0.5, flawed_frac=0.0), num=200, seed=1)
    sums = [d for d in made if not d.prompt.endswith("?")]
    assert 60 < len(sums) < 140
    assert all(d.reply == column_addition(*numbers(d.prompt), carries=True) for d in sums)


def test_flawed_checks_are_right_half_of_the_time() -> None:
    config = AdditionCheckConfig(right_frac=1.0, flawed_frac=1.0)
    made = make_demonstrations(config, num=400, seed=1)
    assert 150 < sum(d.reply.endswith("=y") for d in made) < 250


def test_demonstrations_of_the_users_own_get_number_seed_and_arguments() -> None:
    use = f"{__name__}:parrot"
    made = make_demonstrations(Use(use=use, args={"word": "yo"}), num=2, seed=7)
    assert made == [Demonstration("yo", "yo7")] * 2
    with pytest.raises(ConfigError, match='did you mean "word"'):
        make_demonstrations(Use(use=use, args={"wrd": "yo"}), num=2, seed=7)
