"""Questions for words, and scores that only words of the lists get."""

import json
import re

import pytest

from astraflow.addons.words.config import TriviaSourceConfig, WordsReward, WordsSourceConfig
from astraflow.addons.words.everyday import EverydaySource
from astraflow.addons.words.questions import (
    KINDS,
    LETTERS,
    MIN_WORDS,
    WordsScorer,
    WordsSource,
    fold,
    question_of,
    words_of,
)
from astraflow.errors import DataError
from astraflow.protocols import Score, ScoringCall
from astraflow.recipe.gallery import find_entry
from astraflow.recipe.recipe import load_recipe
from astraflow.tasks.rewards import make_reward
from astraflow.tasks.variants import SourceContext
from astraflow.types import Task


def source(split: str) -> WordsSource:
    return WordsSource(WordsSourceConfig.model_validate({"split": split}), name="words")


def tasks(split: str) -> list[Task]:
    found = source(split)
    return [found.task(idx) for idx in range(len(found))]


def asking(kind: str, letter: str) -> Task:
    spec = json.dumps({"kind": "words", "of": kind, "letter": letter})
    return Task(id="words/x", source="words", prompt="?", spec=spec)


def score(kind: str, letter: str, text: str, *, part: float = 0.1) -> Score:
    return WordsScorer(part)(ScoringCall(asking(kind, letter), text, text))


# --- questions ------------------------------------------------------------------------------------


def test_most_pairs_of_16_kinds_and_18_letters_are_asked() -> None:
    assert (len(KINDS), len(LETTERS)) == (16, 18)
    assert 0.85 * 16 * 18 < len(source("all")) <= 16 * 18


def test_held_out_pairs_are_never_trained() -> None:
    asked = {split: {question_of(task) for task in tasks(split)} for split in ("train", "heldout", "all")}
    assert not asked["train"] & asked["heldout"]
    assert asked["train"] | asked["heldout"] == asked["all"]
    assert len(asked["heldout"]) >= 56
    assert {question.kind for question in asked["heldout"]} == set(KINDS)


def test_the_start_of_a_split_mixes_kinds_and_letters() -> None:
    first = [question_of(task) for task in tasks("train")[:64]]
    assert len({question.kind for question in first}) >= 14
    assert len({question.letter for question in first}) >= 14


def test_a_task_has_an_id_of_its_own_and_says_what_it_asks_for() -> None:
    found = tasks("all")
    assert len({task.id for task in found}) == len(found)
    task = next(task for task in found if task.id == "words/body-part-h")
    assert task.prompt == "Name a part of the body that starts with the letter H. Answer with one word."


def test_every_pair_that_is_asked_has_several_answers() -> None:
    for question in map(question_of, tasks("all")):
        right = [word for word in words_of(question.kind) if word.startswith(question.letter)]
        assert len(right) >= MIN_WORDS, question


# --- lists ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_word_of_a_list_is_right_for_its_letter_and_wrong_for_others(kind: str) -> None:
    for word in words_of(kind):
        for letter in LETTERS:
            assert score(kind, letter, word) == (1.0 if word[0] == letter else 0.2), word


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_has_plain_words_only(kind: str) -> None:
    assert len(words_of(kind)) >= 150
    for word in words_of(kind):
        assert word == fold(word)
        assert re.fullmatch(r"[a-z'][a-z0-9'. -]*", word), word
        assert len(word) >= 2


def test_birds_are_animals_and_fruits_and_vegetables_are_foods() -> None:
    assert words_of("bird") <= words_of("animal")
    assert words_of("fruit") | words_of("vegetable") <= words_of("food")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("adjective", "happy, big, red, beautiful, old, new"),
        ("animal", "dog, cat, lion, elephant, shark, bee, snake"),
        ("bird", "eagle, owl, penguin, robin, sparrow, crow"),
        ("body part", "arm, leg, nose, heart, elbow, toe"),
        ("city", "paris, london, new york, tokyo, boston, oxford, venice, washington, mexico city"),
        ("clothing", "shirt, hat, pants, sock, dress, jacket, t-shirt"),
        ("country", "france, brazil, united states, south africa, wales, vatican city"),
        ("first name", "anna, peter, wendy, omar, isabella"),
        ("food", "bread, pizza, cheese, rice, apple, carrot"),
        ("fruit", "apple, banana, grape, watermelon, nectarine"),
        ("job", "doctor, teacher, nurse, engineer, waiter"),
        ("language", "english, german, welsh, latin, igbo"),
        ("last name", "smith, brown, garcia, lee, washington"),
        ("sport", "tennis, soccer, golf, rowing, netball"),
        ("vegetable", "carrot, onion, pea, potato, artichoke"),
        ("verb", "be, go, run, eat, write, think"),
    ],
)
def test_the_lists_have_what_people_think_of_first(kind: str, words: str) -> None:
    assert set(words.split(", ")) <= words_of(kind)


