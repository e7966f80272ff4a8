"""Tasks and rewards of the recipes of a real model, other than those of `real/follow`."""

import re
import shutil
from collections.abc import Iterator

import pytest
from recipes.real.python_docs import EXAMPLE, Questions, documents, is_found
from recipes.real.text_games import Tidying
from recipes.real.worked_sums import HELDOUT_FRAC, worked_sums

from astraflow.addons.reasoning_gym.config import ReasoningGymConfig
from astraflow.errors import ConfigError
from astraflow.protocols import Observation
from astraflow.types import Task

# --- documentation of Python ----------------------------------------------------------------------


def test_questions_about_python_have_one_answer_which_is_in_the_documents() -> None:
    texts = {row["title"]: row["text"] for row in documents()}
    splits = [Questions(source="docs", split=split) for split in ("train", "heldout")]
    tasks = [[source.task(idx) for idx in range(len(source))] for source in splits]
    assert not {task.prompt for task in tasks[0]} & {task.prompt for task in tasks[1]}
    assert len(tasks[1]) >= 256
    for task in (*tasks[0], *tasks[1]):
        sentence = task.prompt.removeprefix("Search: ")
        starting = [name for name, text in texts.items() if f"{text} ".startswith(f"{sentence}. ")]
        assert starting in ([task.answer], [])  # none: its docstring has no period
        assert texts[task.answer].startswith(sentence)
        assert task.answer not in {message.content for message in EXAMPLE}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("shlex.quote", 1.0),
        (" `shlex.quote()`.", 1.0),
        ("shlex.quote: Return a string.", 0.2),
        ("quote", 0.0),
        ("shlex.quotes", 0.0),
        ("It is shlex.quote", 0.0),
        ("Search: quote", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_full_name_counts_whole(text: str, score: float) -> None:
    task = Task(id="docs/0", source="docs", prompt="?", answer="shlex.quote")
    assert is_found(task, text, part=0.2) == score


# --- worked sums ----------------------------------------------------------------------------------


def test_worked_sums_are_right_and_never_held_out() -> None:
    shown = worked_sums(300, 0)
    for each in shown:
        *columns, total = re.findall(r"([\d +]+) = (\d+)", each.reply)
        assert all(sum(map(int, terms.split("+"))) == int(found) for terms, found in [*columns, total])
        assert f"Calculate {total[0].strip()}." == each.prompt
        assert len(columns) == 2
    assert ReasoningGymConfig(dataset="basic_arithmetic").heldout_frac == HELDOUT_FRAC
    assert shown == worked_sums(300, 0) != worked_sums(300, 1)


# --- text games -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tidying() -> Iterator[Tidying]:
    if shutil.which("java") is None:
        pytest.skip("TextWorldExpress needs Java")
    world = Tidying()
    world.open()
    yield world
    world.close()


def commands_of(observation: Observation) -> list[str]:
    assert isinstance(observation.messages, str)
    return observation.messages.partition("\nCommands: ")[2].split(" | ")


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_each_game_can_be_won_by_its_commands(tidying: Tidying, split: str) -> None:
    """The player opens what is closed, and then tries all places until one is right."""
    for task in tidying.tasks(split)[:10]:
        game, seen = tidying.reset(task, 0)
        scores: list[float] = []
        tried: set[str] = set()
        while not seen.is_done:
            new = [
                command
                for command in commands_of(seen)
                if command not in tried or command.startswith("take ")
            ]
            chosen = next((each for each in new if each.startswith("open ")), new[-1])
            tried.add(chosen)
            seen = tidying.step(game, f" {chosen.capitalize()}.\nThat is right.")
            scores.append(seen.reward)
        assert sum(scores) == 1.0
        assert len(scores) == len(game.commands) <= 40


def test_games_played_at_a_time_do_not_disturb_each_other(tidying: Tidying) -> None:
    tasks = tidying.tasks("train")[:2]
    begun = [tidying.reset(task, 0) for task in tasks]
    took = [
        tidying.step(game, next(c for c in commands_of(seen) if c.startswith("take ")))
        for game, seen in begun
    ]
    assert [seen.reward for seen in took] == [0.5, 0.5]
    assert took[0].messages != took[1].messages
    assert tidying.step(begun[0][0], "dance").reward == 0.0


def test_the_games_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"needs Java.*apt-get install"):
        Tidying().tasks("train")
    with pytest.raises(ConfigError, match="'test' is not one of: train, heldout"):
        Tidying().tasks("test")
