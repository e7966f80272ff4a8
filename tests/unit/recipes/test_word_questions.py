"""Questions for words, and scores that only words of the lists get."""

import re

import pytest
from recipes.real.trivia import everyday_requests
from recipes.real.word_questions import (
    KINDS,
    LETTERS,
    MIN_WORDS,
    fold,
    name_word,
    questions,
    say_what_is_wrong,
    words_of,
)

from astraflow.errors import DataError
from astraflow.protocols import Score
from astraflow.recipe.gallery import find_entry
from astraflow.recipe.recipe import load_recipe
from astraflow.tasks.rewards import make_reward
from astraflow.tasks.sources import make_source
from astraflow.types import Task
from astraflow.types.row_columns import row_of

TASK = Task(id="words/x", source="words", prompt="?")


def tasks(split: str) -> list[Task]:
    source = questions(source="words", split=split)
    return [source.task(idx) for idx in range(len(source))]


def pair_of(task: Task) -> tuple[str, str]:
    columns = row_of(task).columns
    return columns["kind"], columns["letter"]


def score(kind: str, letter: str, text: str, *, part: float = 0.1) -> Score:
    return name_word(TASK, text, kind=kind, letter=letter, part=part)


# --- questions ------------------------------------------------------------------------------------


def test_most_pairs_of_16_kinds_and_18_letters_are_asked() -> None:
    assert (len(KINDS), len(LETTERS)) == (16, 18)
    assert 0.85 * 16 * 18 < len(tasks("all")) <= 16 * 18


def test_held_out_pairs_are_never_trained() -> None:
    asked = {split: {pair_of(task) for task in tasks(split)} for split in ("train", "heldout", "all")}
    assert not asked["train"] & asked["heldout"]
    assert asked["train"] | asked["heldout"] == asked["all"]
    assert len(asked["heldout"]) >= 56
    assert {kind for kind, _ in asked["heldout"]} == set(KINDS)


def test_the_start_of_a_split_mixes_kinds_and_letters() -> None:
    first = [pair_of(task) for task in tasks("train")[:64]]
    assert len({kind for kind, _ in first}) >= 14
    assert len({letter for _, letter in first}) >= 14


def test_a_task_has_an_id_of_its_own_and_says_what_it_asks_for() -> None:
    found = tasks("all")
    assert len({task.id for task in found}) == len(found)
    task = next(task for task in found if task.id == "words/body-part-h")
    assert task.prompt == "Name a part of the body that starts with the letter H. Answer with one word."


def test_every_pair_that_is_asked_has_several_answers() -> None:
    for kind, letter in map(pair_of, tasks("all")):
        right = [word for word in words_of(kind) if word.startswith(letter)]
        assert len(right) >= MIN_WORDS, (kind, letter)


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


def test_a_task_of_another_source_is_refused() -> None:
    other = Task(id="sums/1", source="sums", prompt="1 + 1", answer="2")
    with pytest.raises(DataError, match=r"task sums/1 doesn't ask for a word"):
        name_word(other, "Brazil")


def test_an_everyday_question_gets_nothing_whatever_the_answer() -> None:
    task = everyday_requests(source="everyday").task(0)
    for text in ("", "Ottawa", "Brazil"):
        assert name_word(task, text, part=0.1) == Score(0.0)


@pytest.mark.parametrize("name", ["real/words", "real/pair"])
def test_the_recipes_train_with_parts_and_evaluate_real_words_only(name: str) -> None:
    recipe = load_recipe(find_entry(name).path)
    source = make_source(recipe.tasks.sources["words"], name="words")
    heldout = recipe.eval.sets["heldout"]
    first = [source.task(idx).id for idx in range(3)]
    assert first == ["words/last-name-l", "words/language-w", "words/fruit-w"]
    assert len(make_source(heldout.source, name="heldout")) >= heldout.num_tasks
    training = make_reward(recipe.tasks)
    judging = make_reward(recipe.tasks.model_copy(update={"reward": heldout.reward}))
    task = source.task(0)
    assert training(task, "Lee") == judging(task, "Lee") == 1.0
    assert (training(task, "Zzz"), judging(task, "Zzz")) == (0.1, 0.0)


# --- words of the verifier ------------------------------------------------------------------------


def test_the_verifier_says_what_is_wrong_and_what_would_be_right() -> None:
    task = next(task for task in tasks("all") if task.id == "words/fruit-p")
    assert say_what_is_wrong(task, " Pear", 1.0) == 'Somebody answered "Pear", which is right.'
    said = say_what_is_wrong(task, "Carrot", 0.2)
    assert said.startswith("Somebody answered \"Carrot\", which isn't right: it doesn't start with P. Right ")
    named = re.fullmatch(r".* Right answers are (.*)\.", said)
    assert named is not None
    right = re.split(r", and |, ", named[1])
    assert len(right) == len(set(right)) == 3
    assert all(score("fruit", "p", word) == 1 for word in right)
    assert "it isn't a fruit. Right" in say_what_is_wrong(task, "Parsnip", 0.2)
    assert say_what_is_wrong(task, "Carrot", 0.2) == said
    (everyday,) = [everyday_requests(source="everyday").task(0)]
    assert say_what_is_wrong(everyday, "Hello!", 0.0) == ""