# --- scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["Brazil", "brazil", "BRAZIL", "Brazil.", "  Brazil\n", "Bra\u0301zil"])
def test_a_right_answer_may_have_capitals_accents_and_a_period(text: str) -> None:
    assert score("country", "b", text) == 1.0


@pytest.mark.parametrize(
    ("kind", "letter", "text", "value"),
    [
        ("country", "a", "Axath", 0.2),  # one word with the letter, but no country
        ("country", "a", "Axath Bolo", 0.2),
        ("country", "a", "Brazil", 0.2),  # a country with another letter
        ("country", "a", "Table", 0.1),  # one word, nothing else
        ("country", "b", "Brazil Belgium", 0.2),  # two answers are no answer
        ("country", "b", "Brazil, Belgium", 0.0),
        ("country", "b", "Brazil\nBelgium", 0.2),
        ("country", "b", "Brazil!", 0.0),
        ("country", "b", "B", 0.0),
        ("country", "b", "A country is Brazil", 0.0),
        ("animal", "c", "Cats", 1.0),
        ("animal", "o", "Ostriches", 1.0),
        ("body part", "a", "Arteries", 1.0),
        ("animal", "o", "Ostrichs", 0.2),
        ("country", "b", "Brazils", 0.2),
        ("animal", "c", "the cat", 0.1),
        ("animal", "c", "\u0441at", 0.1),  # begins with a Cyrillic letter
        ("animal", "c", "\uff43at", 0.1),  # begins with a wide letter
        ("animal", "c", "c\u200bat", 0.0),  # has a space of no width
        ("animal", "c", "cat cat", 0.2),
        ("animal", "c", "", 0.0),
        ("animal", "c", ".", 0.0),
        ("animal", "c", "C c", 0.0),
        ("animal", "c", "cat..", 0.0),
        ("animal", "c", "c" * 10_000, 0.2),
        ("city", "n", "New York", 1.0),
        ("country", "s", "South Africa", 1.0),
        ("body part", "a", "Adam\u2019s apple", 1.0),
    ],
)
def test_tricks_get_the_parts_at_most(kind: str, letter: str, text: str, value: float) -> None:
    assert score(kind, letter, text) == pytest.approx(value)
    assert score(kind, letter, text, part=0.0) == (1.0 if value == 1.0 else 0.0)


def test_the_metric_says_whether_the_word_is_of_the_kind() -> None:
    assert score("country", "a", "Brazil").parts == {"real": 1.0}
    assert score("country", "a", "Axath").parts == {"real": 0.0}


def test_a_task_of_another_source_is_refused_before_the_run() -> None:
    check = WordsReward().checker(WordsSourceConfig())
    assert check is not None
    check(tasks("train")[0])
    other = Task(id="sums/1", source="sums", prompt="1 + 1", answer="2")
    with pytest.raises(DataError, match=r"task sums/1 isn't from the source `words`"):
        check(other)
    with pytest.raises(DataError, match=r"isn't from the source `words`"):
        WordsScorer(0.1)(ScoringCall(other, "Brazil", "Brazil"))


def test_an_everyday_question_gets_nothing_whatever_the_answer() -> None:
    task = EverydaySource(name="everyday").task(0)
    for text in ("", "Ottawa", "Brazil"):
        assert WordsScorer(0.1)(ScoringCall(task, text, text)) == 0.0
    assert WordsReward().checker(TriviaSourceConfig(questions="everyday")) is None
    assert WordsReward().checker(TriviaSourceConfig()) is not None


def test_the_recipe_scores_with_it_and_evaluates_real_words_only() -> None:
    recipe = load_recipe(find_entry("real/words").path)
    reward = make_reward(recipe.tasks)
    heldout = recipe.eval.sets["heldout"]
    assert isinstance(recipe.tasks.reward, WordsReward)
    assert isinstance(heldout.reward, WordsReward)
    assert (recipe.tasks.reward.part, heldout.reward.part) == (0.1, 0.0)
    assert reward(asking("country", "b"), "Brazil") == 1.0
    assert isinstance(heldout.source, WordsSourceConfig)
    assert len(heldout.source.make(SourceContext(name="heldout"))) >= heldout.num_tasks
